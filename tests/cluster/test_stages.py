"""The scheduler of everything that is scored, on a real Ray: failures of every stage, order, and items held."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jobs.scoring.config import PoolSection
from jobs.scoring.stages import ScoringFailedError, Stages, run_stages
from pipelines.retries import RETRIES

pytestmark = [pytest.mark.cluster, pytest.mark.long]


class Doubler:
    """Doubles numbers, but raises an error at 3, ends its process at 4 whenever it gets it, and at 6 the first time."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __call__(self, number: int) -> int:
        calls = self.directory / f"calls-{number}"
        with calls.open("a") as file:
            file.write("x")
        if number == 4 or (number == 6 and calls.read_text() == "x"):
            os._exit(1)
        if number == 3:
            raise ArithmeticError("this number\ncannot be doubled")
        return 2 * number


def run(stages: Stages[int], num_units: int, num_workers: int = 2) -> tuple[dict[int, list[Any]], dict[str, str]]:
    """Run stages; return unit → values that were kept of it, and title → reason for every unit that failed."""
    kept: dict[int, list[Any]] = {}

    def keep(unit: int, value: Any, seconds: float) -> None:
        kept.setdefault(unit, []).append(value)

    pool = PoolSection(num_workers=num_workers, cpus_per_worker=0.5)
    return kept, run_stages(stages, range(num_units), pool, title=lambda unit: f"unit {unit}", keep=keep)


def test_a_unit_fails_alone_in_whichever_stage_and_a_worker_that_dies_costs_a_retry(
    cluster: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def read(unit: int) -> Iterator[int]:
        if unit == 2:
            raise OSError("cannot be read")
        yield unit
        if unit == 5:  # The item before the error is good.
            raise ValueError("cut off")

    def write(result: int) -> str:
        if result == 2 * 7:
            raise OSError(28, "No space left on device")
        return str(result)

    kept, failed = run(Stages(read=read, model=partial(Doubler, tmp_path), write=write), 10, num_workers=1)
    assert kept == {unit: [str(2 * unit)] for unit in (0, 1, 5, 6, 8, 9)}
    assert "died" in failed.pop("unit 4")
    assert failed == {
        "unit 2": "OSError: cannot be read",
        "unit 3": "ArithmeticError: this number cannot be doubled",
        "unit 5": "ValueError: cut off",
        "unit 7": "OSError: [Errno 28] No space left on device",
    }
    calls = [len((tmp_path / f"calls-{number}").read_text()) for number in (3, 4, 6)]
    assert calls in ([1, 3, 2], [1, 2, 2])  # Ray may send a retry to the worker that is dying.
    said = capsys.readouterr().out
    assert "/10  FAILED  unit 3: ArithmeticError: this number cannot be doubled\n" in said
    assert "10/10  " in said
    assert str(ScoringFailedError(failed)).splitlines() == [f"{title}: {reason}" for title, reason in failed.items()]


def test_a_unit_may_have_many_items_or_none_and_reading_does_not_run_ahead(
    cluster: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def read(unit: int) -> Iterator[int]:
        for item in range(100, 112 if unit == 0 else 100):
            num_called = len(list(tmp_path.glob("calls-*")))
            (tmp_path / f"read-{item}").write_text(str(num_called))
            yield item

    kept, failed = run(Stages(read=read, model=partial(Doubler, tmp_path)), 2, num_workers=1)
    assert (kept, failed) == ({0: [2 * item for item in range(100, 112)]}, {})
    # While the model has one item and is about to get the next, a reader holds two items and makes a third.
    assert max(place - int((tmp_path / f"read-{100 + place}").read_text()) for place in range(12)) <= 5
    # A line for every item, and none for the unit without items, which may be done before or after the other one.
    assert [line[1:12] for line in capsys.readouterr().out.splitlines()] == ["/2  unit 0 "] * 12


def test_without_a_reader_all_workers_work(cluster: dict[str, str], tmp_path: Path) -> None:
    def meet() -> Any:
        def wait_for_the_other(number: int) -> int:
            (tmp_path / f"here-{number}").touch()
            until = time.monotonic() + 60
            while len(list(tmp_path.glob("here-*"))) < 2 and time.monotonic() < until:
                time.sleep(0.01)
            return len(list(tmp_path.glob("here-*")))

        return wait_for_the_other

    assert run(Stages(model=meet), 2) == ({0: [2], 1: [2]}, {})


def test_many_failures_in_a_row_end_the_work(cluster: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    def build() -> Any:
        raise FileNotFoundError("no such model")

    kept, failed = run(Stages(model=build), 30)
    assert (kept, len(failed), set(failed.values())) == ({}, 20, {"FileNotFoundError: no such model"})
    assert "20 failures one after another: the 10 units left are not tried" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"workers\.num_workers"):
        run(Stages(model=build), 1, num_workers=100)


def test_what_every_stage_counts_of_repeated_requests_is_said_once(
    cluster: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    def read(unit: int) -> Iterator[int]:
        for _ in range(2):
            RETRIES.add(1)
            yield unit

    def counts(number: int) -> Callable[[int], int]:
        def count(item: int) -> int:
            RETRIES.add(number)
            return item

        return count

    RETRIES.take()
    _, failed = run(Stages(model=partial(counts, 100), read=read, write=counts(10_000)), 6)
    assert not failed
    said = [line for line in capsys.readouterr().out.splitlines() if "repeated" in line]
    numbers = [int(number) for line in said for number in re.findall(r"repeated: (\d+);", line)]
    assert sum(numbers) == 12 * 10_101
    assert said[-1].endswith("; 121212 so far")
    assert len(said) == 2  # One with the first item; a minute has not passed, so the other comes at the end.
