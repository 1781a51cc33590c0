"""Run the README's commands on text in a directory like its reader's, with options added that make them short."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from readme_support import README, lines_like, recipe, run_line, run_notebook
from server_support import BIN, free_port, wait_for_ports
from support import FROZEN_OPTIONS, ROOT, outcome_of, runs_of
from task_support import SENTENCE_OPTIONS

pytestmark = pytest.mark.cluster

HEADROOM_OPTIONS = ["--max-documents", "12", "--tokens-per-document", "100"]


def test_what_make_run_runs(home: Path, reference: dict[str, Any]) -> None:
    sample_data, _, _, train, *_ = recipe("run")
    run_line(sample_data, "--directory", "sample", "--parts", "text", "code", "--num-bytes", "1000000")
    assert (home / "sample" / "code" / "code-00000.jsonl.zst").is_file()
    assert (home / "sample" / "tokenizer" / "tokenizer.json").is_file()
    # This command is the training run that all tests share.
    assert train == ".venv/bin/python -m jobs.train_lm gpt2-scratch-small"
    assert reference["run"] == "gpt2-scratch-small"


@pytest.mark.long
def test_preparing(home: Path) -> None:
    run_line(*lines_like("jobs.prepare_text *"))
    run_line(*lines_like("jobs.prepare_images *"))
    prepared = home / "runs" / "prepared"
    assert list(prepared.glob("train-128-*/manifest.json"))
    assert list(prepared.glob("train-pairs-*/manifest.json"))


def test_measuring_headroom(home: Path, reference: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = lines_like("jobs.calibrate headroom * --text *")
    for _ in range(2):
        run_line(line, *HEADROOM_OPTIONS)
    values = json.loads((home / "headroom" / "headroom.json").read_text())
    shown = capsys.readouterr().out
    assert shown.count(values["verdict"]) == 2
    assert re.search(r"(\d+) of \1 archives are complete", shown)  # The second time the model reads nothing.
    assert values["num_documents"] >= values["folds"] == 5
    assert 0 < values["num_tokens"] <= 100 * values["num_documents"]
    assert (home / "headroom" / "reliability.png").stat().st_size > 5000
    uri = f"sqlite:///{home}/runs/mlflow.db"
    (run,) = runs_of(uri, "headroom")
    assert run.data.metrics["both/gain_mnat"] == pytest.approx(1000 * values["per_token"]["both"]["gain"]["mean"])
    artifacts = {file.path for file in MlflowClient(uri).list_artifacts(run.info.run_id)}
    assert artifacts == {"headroom.json", "reliability.png"}


@pytest.mark.long
def test_the_notebook_from_a_model_to_its_tempnet(home: Path, reference: dict[str, Any]) -> None:
    short = ["--run.num-steps=10", "--temperature.num-calibration-tokens=1024", "--workers.num-workers=1"]
    options = {"jobs.calibrate headroom *": HEADROOM_OPTIONS, "jobs.train_lm frozen-small *": [*FROZEN_OPTIONS, *short]}
    shown = run_notebook("your-model.ipynb", home, options)
    rivals = outcome_of(home, "my-tempnet")["rivals"]
    assert json.loads((home / "headroom" / "headroom.json").read_text())["verdict"] in shown
    for rival in ("best_constant", "mean_shift"):
        assert f"TempNet is better by {rivals[f'cross_entropy/{rival}_gain']:+.5f} ± " in shown
    assert 0 < len(re.findall(r"^(\d+\.\d{3})  '", shown, re.MULTILINE)) <= 24  # generated tokens
    assert shown.count("<Figure size") == 1


def test_generating(home: Path, reference: dict[str, Any]) -> None:
    subprocess.run(*lines_like("echo * > prompts.txt"), shell=True, check=True)
    run_line(*lines_like("jobs.generate *"))
    (record,) = map(json.loads, (home / "texts.jsonl").read_text().splitlines())
    assert record["prompt"] == "The temperature of a softmax"
    assert len(record["tau"]) == len(record["tokens"]) <= 32
    assert 'title="τ ' in (home / "texts.html").read_text()
    run_line(*lines_like("jobs.calibrate tau-max *"))


def test_the_python_of_the_readme_generates(home: Path, reference: dict[str, Any]) -> None:
    snippets = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (snippet,) = (text for text in snippets if "load_causal_lm" in text)
    scope: dict[str, Any] = {}
    exec(snippet, scope)
    generated = scope["result"].sequences[0, scope["prompt"]["input_ids"].shape[1] :]
    assert len(generated) == 16 or generated[-1] == scope["tokenizer"].eos_token_id
    assert scope["result"].temperatures.shape == (1, len(generated))


def test_evaluating(home: Path, reference: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    run_line(*lines_like("jobs.evaluate_lm *"))
    results = home / "runs" / "evaluation" / "results.json"
    columns = {column["temperature"]: column["metrics"] for column in json.loads(results.read_text())["columns"]}
    assert columns.keys() == {"one", "fixed:0.8", "tempnet"}
    assert len({metrics["wikitext/word_perplexity"] for metrics in columns.values()}) == 3
    assert (results.parent / "results.md").read_text() in capsys.readouterr().out


def test_predicting_temperatures_of_texts(home: Path, reference: dict[str, Any]) -> None:
    page, table = lines_like("jobs.predict_temperatures * --text *")
    run_line(page)
    assert (home / "temperatures.html").read_text().count('title="τ ') > 500
    run_line(table)
    rows = [row for part in (home / "temperatures").glob("part-*.parquet") for row in pq.read_table(part).to_pylist()]
    assert len(rows) == 3 * 20  # The command takes 20 documents of each of 3 archives.
    assert all(0.001 <= row["tau_mean"] <= 2.0 for row in rows)


@pytest.mark.long
def test_analysing_groups_of_texts(home: Path, reference: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    (home / "subjqa").mkdir()
    answers = ["ANSWERNOTFOUND" if number % 8 == 7 else f"abc def {number}" for number in range(40)]
    lines = [f"ab cd ef{number}?,{answer},{1 + number % 5},1" for number, answer in enumerate(answers)]
    titles = "question,human_ans_spans,question_subj_level,answer_subj_level"
    (home / "subjqa" / "test.csv").write_text("\n".join([titles, *lines]))
    run_line(*lines_like("jobs.analyse subjectivity *"))
    assert "35 records; left out: 5 without an answer" in capsys.readouterr().out
    values = json.loads((home / "runs" / "subjectivity" / "results.json").read_text())
    rows = pq.read_table(home / "runs" / "subjectivity" / "temperatures").to_pylist()
    assert values["tau_mean"] == pytest.approx(sum(row["tau_mean"] for row in rows) / 35)


def test_training_and_scoring_a_sentence_encoder(home: Path) -> None:
    _, with_tempnet = lines_like("jobs.train_sentences *")
    alone = ["--run.num-steps=4", "--workers.num-workers=1", "--workers.zero-stage=0"]
    run_line(
        with_tempnet, *SENTENCE_OPTIONS, *alone, "--run.name=declutr-small-small"
    )  # whose export the page evaluates
    assert outcome_of(home, "declutr-small-small")["num_steps"] == 4
    task = home / "senteval" / "data" / "downstream" / "CR"
    task.mkdir(parents=True)
    for name, word in (("custrev.neg", "bad"), ("custrev.pos", "good")):
        (task / name).write_text("".join(f"{word} film {number}\n" for number in range(20)))
    run_line(*lines_like("jobs.evaluate_sentences *"))
    (cell,) = (home / "runs" / "sentence-evaluation" / "cells").glob("*.json")
    figures = json.loads(cell.read_text())
    assert figures["num_sentences"] == 40
    results = json.loads((home / "runs" / "sentence-evaluation" / "results.json").read_text())
    assert results["columns"][0]["metrics"] == {f"CR/{name}": value for name, value in figures.items()} | {
        "CR/num_unreadable": 0
    }


@contextmanager
def mlflow_server(command: list[str], port: int, directory: Path, environment: dict[str, str]) -> Iterator[str]:
    """Start an MLflow server, check that it listens on loopback only, yield its URI, and check that it can be ended."""
    with (directory / f"mlflow-{port}.log").open("w+") as log:
        server = subprocess.Popen(
            command, cwd=directory, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            wait_for_ports(server, port)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60) as answer:
                assert answer.read() == b"OK"
            yield f"http://127.0.0.1:{port}"
            listeners = {
                connection.laddr.ip
                for process in [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
                for connection in process.net_connections("tcp")
                if connection.status == psutil.CONN_LISTEN
            }
            assert listeners == {"127.0.0.1"}
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(timeout=60)


@pytest.mark.long
def test_mlflow_is_served_on_loopback(home: Path, reference: dict[str, Any]) -> None:
    assert lines_like("make mlflow") == ["make mlflow"]
    (line,) = recipe("mlflow")
    port = free_port()
    assert line.count(f"{ROOT}/runs/") == line.count(" 5000 ") == 1
    line = line.replace(f"{ROOT}/runs/", f"{home}/runs/").replace(" 5000 ", f" {port} ")
    command = line.split()
    with mlflow_server([str(BIN / Path(command[0]).name), *command[1:]], port, home, dict(os.environ)) as uri:
        assert "Default" in {experiment.name for experiment in MlflowClient(uri).search_experiments()}


@pytest.mark.long
def test_mlflow_is_served_for_a_team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite takes the place of PostgreSQL, which need not be installed on a machine that runs tests."""
    assert lines_like("make mlflow-team") == ["make mlflow-team"]
    (script,) = re.findall(r"^\t.*(infra/mlflow/\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    port = free_port()
    settings = {
        "MLFLOW_PORT": str(port),
        "MLFLOW_DATABASE": f"sqlite:///{tmp_path}/team.db",
        "MLFLOW_ARTIFACTS": str(tmp_path / "artifacts"),
        "MLFLOW_WORKERS": "1",
        "MLFLOW_LOGINS": str(tmp_path / "logins"),
    }

    def add_user(name: str) -> dict[str, str]:
        """Make a login by the script for it, and return the environment variables that it prints."""
        variables = os.environ | settings | {"MLFLOW_TRACKING_URI": uri}
        script = str(ROOT / "infra" / "mlflow" / "add_user.sh")
        done = subprocess.run([script, name], env=variables, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return dict(word.split("=", 1) for word in done.stdout.split()[1:])

    def log_in(login: dict[str, str]) -> None:
        for name, value in login.items():
            monkeypatch.setenv(name, value)

    with mlflow_server([str(ROOT / script)], port, tmp_path, os.environ | settings) as uri:
        for name in ("USERNAME", "PASSWORD"):
            monkeypatch.delenv(f"MLFLOW_TRACKING_{name}", raising=False)
        with pytest.raises(MlflowException, match="not authenticated"):
            MlflowClient(uri).search_experiments()
        ann, bob = add_user("ann"), add_user("bob")
        log_in(ann)
        experiment = MlflowClient(uri).create_experiment("language-models")
        log_in(bob)
        run = MlflowClient(uri).create_run(experiment).info.run_id
        MlflowClient(uri).log_metric(run, "loss", 1.5)
        with pytest.raises(MlflowException, match="Permission denied"):
            MlflowClient(uri).delete_experiment(experiment)
        log_in({**ann, "MLFLOW_TRACKING_PASSWORD": bob["MLFLOW_TRACKING_PASSWORD"]})
        with pytest.raises(MlflowException, match="not authenticated"):
            MlflowClient(uri).get_run(run)
    logins = tmp_path / "logins"
    assert all(file.stat().st_mode & 0o077 == 0 for file in [logins, *logins.iterdir()])
    variables = os.environ | {"MLFLOW_DATABASE": "postgresql://me:secret@db/mlflow"}
    refused = subprocess.run([str(ROOT / script)], env=variables, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2
    assert "secret" not in refused.stderr
