"""Test evaluation on Ray: figures do not depend on the workers, units are done once, and MLflow and the table agree."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluation_support import LAMBADA, QUESTIONS, TEXT, BruteForce, make_export, write_lines
from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer
from mlflow import MlflowClient
from scipy.stats import spearmanr

from jobs import evaluate_lm
from jobs.engine.config import TrackingSection
from jobs.scoring import stages
from jobs.scoring.config import LanguageModelPool
from jobs.scoring.language_models.config import EvaluateConfig
from jobs.scoring.language_models.launch import evaluate
from jobs.scoring.language_models.windows import num_words, wikitext_pages
from jobs.scoring.results import Results
from jobs.scoring.stages import ScoringFailedError

pytestmark = [pytest.mark.cluster, pytest.mark.long]

TEMPERATURES = ("one", "tempnet", "fixed:0.7")
EXAMPLES = Path(__file__).parents[2] / "benchmarks" / "tasks"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("evaluation")
    (directory / "text.txt").write_text(TEXT)
    write_lines(directory / "arc_easy_test.jsonl", QUESTIONS)
    return {
        "a": make_export(directory / "a" / "export"),
        "b": make_export(directory / "b" / "export", seed=1),
        "wikitext": str(directory / "text.txt"),
        "lambada": write_lines(directory / "lambada.jsonl", LAMBADA),
        "data_dir": str(directory),
    }


@pytest.fixture
def config(files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return `config(name, num_workers, **changes)`, of two models, three temperatures, three tasks and many slices."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr("jobs.scoring.language_models.windows.NUM_TOKENS_PER_SLICE", 48)

    def make(name: str, num_workers: int, **changes: Any) -> EvaluateConfig:
        defaults: dict[str, Any] = {
            "models": (files["a"], files["b"]),
            "temperatures": TEMPERATURES,
            "wikitext": files["wikitext"],
            "lambada": files["lambada"],
            "tasks": ("local_arc_easy",),
            "include_path": str(EXAMPLES),
            "data_dir": files["data_dir"],
            "storage": str(tmp_path / "runs"),
            "tracking": TrackingSection(enabled=False),
            "workers": LanguageModelPool(num_workers=num_workers),
            "batch_size": 3,
        }
        return EvaluateConfig(name=name, **{**defaults, **changes})

    return make


def figures(results: Results) -> dict[tuple[str, str], float]:
    return {(column.title, name): value for column in results.columns for name, value in column.metrics.items()}


def test_one_worker_two_workers_and_a_resumed_run_agree(
    cluster: dict[str, str], config: Any, files: dict[str, str], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    one = figures(evaluate(config("one-worker", 1)))
    two = figures(evaluate(config("two-workers", 2, temperatures=TEMPERATURES[::-1])))
    assert one.keys() == two.keys()
    assert two == pytest.approx(one, rel=1e-9)

    # The figures are those of brute force.
    brute = BruteForce(files["a"])
    pages = wikitext_pages(TEXT)
    rows = [row for page in pages for row in brute.document(wikitext_detokenizer({"page": page}), "tempnet")]
    nll, tau, entropy, _ = (np.array(values) for values in zip(*rows, strict=True))
    expected = {
        "wikitext/word_perplexity": math.exp(nll.sum() / sum(map(num_words, pages))),
        "wikitext/token_perplexity": math.exp(nll.mean()),
        "wikitext/tau_mean": tau.mean(),
        "wikitext/tau_std": tau.std(),
        "wikitext/tau_entropy_spearman": spearmanr(tau, entropy).statistic,
    }
    for name, value in expected.items():
        assert one["a · tempnet", name] == pytest.approx(value, rel=1e-3), name
    assert ("a · one", "wikitext/tau_mean") not in one

    # If some units are lost, only these are done again, in whatever order the temperatures are named.
    capsys.readouterr()
    units = tmp_path / "runs" / "one-worker" / "units"
    lost = [path for path in sorted(units.glob("*.json")) if json.loads(path.read_text())["task"] == "lambada"]
    times = {path: path.stat().st_mtime_ns for path in units.glob("*.json")}
    for path in lost:
        path.unlink()
    again = figures(evaluate(config("one-worker", 2, temperatures=("fixed:0.7", "one", "tempnet"))))
    assert again == pytest.approx(one, rel=1e-9)
    assert {path for path in times if path.stat().st_mtime_ns != times[path]} == set(lost)
    assert len(lost) == 2 * 2 * len(TEMPERATURES)  # This is the number of models × slices × temperatures.
    assert f"{len(times) - len(lost)} of them finished before" in capsys.readouterr().out

    # If no unit is lost, nothing is done.
    def start_ray() -> None:
        raise AssertionError("work was given out")

    monkeypatch.setattr(stages, "start_ray", start_ray)
    assert figures(evaluate(config("one-worker", 1, batch_size=7))) == again


def test_a_command_prints_the_table_and_logs_a_run_for_every_column(
    cluster: dict[str, str], config: Any, files: dict[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    storage = tmp_path / "runs"
    arguments = [
        "--models", files["a"], files["b"], "--temperatures", "one", "tempnet:1.2", "--wikitext", files["wikitext"],
        "--limit", "1", "--storage", str(storage), "--name", "ours", "--workers.num-workers", "2",
    ]  # fmt: skip
    for _ in range(2):  # The second evaluation finds its units and its MLflow runs.
        assert evaluate_lm.main(arguments) == 0
    printed = capsys.readouterr().out
    table = (storage / "ours" / "results.md").read_text()
    assert table in printed
    for title in ("a · one", "a · tempnet:1.2", "b · one", "b · tempnet:1.2", "wikitext word perplexity", "mean τ"):
        assert title in table
    results = json.loads((storage / "ours" / "results.json").read_text())

    client = MlflowClient(f"sqlite:///{storage}/mlflow.db")
    experiment = client.get_experiment_by_name("evaluation")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = {run.info.run_name: run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id}
    assert len(runs) == 1 + len(children) == 5
    assert {artifact.path for artifact in client.list_artifacts(parent.info.run_id)} == {"results.md", "results.json"}
    for column in results["columns"]:
        run = children[column["title"]]
        assert run.info.status == "FINISHED"
        assert run.data.params["temperature"] == column["temperature"]
        assert run.data.metrics == pytest.approx(column["metrics"])


def test_a_task_that_fails_is_named_beside_the_figures_of_the_others_and_is_all_that_is_run_again(
    cluster: dict[str, str], config: Any, files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "own.yaml").write_text((EXAMPLES / "local_arc_easy.yaml").read_text().replace("choices\n", "no_field\n"))
    settings = config(
        "failing", 1, models=(files["a"],), temperatures=("one",), include_path=str(tasks), tasks=("local_arc_easy",)
    )
    with pytest.raises(ScoringFailedError, match=r"^a · local_arc_easy · one: ValueError: .+$") as failed:
        evaluate(settings)
    assert "wikitext word perplexity" in failed.value.table
    assert "lambada acc" in failed.value.table
    assert "arc_easy" not in failed.value.table
    results = json.loads((tmp_path / "runs" / "failing" / "results.json").read_text())
    assert results["failed"].keys() == {"a · local_arc_easy · one"}
    assert "wikitext/word_perplexity" in results["columns"][0]["metrics"]
    units = tmp_path / "runs" / "failing" / "units"
    done = {path: json.loads(path.read_text())["task"] for path in units.glob("*.json")}
    assert set(done.values()) == {"wikitext", "lambada"}

    # The command prints the table and the reason, and exits with 1. Once the task is mended, only that task is run.
    arguments = [
        "--models", files["a"], "--temperatures", "one", "--wikitext", files["wikitext"], "--lambada", files["lambada"],
        "--tasks", "local_arc_easy", "--include-path", str(tasks), "--data-dir", files["data_dir"], "--name", "failing",
        "--storage", str(tmp_path / "runs"), "--tracking.no-enabled",
    ]  # fmt: skip
    capsys.readouterr()
    assert evaluate_lm.main(arguments) == 1
    said = capsys.readouterr().out
    assert "| wikitext word perplexity" in said
    assert "  FAILED    a · local_arc_easy · one: " in said
    times = {path: path.stat().st_mtime_ns for path in done}
    (tasks / "own.yaml").write_text((EXAMPLES / "local_arc_easy.yaml").read_text())
    assert evaluate_lm.main(arguments) == 0
    assert "local_arc_easy acc" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in done} == times
