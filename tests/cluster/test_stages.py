"""Test the scheduler of everything that is scored on a real Ray: order, failures of every stage, and items held."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jobs.scoring.config import PoolSection
from jobs.scoring.stages import ScoringFailedError, Stages, run_stages
from pipelines.retries import RETRIES

pytestmark = pytest.mark.cluster
POOL = PoolSection(num_workers=2, cpus_per_worker=0.5)


class Doubler:
    """Doubles numbers, but raises an error at one number and ends its process at another."""

    def __init__(self, directory: Path, fails_at: int = -1, dies_at: int = -1) -> None:
        self.directory, self.fails_at, self.dies_at = directory, fails_at, dies_at

    def __call__(self, number: int) -> int:
        with (self.directory / f"calls-{number}").open("a") as file:
            file.write("x")
        if number == self.dies_at:
            os._exit(1)
        if number == self.fails_at:
            raise ArithmeticError("this number\ncannot be doubled")
        return 2 * number


def run(stages: Stages[int], units: list[int], pool: PoolSection = POOL) -> tuple[dict[int, list[Any]], dict[str, str]]:
    """Run stages; return unit → values that were kept of it, and title → reason for every unit that failed."""
    kept: dict[int, list[Any]] = {}

    def keep(unit: int, value: Any, seconds: float) -> None:
        kept.setdefault(unit, []).append(value)

    return kept, run_stages(stages, units, pool, title=lambda unit: f"unit {unit}", keep=keep)


def test_a_unit_fails_alone_in_whichever_stage_it_fails(
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

    model = partial(Doubler, tmp_path, fails_at=3, dies_at=4)
    kept, failed = run(Stages(read=read, model=model, write=write), list(range(10)))
    assert kept == {unit: [str(2 * unit)] for unit in (0, 1, 5, 6, 8, 9)}
    assert failed.keys() == {f"unit {unit}" for unit in (2, 3, 4, 5, 7)}
    assert failed["unit 2"] == "OSError: cannot be read"
    assert failed["unit 3"] == "ArithmeticError: this number cannot be doubled"
    assert "died" in failed["unit 4"]
    assert failed["unit 5"] == "ValueError: cut off"
    assert failed["unit 7"] == "OSError: [Errno 28] No space left on device"
    # An item at which the model raises an error is not tried again; one at which a worker dies is tried twice more.
    assert (tmp_path / "calls-3").read_text() == "x"
    assert (tmp_path / "calls-4").read_text() == "xxx"
    said = capsys.readouterr().out
    assert "/10  FAILED  unit 3: ArithmeticError: this number cannot be doubled\n" in said
    assert "10/10  " in said
    error = ScoringFailedError(failed, table="the table")
    assert str(error).splitlines()[0].startswith("unit ")
    assert error.table == "the table"


def test_a_unit_may_have_many_items_or_none_and_reading_does_not_run_ahead(
    cluster: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def read(unit: int) -> Iterator[int]:
        for item in range(12 if unit == 0 else 0):
            num_called = len(list(tmp_path.glob("calls-*")))
            (tmp_path / f"read-{item}").write_text(str(num_called))
            yield item

    pool = PoolSection(num_workers=1, cpus_per_worker=0.5)
    kept, failed = run(Stages(read=read, model=partial(Doubler, tmp_path)), [0, 1], pool)
    assert (kept, failed) == ({0: [2 * item for item in range(12)]}, {})
    # While the model has one item and is about to get the next, a reader holds two items and makes a third.
    ahead = [item - int((tmp_path / f"read-{item}").read_text()) for item in range(12)]
    assert max(ahead) <= 5
    # A line for every item, and none for the unit without items, which may be done before or after the other one.
    lines = capsys.readouterr().out.splitlines()
    assert [line[1:12] for line in lines] == ["/2  unit 0 "] * 12
    assert lines[-1][0] in "12"


def test_without_a_reader_all_workers_work(cluster: dict[str, str], tmp_path: Path) -> None:
    def meet() -> Any:
        def wait_for_the_other(number: int) -> int:
            (tmp_path / f"here-{number}").touch()
            until = time.monotonic() + 60
            while len(list(tmp_path.glob("here-*"))) < 2 and time.monotonic() < until:
                time.sleep(0.01)
            return len(list(tmp_path.glob("here-*")))

        return wait_for_the_other

    kept, failed = run(Stages(model=meet), [0, 1])
    assert (kept, failed) == ({0: [2], 1: [2]}, {})


def test_many_failures_in_a_row_end_the_work(cluster: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    def build() -> Any:
        raise FileNotFoundError("no such model")

    kept, failed = run(Stages(model=build), list(range(30)))
    assert kept == {}
    assert len(failed) == 20
    assert set(failed.values()) == {"FileNotFoundError: no such model"}
    assert "20 failures one after another: the 10 units left are not tried" in capsys.readouterr().out


def test_a_pool_that_is_too_large_is_refused(cluster: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"workers\.num_workers"):
        run(Stages(model=lambda: abs), [0], PoolSection(num_workers=100))


@pytest.mark.parametrize("has_stages", [True, False])
def test_what_every_stage_counts_of_repeated_requests_is_said_once(cluster: dict[str, str], has_stages: bool) -> None:
    def read(unit: int) -> Iterator[int]:
        for _ in range(2):
            RETRIES.add("s3://read", "slow_down")
            yield unit

    def build() -> Callable[[int], int]:
        def compute(item: int) -> int:
            RETRIES.add("s3://model", "slow_down")
            return item

        return compute

    def write(result: int) -> int:
        RETRIES.add("s3://write", "slow_down")
        return result

    stages = Stages(model=build, read=read, write=write) if has_stages else Stages(model=build)
    RETRIES.take()
    lines: list[str] = []
    failed = run_stages(
        stages, list(range(6)), POOL, title=str, keep=lambda unit, value, seconds: None, say=lines.append
    )
    assert not failed
    said = [line for line in lines if "repeated" in line]
    counts = Counter[str]()
    for line in said:
        counts.update({store: int(number) for number, store in re.findall(r"(\d+) to s3://(\w+)", line)})
    assert counts == ({"read": 12, "model": 12, "write": 12} if has_stages else {"model": 6})
    assert said[-1].endswith(f"; {counts.total()} so far")
    assert len(said) == 2  # One with the first item; a minute has not passed, so the other comes at the end.
