"""Scoring on a real Ray: failures, items, workers that die, what is counted, and jobs that are killed and go on.

That figures are right is tested without Ray, in tests/jobs/scoring.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow import MlflowClient
from prediction_support import save_tiny_model, some_texts
from support import history, run_until, write_jsonl_zst

from jobs import predict_temperatures, train_reward
from jobs.scoring.config import PoolSection
from jobs.scoring.reward.job import RewardTrainer
from jobs.scoring.reward.plan import make_plan
from jobs.scoring.reward.rollouts import work_here
from jobs.scoring.units import Finished, Outcome, UnitStore, map_units
from pipelines.store_errors import RETRIES
from tempnet.loading import load_tempnet
from tests.jobs.scoring.generation_support import make_model

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


def map_with(
    model: Callable[[], Any], num_units: int, store: UnitStore | None = None, *, num_workers: int = 1, **work: Any
) -> Outcome:
    pool = PoolSection(num_workers=num_workers, cpus_per_worker=0.5)
    return map_units(range(num_units), model, pool, store, title=lambda unit: f"unit {unit}", **work)


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
    outcome = map_with(partial(Doubler, tmp_path), 10, store, read=read, noun="things")
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


def test_what_a_worker_writes_elsewhere_is_no_success(
    cluster: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def model() -> Callable[[int], Finished]:
        (tmp_path / "elsewhere" / "relative").mkdir(parents=True)
        os.chdir(tmp_path / "elsewhere")
        return lambda number: Finished(files={f"{number}.txt": b"x"})

    monkeypatch.chdir(tmp_path)
    outcome = map_with(model, 1, UnitStore("relative"))
    assert (tmp_path / "elsewhere" / "relative" / "0.txt").exists()
    assert outcome.failed["unit 0"].endswith("relative must be shared")


def test_many_failures_in_a_row_end_the_work(cluster: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    def build() -> Any:
        raise FileNotFoundError("no such model")

    outcome = map_with(build, 30)
    assert (len(outcome.failed), set(outcome.failed.values())) == (20, {"FileNotFoundError: no such model"})
    assert "20 failures one after another: the 10 units left are not tried" in capsys.readouterr().out


def test_what_readers_and_workers_count_of_repeated_requests_is_said_once(
    cluster: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    def read(unit: int) -> Iterator[int]:
        for _ in range(2):
            RETRIES.add(1)
            yield unit

    def model() -> Callable[[int], Finished]:
        return lambda item: RETRIES.add(100) or Finished()  # type: ignore[func-returns-value]

    RETRIES.take()
    assert not map_with(model, 6, read=read).failed
    said = [line for line in capsys.readouterr().out.splitlines() if "repeated" in line]
    assert sum(int(number) for line in said for number in re.findall(r"repeated: (\d+);", line)) == 12 * 101
    assert said[-1].endswith("; 1212 so far")
    assert len(said) == 2  # One with the first item; a minute has not passed, so the other comes at the end.


# The first call of all kills the worker whose verifier it is, as a machine that is lost would.
VERIFIER = """
import os, pathlib, signal
def vowels(sample):
    mark = pathlib.Path(__file__).with_name("has-killed")
    if sample.get("kills") and not mark.exists():
        mark.touch()
        os.kill(os.getppid(), signal.SIGKILL)
    text = sample["text"]
    if len(text) % 5 == 4:
        return float("nan")
    return sum(letter in "aeiou" for letter in text) / max(1, len(text))
"""


def test_training_on_rewards_with_a_worker_that_dies(
    cluster: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "killing_rewards.py").write_text(VERIFIER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    model, prompts = make_model(tmp_path / "model", "gpt2", 64, tempnet=False), tmp_path / "prompts.jsonl"
    lines = [{"prompt": prompt, "kills": prompt == "x"} for prompt in ("def", "x", "the base model", "class")]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = (
        f"--model {model} --prompts {prompts} --verifier.name killing_rewards:vowels --storage {tmp_path}/runs "
        "--num-steps 3 --prompts-per-step 4 --group-size 4 --max-new-tokens 5 --leash.target-kl 0.5 --checkpoint-every 2 "
        "--temperature.hidden-size 8 --temperature.num-prototypes 4 "
        "--workers.num-workers 2 --workers.cpus-per-worker 0.5"
    ).split()
    assert train_reward.main(options) == 0
    assert (tmp_path / "has-killed").exists()
    assert "LOST" in capsys.readouterr().out
    run = tmp_path / "runs" / "reward"
    outcome = json.loads((run / "outcome.json").read_text())

    plan = make_plan(train_reward.parse(options)[0])
    with work_here(plan) as run_orders:
        expected = RewardTrainer(plan, run_orders)
        expected.begin()
        for _ in range(3):
            expected.train_step()
        expected.finish()
    learned = load_tempnet(run / "export").state_dict()
    for name, value in expected.weights().items():
        torch.testing.assert_close(learned[name], value, atol=1e-6, rtol=1e-5)
    for ours, theirs in zip(outcome["history"], expected.history, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-7)
    assert outcome["failures"].keys() == {"not_a_number"}

    tracked = MlflowClient(outcome["tracking_uri"]).get_run(outcome["mlflow_run_id"])
    assert tracked.info.status == "FINISHED"
    steps = dict(enumerate(outcome["history"], start=1))
    for name in ("reward", "distinct", "kl", "kl_weight", "tau_mean", "lost"):
        assert history(outcome, name) == pytest.approx({step: row[name] for step, row in steps.items()})
    assert tracked.data.metrics["mean_shift/reward"] == outcome["temperatures"]["mean_shift"]["reward"]
    assert train_reward.main(options) == 0  # nothing is left to do
    assert "continues after step 3 of 3" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        train_reward.main([*options, "--group-size", "3"])
    assert "name = 'reward' was begun with other settings: group_size: 4 → 3" in capsys.readouterr().err


def test_a_job_that_was_killed_goes_on_with_two_workers(
    cluster: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    save_tiny_model(tmp_path / "model")
    for number in range(2):
        write_jsonl_zst(tmp_path / "texts" / f"{number}.jsonl.zst", some_texts(12, seed=number))
    (tmp_path / "texts" / "2.jsonl").write_text('{"text": "a b c"}\n' * 20 + "no JSON\n")

    def words(output: Path) -> list[str]:
        return (
            f"--model {tmp_path}/model --text {tmp_path}/texts --output {output} --per-token --part-characters 500 "
            "--max-bad-share 0.1 --workers.cpus-per-worker 0.5"
        ).split()

    def parts(output: Path) -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in sorted(output.glob("part-*.parquet"))}

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert predict_temperatures.main(words(whole)) == 0
    command = ["jobs.predict_temperatures", *words(killed)]
    run_until(lambda: len(parts(killed)) > 1, command, cluster, tmp_path / "log")
    kept = dict(list(parts(killed).items())[: len(parts(whole)) - 1])  # If the job was quick, everything was there.
    for path in parts(killed).keys() - kept.keys():
        path.unlink()
    (killed / "_summary.json").unlink(missing_ok=True)
    assert predict_temperatures.main([*words(killed), "--workers.num-workers", "2"]) == 0
    assert kept.items() <= parts(killed).items()
    for path in [*parts(whole), whole / "_summary.json"]:
        assert path.read_bytes() == (killed / path.name).read_bytes()
