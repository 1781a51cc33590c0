"""Test what a new kind of training gets from the base classes without anything special of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from jobs.engine.config import OptimizerSection, RunSection, TrainingConfig
from jobs.engine.fields import PATH
from jobs.tasks.base import BaseTask, resolve_paths
from pipelines.plan import StreamPlan
from pipelines.stream import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class NumbersSection:
    file: str = field(metadata=PATH)


@dataclass(frozen=True, slots=True, kw_only=True)
class NumbersConfig(TrainingConfig):
    data: NumbersSection


class Numbers:
    """A source whose items have nothing besides a value and the digest that every source returns."""

    def read(self, shards: np.ndarray, rows: np.ndarray, epoch: int) -> Batch:
        return {"value": rows / 2, "digest": rows}

    def name(self, shard: int, row: int) -> str:
        return str(row)


def configuration(file: str) -> NumbersConfig:
    return NumbersConfig(
        run=RunSection(name="numbers"), data=NumbersSection(file=file), optimizer=OptimizerSection(batch_size=6)
    )


def test_paths_are_resolved_for_a_configuration_without_a_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TEMPNET_HOME", raising=False)
    (tmp_path / "numbers.txt").touch()
    found = resolve_paths(configuration("numbers.txt"))
    assert found.data.file == str(tmp_path / "numbers.txt")
    assert found.run.storage == str(tmp_path / "runs")


def test_a_unit_is_a_sample_whatever_the_source_returns_beside_digests() -> None:
    tasks = [
        BaseTask(
            configuration(""), Numbers(), plan=StreamPlan(shard_sizes=(10,), seed=0), rank=rank, world_size=2, num_readers=0
        )
        for rank in range(2)
    ]  # fmt: skip
    batches = [next(task.stream.batches(0, 6)) for task in tasks]
    assert [task.num_units(batch) for task, batch in zip(tasks, batches, strict=True)] == [3, 3]
