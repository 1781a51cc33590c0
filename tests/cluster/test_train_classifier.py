"""Test the README's cross-validation on a real Ray, and trials that fail beside others."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import ray
from classifier_support import arguments, configuration, history, list_runs, named
from safetensors.torch import load_file
from support import training_worker_pids, wait_for
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from jobs.engine.resumption import registered_step
from jobs.engine.worker import EarlyStopping, Validation
from jobs.studies.cross_validation import Row, cross_validate, make_cross_validation
from jobs.studies.trials import Results, Trial, open_parent, run_trials
from jobs.tasks.classifier.config import ClassifierConfig
from pipelines.text.tokenization import train_wordpiece

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def downstream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write an easy task in SentEval's format and an encoder to start from, and return their directory."""
    directory = tmp_path_factory.mktemp("downstream")
    words = {"neg": "bad", "pos": "good"}
    (directory / "CR").mkdir()
    texts = []
    for kind, word in words.items():
        lines = [f"{word} film {'really ' * (number % 4)}{number}" for number in range(20)]
        (directory / "CR" / f"custrev.{kind}").write_text("\n".join(lines))
        texts += lines
    tokenizer = train_wordpiece(texts, 100)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = AutoConfig.for_model(
        "roberta", vocab_size=len(tokenizer), pad_token_id=0, max_position_embeddings=40,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes,
    )  # fmt: skip
    AutoModel.from_config(config).save_pretrained(directory / "encoder")
    tokenizer.save_pretrained(directory / "encoder")
    return directory


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cross-validation")


@pytest.fixture(scope="module")
def results(ray_head: dict[str, str], downstream: Path, storage: Path) -> Results[Row]:
    """Run the README's cross-validation, and return its results."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_ADDRESS", "PATH"):
            patch.setenv(name, ray_head[name])
        return cross_validate(make_cross_validation(configuration(arguments(downstream, storage))))


def test_a_cross_validation(results: Results[Row], downstream: Path, storage: Path) -> None:
    assert not results.failed
    (row,) = results.rows
    assert (len(row.accuracies), row.num_failed) == (2, 0)
    assert "| CR   |" in results.table
    assert (storage / "triple-entropy-small" / "results.md").read_text().strip() == results.table

    # MLflow has one parent run and one run for each trial, however often the trial was started.
    runs = list_runs(results.tracking_uri)
    (parent,) = (run for run in runs if "mlflow.parentRunId" not in run.data.tags)
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    cells = configuration(arguments(downstream, storage)).cells()
    assert sorted(run.info.run_name for run in children) == sorted(cell.run.name for cell in cells)
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert len(runs) == 3

    # The export is a classifier for Transformers.
    export = Path(cells[-1].run.export_directory)
    model = AutoModelForSequenceClassification.from_pretrained(export)
    assert model.config.id2label == {0: "negative", 1: "positive"}
    assert AutoTokenizer.from_pretrained(export).encode("good film")
    assert load_file(export / "model.safetensors").keys() == dict(model.named_parameters()).keys()


def failing_watches(cell: ClassifierConfig, marker: Path) -> dict[str, EarlyStopping | None]:
    """Return name of a trial → watch that makes its worker fail once, fail always, die, or (None) go on.

    A worker asks the watch after every validation. The classes are defined in this function, because the processes of
    trials cannot import the module of the test.

    Args:
        cell: configuration of the trials, apart from their names.
        marker: file that exists as soon as the worker that fails once has failed.
    """

    class Raises:
        def __init__(self, directory: str, *, always: bool) -> None:
            self.directory, self.always = directory, always

        def reason_to_stop(self, validations: Sequence[Validation]) -> str:
            if len(validations) == 4 and (self.always or not os.path.exists(marker)):
                if not self.always:
                    marker.touch()
                # Checkpoints are written in the background, which takes longer than these steps on a busy machine.
                for _ in range(600):
                    if registered_step(self.directory):
                        break
                    time.sleep(0.1)
                raise OSError("the disk is gone")
            return ""

    class Kills:
        def reason_to_stop(self, validations: Sequence[Validation]) -> str:
            os.kill(os.getpid(), signal.SIGKILL)
            return ""

    return {
        "once": Raises(named(cell, "once").run.directory, always=False),
        "always": Raises(named(cell, "always").run.directory, always=True),
        "killed": Kills(),
        "fine": None,
    }


@pytest.mark.long
def test_trials_whose_workers_die_are_restarted_or_failed_and_the_others_go_on(
    cluster: dict[str, str], downstream: Path, tmp_path: Path
) -> None:
    changes = ["--run.max-restarts", "1", "--run.num-steps", "24", "--validation.every", "4"]
    words = [*arguments(downstream, tmp_path), *changes]
    work = make_cross_validation(configuration(words))
    parent = open_parent(
        work.config, work.config.tracking, uri=work.examples[0].tracking_uri, num_trials=4, data_sets={}
    )
    assert parent is not None
    cell = work.cells[0]
    watches = failing_watches(cell, tmp_path / "raised")
    trials = [Trial(config=named(cell, name), early_stopping=watch) for name, watch in watches.items()]
    outcomes = run_trials(
        [Trial(config=named(cell, "later"), after="always"), Trial(config=named(cell, "next"), after="fine"), *trials],
        directory=str(tmp_path / "trials"),
        parent=parent,
        num_concurrent=2,
        describe=lambda outcome: f"{outcome['num_steps']}",
    )
    assert outcomes.failed.pop("later") == "always, the run that it starts from, failed"  # type: ignore[attr-defined]
    assert outcomes.finished["next"]["num_steps"] == 24
    assert outcomes.finished.keys() == {"once", "fine", "next"}, "\n".join(outcomes.failed.values())
    assert outcomes.finished["once"]["resumed_from_step"] in (4, 8, 12)
    assert outcomes.finished["fine"]["resumed_from_step"] == 0
    assert outcomes.failed.keys() == {"always", "killed"}
    assert "the disk is gone" in outcomes.failed["always"]
    assert "died" in outcomes.failed["killed"]
    found = {
        run.info.run_name: run.info.status for run in list_runs(parent.uri) if "mlflow.parentRunId" in run.data.tags
    }
    assert found == {"once": "FINISHED", "always": "FAILED", "killed": "FAILED", "fine": "FINISHED", "next": "FINISHED"}
    wait_for(lambda: ray.available_resources()["CPU"] == ray.cluster_resources()["CPU"], seconds=60)
    assert not training_worker_pids(cluster)
    # The trial that was restarted has the losses of the trial that ran without an error.
    once, fine = (history(named(cell, name), "train/loss") for name in ("once", "fine"))
    assert once == pytest.approx(fine, abs=1e-6)
