"""The map of everything that is scored, on a real Ray: failures, items, workers that die, and what is counted."""

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
from jobs.scoring.units import Finished, Outcome, UnitStore, Work, map_units
from pipelines.store_errors import RETRIES

pytestmark = [pytest.mark.cluster, pytest.mark.long]


class Doubler:
    """Doubles numbers, but raises an error at 3, ends its process at 4 whenever it gets it, and at 6 the first time."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __call__(self, number: int) -> Finished:
        calls = self.directory / f"calls-{number}"
        with calls.open("a") as file:
            file.write("x")
        if number == 4 or (number == 6 and calls.read_text() == "x"):
            os._exit(1)
        if number == 3:
            raise ArithmeticError("this number\ncannot be doubled")
        name = "no directory/x" if number == 7 else f"{number}.txt"
        return Finished(files={name: str(2 * number).encode()}, num_cases=number, value=2 * number)


def run(
    model: Callable[[], Any], num_units: int, store: UnitStore | None = None, *, num_workers: int = 1, **work: Any
) -> Outcome:
    pool = PoolSection(num_workers=num_workers, cpus_per_worker=0.5)
    return map_units(range(num_units), Work(model=model, title=lambda unit: f"unit {unit}", **work), pool, store)


def test_a_unit_fails_alone_and_a_worker_that_dies_costs_a_retry(
    cluster: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def read(unit: int) -> Iterator[int]:
        if unit == 2:
            raise OSError("cannot be read")
        yield unit
        if unit == 5:  # The item before the error is good.
            raise ValueError("cut off")

    store = UnitStore(str(tmp_path / "store"))
    outcome = run(partial(Doubler, tmp_path), 10, store, read=read, noun="things")
    failed = outcome.failed
    assert "died 3 times" in failed.pop("unit 4")
    assert failed.pop("unit 7").startswith("FileNotFoundError: ")
    assert failed == {
        "unit 2": "OSError: cannot be read",
        "unit 3": "ArithmeticError: this number cannot be doubled",
        "unit 5": "ValueError: cut off",
    }
    done = (0, 1, 5, 6, 8, 9)
    assert outcome.values == {unit: [2 * unit] for unit in done}
    assert {name: store.read(name) for name in store.names()} == {f"{i}.txt": str(2 * i).encode() for i in done}
    assert outcome.num_cases == sum(done)
    calls = {number: len((tmp_path / f"calls-{number}").read_text()) for number in (3, 4, 6)}
    assert calls[3] == 1
    assert calls[4] <= 3  # Ray may send a retry to the worker that is dying.
    assert calls[6] == 2
    said = capsys.readouterr().out
    assert "/10  FAILED  unit 3: ArithmeticError: this number cannot be doubled\n" in said
    assert re.search(r"/10  unit 9  9 things, [\d,]+ things/s  0\.0 s", said)


def test_all_workers_work_on_the_items_of_one_unit_and_a_unit_may_have_none(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    def meet() -> Callable[[int], Finished]:
        def wait_for_the_other(item: int) -> Finished:
            (tmp_path / f"{item}-{os.getpid()}").touch()
            until = time.monotonic() + 60
            while len({path.name.split("-")[1] for path in tmp_path.iterdir()}) < 2 and time.monotonic() < until:
                time.sleep(0.01)
            return Finished(value=os.getpid())

        return wait_for_the_other

    outcome = run(meet, 2, num_workers=2, read=lambda unit: range(1, 5 if unit == 0 else 1))
    assert not outcome.failed
    assert outcome.values.keys() == {0}
    assert len(outcome.values[0]) == 4
    assert len(set(outcome.values[0])) == 2


def test_what_a_worker_writes_elsewhere_is_no_success(
    cluster: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def model() -> Callable[[int], Finished]:
        (tmp_path / "elsewhere" / "relative").mkdir(parents=True)
        os.chdir(tmp_path / "elsewhere")
        return lambda number: Finished(files={f"{number}.txt": b"x"})

    monkeypatch.chdir(tmp_path)
    outcome = run(model, 1, UnitStore("relative"))
    assert (tmp_path / "elsewhere" / "relative" / "0.txt").exists()
    assert outcome.failed["unit 0"].endswith("relative must be shared")


def test_many_failures_in_a_row_end_the_work(cluster: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    def build() -> Any:
        raise FileNotFoundError("no such model")

    outcome = run(build, 30)
    assert (len(outcome.failed), set(outcome.failed.values())) == (20, {"FileNotFoundError: no such model"})
    assert "20 failures one after another: the 10 units left are not tried" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"workers\.num_workers"):
        run(build, 1, num_workers=100)


def test_what_readers_and_workers_count_of_repeated_requests_is_said_once(
    cluster: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    def read(unit: int) -> Iterator[int]:
        for _ in range(2):
            RETRIES.add(1)
            yield unit

    def model() -> Callable[[int], Finished]:
        def count(item: int) -> Finished:
            RETRIES.add(100)
            return Finished()

        return count

    RETRIES.take()
    assert not run(model, 6, read=read).failed
    said = [line for line in capsys.readouterr().out.splitlines() if "repeated" in line]
    assert sum(int(number) for line in said for number in re.findall(r"repeated: (\d+);", line)) == 12 * 101
    assert said[-1].endswith("; 1212 so far")
    assert len(said) == 2  # One with the first item; a minute has not passed, so the other comes at the end.
