"""The training loop, proved once for all tasks: on the task of docs/extend.md, in one and in two processes without Ray."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from deepspeed import DeepSpeedEngine
from readme_support import write_task
from safetensors.numpy import load_file

from jobs.engine.loop import TrainedRun, TrainingLoop
from jobs.engine.resumption import find_damage
from jobs.engine.worker import WorkerContext
from pipelines.store_errors import RETRIES
from tests.local_training import Asking, Call, history, processes, train_plan

NUM_STEPS = 12


def write_site(directory: Path) -> Path:
    """Write the Python files of docs/extend.md and labelled lines into a directory, and return it."""
    write_task(directory)
    random = np.random.default_rng(0)
    letters = {"prose": "etaoin shrdlu ", "code": "(){}=_.:01 selfreturn"}
    lines = [f"{kind}\t{''.join(random.choice(list(letters[kind]), 40))}x" for _ in range(150) for kind in letters]
    (directory / "lines.tsv").write_text("\n".join(lines))
    return directory


def make_plan(directory: str, name: str, sections: dict[str, dict[str, Any]]) -> Any:
    """Return the plan of a run of `lines-small` with other values in some sections."""
    if directory not in sys.path:
        sys.path.insert(0, directory)
    from line_classifier.config import PRESETS
    from line_classifier.plan import make_plan

    config = PRESETS["lines-small"]()
    given = {
        "run": {"name": name, "storage": f"{directory}/runs", "num_steps": NUM_STEPS, "checkpoint_every": 4, "log_every": 2},
        "data": {"file": f"{directory}/lines.tsv"},
        # With a smaller epsilon, Adam would make full-sized steps of gradients that are only rounding errors.
        "optimizer": {"epsilon": 1e-4, "warmup_share": 0.25},
        "workers": {"num_threads": 1},
        "validation": {"every": 6},
        "tracking": {"enabled": False},
    }  # fmt: skip
    for section, values in given.items():
        changed = replace(getattr(config, section), **values | sections.get(section, {}))
        config = replace(config, **{section: changed})
    return make_plan(config)


class Site:
    """A directory with the task and its data, in which one or two processes train it."""

    def __init__(self, directory: Path, calls: dict[int, Call]) -> None:
        self.directory, self.calls = directory, calls

    def train(self, name: str, num_processes: int = 1, *, settings: Any = None, **sections: dict[str, Any]) -> Any:
        make = partial(make_plan, str(self.directory), name, sections)
        return self.calls[num_processes](train_plan, make, f"{self.directory}/{name}", settings or {})[0]

    def history(self, name: str) -> dict[int, tuple[float, int]]:
        return history(self.directory / name)

    def run(self, name: str) -> Path:
        return self.directory / "runs" / name

    def weights(self, name: str) -> dict[str, np.ndarray]:
        return load_file(self.run(name) / "export" / "model.safetensors")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, alone: Call, together: Call) -> Iterator[Site]:
    with pytest.MonkeyPatch.context() as patch:
        directory = write_site(tmp_path_factory.mktemp("site"))
        patch.syspath_prepend(directory)
        yield Site(directory, {1: alone, 2: together})


@pytest.fixture(scope="module")
def undisturbed(site: Site) -> dict[str, Any]:
    outcome: dict[str, Any] = site.train("undisturbed")
    return outcome


def assert_same(site: Site, name: str, *, tolerance: float) -> None:
    """Assert that a run has had the batches of the undisturbed one in every step, and its losses and weights."""
    steps, expected = site.history(name), site.history("undisturbed")
    assert sorted(steps) == sorted(expected) == list(range(1, NUM_STEPS + 1))
    for step, (loss, digest) in expected.items():
        assert steps[step][1] == digest, step
        assert steps[step][0] == pytest.approx(loss, abs=tolerance), step
    for key, weight in site.weights("undisturbed").items():
        np.testing.assert_allclose(site.weights(name)[key], weight, rtol=0, atol=10 * tolerance, err_msg=key)


def test_a_run_is_the_plain_loop_of_pytorch(site: Site, undisturbed: dict[str, Any]) -> None:
    """The batches of the plan's order, AdamW without decay of biases, clipped gradients, warm-up and cosine decay."""
    from line_classifier.data import build_model, read_lines

    from pipelines.plan import StreamPlan
    from pipelines.stream import RankStream

    config = make_plan(str(site.directory), "plain", {}).config
    _, lines, held_out = read_lines(config)
    model = build_model(config, 2)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-4)
    plan = StreamPlan(shard_sizes=(len(lines.labels),), seed=0)
    stream = RankStream(source=lines, plan=plan, batch_size=64, rank=0, world_size=1, num_readers=0)
    steps = site.history("undisturbed")
    for step, batch in enumerate(stream.batches(0, NUM_STEPS * 64), start=1):
        # 3 steps of warm-up, then half a cosine.
        share = step / 3 if step <= 3 else 0.5 * (1 + np.cos(np.pi * (step - 4) / (NUM_STEPS - 3)))
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * share
        loss = F.cross_entropy(model(torch.from_numpy(batch["features"])), torch.from_numpy(batch["labels"]))
        assert steps[step][0] == pytest.approx(loss.item(), abs=1e-5), step
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    rows = np.arange(len(held_out.labels))
    batch = held_out.read(np.zeros_like(rows), rows, 0)
    chosen = model(torch.from_numpy(batch["features"])).argmax(-1).numpy()
    assert undisturbed["validation"]["accuracy"] == pytest.approx((chosen == batch["labels"]).mean())
    assert [found["step"] for found in undisturbed["validations"]] == [6, NUM_STEPS]
    assert undisturbed["num_lines"] == 64 * NUM_STEPS
    # Every validation is reported, with the loss of its step; what has a checkpoint and no validation has no scores.
    reported = [json.loads(line) for line in (site.run("undisturbed") / "reported.jsonl").read_text().splitlines()]
    assert [(found["step"], "accuracy" in found) for found in reported] == [
        (4, False), (6, True), (8, False), (12, False), (12, True)
    ]  # fmt: skip
    assert reported[1]["loss"] == pytest.approx(steps[6][0], abs=1e-6)
    assert reported[-1]["accuracy"] == undisturbed["validation"]["accuracy"]
    assert undisturbed["resumed_from_step"] == 0
    checkpoints = sorted(path.name for path in site.run("undisturbed").glob("checkpoint-*[0-9]"))
    assert checkpoints == ["checkpoint-00000008", "checkpoint-00000012"]


