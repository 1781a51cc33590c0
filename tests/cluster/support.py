"""Provide what the cluster tests share beside fixtures: tiny data and runs, ways to run and to kill, comparisons."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import zstandard
from mlflow import MlflowClient
from mlflow.entities import LoggedModel, Run

from jobs.engine.command_line import parse_preset
from jobs.engine.metrics import TrackedRun, metric_history
from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.presets.language_models import PRESETS
from pipelines.text.tokenization import train_bpe

ROOT = Path(__file__).parents[2]

LANGUAGE_MODEL_OPTIONS = [
    "--run.num-steps=40", "--run.checkpoint-every=5", "--run.log-every=10", "--run.max-restarts=1",
    "--data.context-length=64", "--model.hidden-size=64", "--model.num-layers=2", "--model.num-heads=4",
    "--temperature.target-entropy=3", "--temperature.hidden-size=32", "--temperature.num-prototypes=16",
    "--optimizer.batch-size=8", "--optimizer.learning-rate-base=3e-3", "--optimizer.learning-rate-tempnet=1e-2",
    "--workers.precision=fp32", "--workers.num-threads=1", "--workers.zero-stage=2",
    "--validation.every=20", "--validation.num-blocks=32", "--validation.num-oracle-tokens=512",
]  # fmt: skip
"""Options that make `gpt2-scratch-small` 40 steps of a 2-layer GPT-2 under ZeRO 2; the preset has two workers."""
FROZEN_OPTIONS = [one for one in LANGUAGE_MODEL_OPTIONS if not one.startswith(("--model.", "--temperature.target"))]
"""The same for a run on a frozen base, which has its own sizes."""


def write_jsonl_zst(path: Path, texts: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"text": text, "meta": {}}) + "\n" for text in texts)
    path.write_bytes(zstandard.ZstdCompressor().compress(lines.encode()))


def write_corpus(directory: Path) -> Path:
    """Write a few hundred documents of a small language with structure to learn, and return the directory.

    It holds `train/`, `validation/` and `tokenizer/`.
    """
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefgh"), size=rng.integers(2, 7))) for _ in range(300)]
    follows = rng.integers(0, 300, size=(300, 4))

    def document() -> str:
        word, sentence = int(rng.integers(300)), []
        for _ in range(int(rng.integers(20, 120))):
            sentence.append(words[word])
            word = int(follows[word, rng.choice(4, p=[0.6, 0.25, 0.1, 0.05])])
        return " ".join(sentence)

    texts = [document() for _ in range(400)]
    for shard in range(3):
        write_jsonl_zst(directory / "train" / f"part-{shard}.jsonl.zst", texts[shard:360:3])
    write_jsonl_zst(directory / "validation" / "part-0.jsonl.zst", texts[360:])
    train_bpe(texts[:360], 512).save_pretrained(directory / "tokenizer")
    return directory


def corpus_lines(corpus: Path) -> list[bytes]:
    """Return the training documents of a corpus as lines of JSON."""
    files = sorted((corpus / "train").iterdir())
    return [line for file in files for line in zstandard.decompress(file.read_bytes()).splitlines(keepends=True)]


def with_sections(config: Any, sections: Mapping[str, dict[str, Any]]) -> Any:
    """Return a configuration with other values in some sections."""
    return replace(
        config, **{section: replace(getattr(config, section), **values) for section, values in sections.items()}
    )


def configure(presets: Any, words: list[str], sections: Mapping[str, dict[str, Any]] | None = None) -> Any:
    """Return the configuration that a preset and options give, as they are typed, with other values in some sections."""
    return with_sections(parse_preset(presets, words, job="", purpose="")[0], sections or {})


def places(data: Path, storage: Path, name: str) -> list[str]:
    """Return the options of a run on the data in a directory, whose prepared form all runs on them share."""
    return [
        f"--run.name={name}", f"--run.storage={storage}", f"--run.prepared={data}/prepared", f"--data.train={data}/train",
        f"--data.validation={data}/validation", f"--data.tokenizer={data}/tokenizer",
    ]  # fmt: skip


def tiny_options(corpus: Path, storage: Path, name: str) -> list[str]:
    """Return `gpt2-scratch-small` with `LANGUAGE_MODEL_OPTIONS` under another name, as it is typed."""
    return ["gpt2-scratch-small", *LANGUAGE_MODEL_OPTIONS, *places(corpus, storage, name)]


def tiny_config(corpus: Path, storage: Path, name: str, **sections: dict[str, Any]) -> LanguageModelConfig:
    """Return the configuration of `tiny_options`; `sections` maps the name of a section to the fields to override in it."""
    config: LanguageModelConfig = configure(PRESETS, tiny_options(corpus, storage, name), sections)
    return config


def run_until(
    condition: Callable[[], bool], words: list[str], environment: dict[str, str], log: Path, by: int = signal.SIGKILL
) -> int:
    """Run a module with arguments, send it a signal as soon as a condition holds, and return its exit status.

    It runs in a process of its own, because a Ray whose data sets are left in mid-stream may take its driver down.
    """
    with log.open("w") as said:
        process = subprocess.Popen([sys.executable, "-m", *words], cwd=ROOT, env=environment, stdout=said, stderr=said)
    try:
        wait_for(lambda: condition() or process.poll() is not None)
        process.send_signal(by)
        process.wait(timeout=120)
    finally:
        process.kill()
        process.wait()
    time.sleep(3)  # Ray needs some time to end the tasks of a dead driver.
    return process.returncode


@contextmanager
def at_the_same_time(action: Callable[[], None]) -> Iterator[None]:
    """Run an action in a thread beside the block; if it raises an exception, raise that when the block has ended."""
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(action)
        yield
        done.result()


def wait_for(condition: Callable[[], bool], seconds: float = 400) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.02)


def wait_for_free_cpus() -> None:
    """Wait until no trial holds a CPU, as trials that were ended must not."""
    import ray

    wait_for(lambda: ray.available_resources()["CPU"] == ray.cluster_resources()["CPU"], seconds=60)


def training_worker_pids(node: int | str) -> list[int]:
    """Return the process IDs of Ray Train's workers, oldest first, below the process of a node of Ray."""
    found: list[tuple[float, int]] = []
    for process in psutil.Process(int(node)).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # A process may end while this loop looks at it.
            if "".join(process.cmdline()[:1]).startswith("ray::RayTrainWorker"):
                found.append((process.create_time(), process.pid))
    return [pid for _, pid in sorted(found)]


