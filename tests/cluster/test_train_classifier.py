"""Test the README's cross-validation on a real Ray, and trials that fail beside others."""

from __future__ import annotations

import json
import os
import shlex
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from readme_support import lines_like
from support import (
    at_the_same_time,
    configure,
    runs_of,
    sweep_runs,
    training_worker_pids,
    wait_for,
    wait_for_free_cpus,
    with_sections,
)
from transformers import AutoConfig, AutoModel

from jobs.engine.lease import LEASE_FILE
from jobs.engine.metrics import TrackedRun
from jobs.engine.tracking import find_child
from jobs.studies.cross_validation import CrossValidation, cross_validate, make_cross_validation
from jobs.studies.trials import Trial, open_parent, run_trials
from jobs.tasks.classifier.config import ClassifierConfig
from jobs.tasks.presets.classifiers import PRESETS
from pipelines.text.tokenization import train_wordpiece

pytestmark = pytest.mark.cluster

SETTINGS = [
    "--data.tasks", "CR", "--data.num-examples", "0", "--grid.seeds", "2", "--grid.num-folds", "2", "--grid.no-with-baseline",
    "--grid.num-centers", "3", "--grid.keep-models", "--grid.num-concurrent", "1", "--run.num-steps", "12",
    "--run.checkpoint-every", "4", "--run.log-every", "4", "--run.max-restarts", "0", "--optimizer.batch-size", "8",
    # With a smaller epsilon, Adam would make full-sized steps of gradients that are only rounding errors.
    "--optimizer.epsilon", "1e-4", "--workers.precision", "fp32",
]  # fmt: skip


def make(downstream: Path, storage: Path, *changes: str) -> CrossValidation:
    """Return the cross-validation of the README's line, with the paths and settings of this test."""
    (line,) = lines_like("jobs.train_classifier *")
    words = line.replace("senteval/data/downstream", str(downstream)).replace(" --data.tasks TREC CR", "")
    paths = ["--model.path", str(downstream / "encoder"), "--run.storage", str(storage)]
    words = [*shlex.split(words)[3:], *paths, *SETTINGS, *changes]
    return make_cross_validation(configure(PRESETS, words))


@pytest.fixture(scope="module")
def downstream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write an easy task in SentEval's format and an encoder to start from, and return their directory."""
    directory = tmp_path_factory.mktemp("downstream")
    (directory / "CR").mkdir()
    texts = []
    for kind, word in (("neg", "bad"), ("pos", "good")):
        lines = [f"{word} film {'really ' * (number % 4)}{number}" for number in range(20)]
        (directory / "CR" / f"custrev.{kind}").write_text("\n".join(lines))
        texts += lines
    tokenizer = train_wordpiece(texts, 100)
    config = AutoConfig.for_model(
        "roberta", vocab_size=len(tokenizer), pad_token_id=0, max_position_embeddings=40, hidden_size=16,
        num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    AutoModel.from_config(config).save_pretrained(directory / "encoder")
    tokenizer.save_pretrained(directory / "encoder")
    return directory


def test_a_cross_validation(cluster: dict[str, str], downstream: Path, tmp_path: Path) -> None:
    work = make(downstream, tmp_path)
    results = cross_validate(work)
    assert not results.failed
    (row,) = results.rows
    assert (len(row.accuracies), row.num_failed) == (2, 0)
    assert "| CR   |" in results.table
    assert (tmp_path / "triple-entropy-small" / "results.md").read_text().strip() == results.table

    # MLflow has one parent run and one run for each trial, however often the trial was started.
    _, children = sweep_runs(results.tracking_uri, "classifiers", "triple-entropy-small")
    assert children.keys() == {cell.run.name for cell in work.cells}
    assert len(runs_of(results.tracking_uri, "classifiers")) == 3


def kill_once(parent: TrackedRun, *waiting: ClassifierConfig) -> None:
    """Kill the process of every run once, as soon as the run is in MLflow."""
    alive = list(waiting)

    def are_killed() -> bool:
        for config in list(alive):
            with suppress(OSError, ValueError):
                held = json.loads(Path(config.run.directory, LEASE_FILE).read_text())
                if find_child(parent, config.run.name):
                    os.kill(held["pid"], signal.SIGKILL)
                    alive.remove(config)
        return not alive

    wait_for(are_killed)


@pytest.mark.long
def test_a_trial_whose_process_dies_is_restarted_or_fails_alone_and_with_it_what_starts_from_it(
    cluster: dict[str, str], downstream: Path, tmp_path: Path
) -> None:
    work = make(downstream, tmp_path, "--validation.every", "4")
    parent = open_parent(
        work.config, work.config.tracking, uri=work.examples[0].tracking_uri, num_trials=5, data_sets={}
    )
    assert parent is not None

    def named(name: str, **run: int) -> ClassifierConfig:
        config: ClassifierConfig = with_sections(work.cells[0], {"run": {"name": name, **run}})
        return config

    after = {"restarted": "", "later": "killed", "next": "fine", "killed": "", "fine": ""}
    trials = [Trial(config=named(name, max_restarts=int(name == "restarted")), after=after[name]) for name in after]
    directory, options = str(tmp_path / "trials"), {"parent": parent, "num_concurrent": 2, "describe": str}
    with at_the_same_time(lambda: kill_once(parent, named("restarted"), named("killed"))):
        outcomes = run_trials(trials, directory=directory, **options)
    finished = {name: outcome["num_steps"] for name, outcome in outcomes.finished.items()}
    assert finished == {"fine": 12, "next": 12, "restarted": 12}
    assert "died" in outcomes.failed["killed"]
    assert outcomes.failed["later"] == "killed, the run that it starts from, failed"
    runs = runs_of(parent.uri, "classifiers")
    found = {run.info.run_name: run.info.status for run in runs if "mlflow.parentRunId" in run.data.tags}
    assert found == {"killed": "FAILED", **dict.fromkeys(finished, "FINISHED")}
    wait_for_free_cpus()
    assert not training_worker_pids(cluster["HEAD_PID"])