def repeat_requests(rank: int, num_processes: int) -> None:
    """Count requests to an object store that were repeated: one on rank 0, two on rank 1."""
    RETRIES.add(rank + 1)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_processes_train_what_one_does_under_every_stage_of_zero(
    site: Site, undisturbed: dict[str, Any], stage: int
) -> None:
    site.calls[2](repeat_requests)
    outcome = site.train(f"zero-{stage}", 2, workers={"zero_stage": stage, "num_workers": 2})
    assert (outcome["world_size"], outcome["store_retries"]) == (2, 3)
    summary = (site.run(f"zero-{stage}") / "report" / "summary.txt").read_text()
    assert re.search(r"repeated requests to object stores +3\n", summary)
    assert_same(site, f"zero-{stage}", tolerance=1e-6)
    assert outcome["validation"] == pytest.approx(undisturbed["validation"], abs=1e-5)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("num_after", [1, 2])
def test_an_interrupted_run_goes_on_with_the_same_or_another_number_of_processes(
    site: Site, undisturbed: dict[str, Any], stage: int, num_after: int
) -> None:
    name = f"interrupted-{stage}-{num_after}"
    sections = {"workers": {"zero_stage": stage, "num_workers": "1:2"}, "run": {"checkpoint_every": 100}}
    result = site.train(name, 2, settings={"mailbox": Asking(after_step=6, must_stop=True)}, **sections)
    step = result["interrupted"]
    assert 6 < step < NUM_STEPS
    outcome = site.train(name, num_after, **sections)
    assert (outcome["resumed_from_step"], outcome["world_size"]) == (step, num_after)
    assert outcome["batches_digest"] == undisturbed["batches_digest"] != ""
    assert len(outcome["validations"]) == 2
    assert_same(site, name, tolerance=1e-6)


def test_a_request_to_save_is_answered_once_and_the_run_goes_on(site: Site, undisturbed: dict[str, Any]) -> None:
    outcome = site.train(
        "saved", 2, settings={"mailbox": Asking(after_step=4, must_stop=False)}, run={"checkpoint_every": 100},
        workers={"num_workers": 2},
    )  # fmt: skip
    assert outcome["num_steps"] == NUM_STEPS
    steps = sorted(int(path.name[11:]) for path in site.run("saved").glob("checkpoint-*") if path.is_dir())
    assert len(steps) == 2
    assert 4 < steps[0] < steps[1] == NUM_STEPS


def test_a_process_that_is_killed_costs_the_steps_since_the_last_checkpoint(
    site: Site, undisturbed: dict[str, Any]
) -> None:
    run = {"checkpoint_every": 2, "num_checkpoints_kept": 5}
    sections = {"run": run, "workers": {"num_workers": 2, "zero_stage": 2}}
    make = partial(make_plan, str(site.directory), "killed", sections)
    with processes(2) as call, pytest.raises((EOFError, AssertionError, ConnectionResetError)):
        call(kill_itself, make, f"{site.directory}/killed", 7)
    outcome = site.train("killed", 2, **sections)
    assert outcome["resumed_from_step"] == 6
    assert_same(site, "killed", tolerance=1e-6)
    assert sorted(int(path.name[11:]) for path in site.run("killed").glob("checkpoint-*[0-9]")) == [4, 6, 8, 10, 12]


@dataclass
class Killing(Asking):
    """A terminal that kills its process at a step, like a machine that is lost."""

    def show(self, step: int, text: str) -> None:
        if step >= self.after_step:
            os.kill(os.getpid(), signal.SIGKILL)


def kill_itself(rank: int, world_size: int, make: Callable[[], Any], file: str, step: int) -> Any:
    return train_plan(rank, world_size, make, file, {"mailbox": Killing(after_step=step, must_stop=False)})