def last_checkpoint(run: str | Path) -> int:
    """Return the step of the last checkpoint that is noted in the directory of a run; 0 if there is none."""
    record = Path(run) / "checkpoints.json"
    names = re.findall(r"checkpoint-(\d{8})", record.read_text()) if record.exists() else []
    return max(map(int, names), default=0)


def outcome_of(home: Path, name: str) -> dict[str, Any]:
    """Return the outcome of a finished run in the directory of the README's reader."""
    return json.loads((home / "runs" / name / "outcome.json").read_text())


def history(outcome: dict[str, Any], key: str) -> dict[int, float]:
    """Return step → value of a metric of a run in MLflow."""
    return metric_history(TrackedRun(uri=outcome["tracking_uri"], run_id=outcome["mlflow_run_id"]), key)


def models_of(outcome: dict[str, Any]) -> dict[str, LoggedModel]:
    """Return name → model for the models that MLflow shows under a run."""
    client = MlflowClient(outcome["tracking_uri"])
    experiment = client.get_run(outcome["mlflow_run_id"]).info.experiment_id
    models = client.search_logged_models([experiment])
    return {model.name: model for model in models if model.source_run_id == outcome["mlflow_run_id"]}


def runs_of(uri: str, experiment: str) -> list[Run]:
    """Return the runs of an experiment in MLflow."""
    client = MlflowClient(uri)
    (found,) = client.search_experiments(filter_string=f"name = '{experiment}'")
    return list(client.search_runs([found.experiment_id]))


def sweep_runs(uri: str, experiment: str, name: str) -> tuple[Run, dict[str, Run]]:
    """Return MLflow's run of a sweep, and name → run for those of its trials, which are finished as it is."""
    runs = runs_of(uri, experiment)
    (parent,) = (run for run in runs if run.info.run_name == name)
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert {run.info.status for run in [parent, *children]} == {"FINISHED"}
    by_name = {run.info.run_name: run for run in children}
    assert len(by_name) == len(children)
    return parent, by_name


def assert_same_losses(outcome: dict[str, Any], reference: dict[str, Any], tolerance: float = 1e-6) -> None:
    """Assert that every step, before and after the kill, has the batch and the loss of the uninterrupted run."""
    losses, expected = history(outcome, "train/loss"), history(reference, "train/loss")
    assert sorted(losses) == sorted(expected)
    for step in expected:
        assert losses[step] == pytest.approx(expected[step], abs=tolerance), step
    assert outcome["batches_digest"] == reference["batches_digest"]
    assert outcome["validation"]["cross_entropy_tau"] == pytest.approx(
        reference["validation"]["cross_entropy_tau"], abs=tolerance
    )
    assert outcome["num_tokens"] == reference["num_tokens"]