def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(site: Site, undisturbed: dict[str, Any]) -> None:
    name, sections = "damaged", {"workers": {"num_workers": 2}}
    first = site.train(name, 2, **sections)
    newest = site.run(name) / f"checkpoint-{NUM_STEPS:08d}"
    damaged = next(newest.glob("deepspeed/*rank_1_*"))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1  # Sizes and names are right: only a reader of the whole file sees it.
    damaged.write_bytes(content)
    assert find_damage(str(newest)) == ""
    again = site.train(name, 2, **sections)
    assert again["resumed_from_step"] == 8
    assert again["validation"] == first["validation"]
    assert_same(site, name, tolerance=1e-6)
    # If none is whole, nothing is begun anew in silence.
    for checkpoint in site.run(name).glob("checkpoint-*/state.json"):
        checkpoint.unlink()
    assert re.search(r"no checkpoint in .* is whole", site.train(name, 2, **sections)["fatal"])


def test_a_loss_that_is_not_finite_ends_the_run_and_names_its_batch(site: Site) -> None:
    result = site.train(
        "explodes", optimizer={"learning_rate_base": 1e30, "warmup_share": 0.0}, run={"checkpoint_every": 1}
    )
    (step,) = map(int, re.findall(r"the loss of step (\d+) is (?:nan|inf)", result["fatal"]))
    assert result["fatal"].count("etaoin") + result["fatal"].count("b'") + result["fatal"].count("'") > 64
    saved = sorted(int(path.name[11:]) for path in site.run("explodes").glob("checkpoint-*") if path.is_dir())
    assert saved[-1] == step - 1
    assert find_damage(str(site.run("explodes") / f"checkpoint-{step - 1:08d}")) == ""


def spoil_gradient(rank: int, world_size: int, spoiled_step: int) -> None:
    """Have the gradient of a step be NaN, where the loss is as ever."""
    backward = DeepSpeedEngine.backward

    def spoiled(engine: Any, loss: torch.Tensor, **rest: Any) -> Any:
        if engine.global_steps + 1 == spoiled_step:
            loss = loss + (0.0 * next(engine.module.parameters()).sum()).sqrt()
        return backward(engine, loss, **rest)

    DeepSpeedEngine.backward = spoiled


@pytest.mark.parametrize(("stage", "step"), [(0, 4), (2, 3)])
def test_a_gradient_that_is_not_finite_ends_the_run_before_anything_is_saved(site: Site, stage: int, step: int) -> None:
    """By itself DeepSpeed leaves such a step out under ZeRO 1 to 3, and makes all weights NaN under ZeRO 0."""
    name, sections = f"spoiled-{stage}", {"workers": {"zero_stage": stage}, "run": {"log_every": 6}}
    make = partial(make_plan, str(site.directory), name, sections)
    with processes(1) as call:
        call(spoil_gradient, step)
        (result,) = call(train_plan, make, f"{site.directory}/{name}", {})
    assert re.match(rf"the gradient of step {step} has the norm (nan|inf); the last checkpoint", result["fatal"])
    assert not list(site.run(name).glob("checkpoint-*"))


def test_a_run_starts_from_a_step_of_another_with_its_own_learning_rates(
    site: Site, undisturbed: dict[str, Any]
) -> None:
    outcome = site.train("started", run={"start_from": "undisturbed@8"}, optimizer={"learning_rate_base": 1e-30})
    assert outcome["resumed_from_step"] == 8
    steps, expected = site.history("started"), site.history("undisturbed")
    assert sorted(steps) == [9, 10, 11, 12]
    assert steps[9] == pytest.approx(expected[9], abs=1e-6)
    assert steps[12][0] != pytest.approx(expected[12][0], abs=1e-6)
    assert {step: digest for step, (_, digest) in steps.items()} == {step: expected[step][1] for step in steps}


@pytest.mark.parametrize("is_there", [True, False])
def test_the_last_model_is_exported_where_the_best_one_is_not(tmp_path: Path, is_there: bool) -> None:
    """As it is not in another directory that a continued run is given."""
    exported: list[str] = []
    if is_there:
        (tmp_path / "export").mkdir()
    task: Any = SimpleNamespace(
        config=SimpleNamespace(run=SimpleNamespace(name="run", export_directory=str(tmp_path / "export"))),
        rating=lambda scores: scores["recall"],
        export=lambda: exported.append("last"),
        validate_members=lambda runs, engine, with_details: [({"recall": 0.3}, None)],
    )
    loop = TrainingLoop.__new__(TrainingLoop)
    loop.task, loop.runs, loop.is_alone, loop.step, loop.progress = task, [TrainedRun(task)], True, 12, None
    loop.runs[0].best_rating = 0.5
    loop.engine = SimpleNamespace(eval=lambda: None, train=lambda: None)  # type: ignore[assignment]
    loop.context = WorkerContext(rank=0, world_size=1, local_world_size=1, report=print)
    assert loop._validate(with_details=False)["run"]["best_rating"] == 0.5
    found = loop._validate(with_details=True)["run"]["best_rating"]
    assert (exported, found) == (([], 0.5) if is_there else (["last"], 0.3))
