"""Test what a run may take and begin with before Ray starts: its name, its driver, other runs' checkpoints, an export."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from ray.train.torch import TorchTrainer

from jobs.engine import cluster, export, launch, lease, ray_private
from jobs.engine.command_line import run_job
from jobs.engine.config import OptimizerSection, RunSection, TrainingConfig, WorkersSection
from jobs.engine.export import configure, find_checkpoint
from jobs.engine.fields import configuration_hash, with_fields
from jobs.engine.launch import check_room, claim_directory
from jobs.engine.resumption import (
    check_start,
    checkpoint_name,
    find_resumption,
    start_checkpoint,
    write_file_list,
    write_record,
)
from jobs.engine.task import PreparedTask
from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.language_model.plan import make_plan
from jobs.tasks.presets.language_models import PRESETS, gpt2_scratch
from pipelines.storage import write_json
from pipelines.text.tokenization import train_bpe

Change = Callable[..., LanguageModelConfig]


@pytest.fixture
def change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Change:
    """Return a function that makes the small preset on tiny files, with changed fields; starting Ray is an error."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(lease, "_SECONDS_TO_SETTLE", 0.05)

    def start_ray() -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(cluster, "start_ray", start_ray)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_text(json.dumps({"text": "a b c"}) + "\n")
    train_bpe(["a b c d e f g"], 400).save_pretrained(tmp_path / "tokenizer")
    fields = {
        "run.storage": str(tmp_path / "runs"), "data.train": str(tmp_path / "text"), "temperature.target_entropy": 2.0,
        "data.validation": str(tmp_path / "text"), "data.tokenizer": str(tmp_path / "tokenizer"),
    }  # fmt: skip
    return lambda values={}: with_fields(PRESETS["gpt2-scratch-small"](), fields | values)


def test_a_taken_name_is_refused_with_the_fields_that_differ(change: Change) -> None:
    assert claim_directory(change()) is None
    assert claim_directory(change({"run.log_every": 3})) is None
    with pytest.raises(ValueError, match=r"is taken .*temperature\.target_entropy: 2\.0 → 2\.5\. Choose another run"):
        claim_directory(change({"temperature.target_entropy": 2.5}))


def test_a_second_driver_is_refused_before_ray_starts(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_SECONDS_TO_END", 0.1)
    plan = make_plan(change())
    with (
        lease.Lease(plan.config.run.directory),
        pytest.raises(ValueError, match=rf"in the hands of process {os.getpid()} on \S+: wait until that has ended"),
    ):
        launch.train(plan)
    with pytest.raises(AssertionError, match="Ray was started"):
        launch.train(plan)


def test_a_run_without_a_whole_checkpoint_is_refused_before_ray_starts(change: Change) -> None:
    config = change()
    (Path(config.run.directory) / "checkpoint-00000005").mkdir(parents=True)
    write_record(config.run.directory, ["checkpoint-00000005", "checkpoint-00000010"])
    with pytest.raises(ValueError, match=r"no checkpoint in .* is whole\. checkpoint-00000005 .* checkpoint-00000010 "):
        launch.train(make_plan(config))


def test_what_cannot_start_holds_no_name(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_small(**wanted: Any) -> None:
        raise ValueError("the cluster has no GPU")

    monkeypatch.setattr(cluster, "start_ray", lambda: None)
    monkeypatch.setattr(cluster, "check_resources", too_small)
    config = change()
    with pytest.raises(ValueError, match="no GPU"):
        launch.train(make_plan(config))
    assert not (Path(config.run.directory) / "configuration.json").exists()
    assert claim_directory(change({"temperature.target_entropy": 2.5})) is None


PROC = "nothing can be written in /proc/runs: that file system takes no files"
NOT_STARTED = [
    ("--run.storage /proc", "run.storage: nothing can be written in /proc/new: that file system takes no files"),
    ("--run.storage text/a.jsonl", "/text/a.jsonl/new: Not a directory"),
    ("--run.export /proc/runs", f"run.export: {PROC}"),
    ("--run.prepared /proc/runs", f"run.prepared: {PROC}"),
    ("--tracking.uri sqlite:////proc/runs/db", f"tracking.uri: {PROC}"),
    ("--workers.num-workers 512 --optimizer.batch-size 512", " CPUs are more than there are, this machine has "),
    ("--workers.use-gpu", " GPUs, 1 a worker, more than there are, as this machine has 0: choose "),
    ("--run.name taken", "run.name = 'taken' is taken in "),
    (
        "--run.name deleted",
        "deleted holds checkpoint-00000005, but not the configuration.json that they were made with",
    ),
    ("--run.start-from none@3", "there is no run in "),
]
OF_SWEEPS = ("--run.storage /proc", "--workers.num-workers")  # one of each function that a sweep calls
JOBS = ["train_lm gpt2-scratch-small", "sweep gpt2-rho-lr-small"]


@pytest.mark.parametrize(
    ("job", "options", "message"),
    [(job, *case) for case in NOT_STARTED for job in (JOBS if case[0].startswith(OF_SWEEPS) else JOBS[:1])],
)
def test_a_dry_run_refuses_what_the_run_refuses(
    job: str, options: str, message: str,
    change: Change, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Callable[..., str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    resources = ray_private.local_resources()
    monkeypatch.setattr(ray_private, "local_resources", lambda: resources | {"GPU": 0.0})
    claim_directory(change({"run.name": "taken"}))
    write_checkpoint(tmp_path / "runs" / "deleted", 5)
    name, preset = job.split()
    given = f"--run.storage runs --run.name new --data.train text --data.validation text --data.tokenizer tokenizer {options}"
    words = given.replace("--", "--base.").split() if name == "sweep" else given.split()
    assert message in (said := refusal(name, preset, *words))
    assert refusal(name, preset, *words, "--dry-run") == said
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["deleted", "taken"]


def make_config(tmp_path: Path, name: str, start_from: str = "", seed: int = 0, **sections: Any) -> TrainingConfig:
    run = RunSection(name=name, storage=str(tmp_path), num_steps=100, seed=seed, start_from=start_from)
    return TrainingConfig(run=run, **sections)


@pytest.fixture
def other(tmp_path: Path) -> TrainingConfig:
    config = make_config(tmp_path, "other")
    claim_directory(config)
    for step, num_bytes in ((40, 2), (60, 3)):
        directory = tmp_path / "other" / checkpoint_name(step)
        directory.mkdir()
        (directory / "weights").write_bytes(b"ab")
        files = {"weights": {"num_bytes": num_bytes, "digest": ""}}
        write_json(str(directory / "files-00000.json"), {"world_size": 1, "group": "", "files": files})
    return config


@pytest.mark.parametrize("start", ["other", "other@0", "other@x", "@40", "a/b@40", "other@100"])
def test_a_start_is_a_run_and_a_step_before_the_last(tmp_path: Path, start: str) -> None:
    with pytest.raises(ValueError, match=rf"run.start_from = '{start}' must be NAME@STEP, .* run.num_steps = 100"):
        make_config(tmp_path, "run", start)


def test_a_start_is_a_part_of_what_a_run_is_and_decimal_numbers_may_differ(
    tmp_path: Path, other: TrainingConfig
) -> None:
    assert start_checkpoint(other.run) == ""
    config = make_config(
        tmp_path, "run", "other@40", optimizer=OptimizerSection(learning_rate_base=1.0, decay="linear")
    )
    check_start(replace(config, run=replace(config.run, num_steps=50)))
    assert start_checkpoint(config.run) == f"{tmp_path}/other/{checkpoint_name(40)}"
    assert configuration_hash(config) != configuration_hash(replace(config, run=replace(config.run, start_from="")))


@pytest.mark.parametrize(
    ("start", "sections", "message"),
    [
        ("none@40", {}, "there is no run in "),
        (
            "other@41",
            {},
            "checkpoint-00000041 in .*, the directory is missing.*; its whole checkpoints are of the steps 40",
        ),
        ("other@60", {}, "weights has 2 bytes instead of 3; its whole checkpoints are of the steps 40"),
        ("other@40", {"optimizer": OptimizerSection(batch_size=64)}, "optimizer.batch_size: 32 → 64"),
        ("other@40", {"workers": WorkersSection(zero_stage=1)}, "workers.zero_stage: 2 → 1"),
        ("other@40", {"seed": 3}, "run.seed: 0 → 3"),
    ],
)
def test_what_cannot_be_continued_is_refused(
    tmp_path: Path, other: TrainingConfig, start: str, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=rf"run.start_from = '{re.escape(start)}': .*{message}"):
        check_start(make_config(tmp_path, "run", start, **sections))


def write_checkpoint(run: Path, step: int, world_size: int = 2) -> None:
    directory = run / f"checkpoint-{step:08d}"
    directory.mkdir(parents=True)
    (directory / "state.json").write_text(json.dumps({"world_size": world_size}))
    write_file_list(directory, rank=0, world_size=1, group="g")


def test_the_newest_or_the_given_step_is_chosen(tmp_path: Path) -> None:
    for step in (5, 10):
        write_checkpoint(tmp_path, step)
    newest = find_checkpoint(str(tmp_path), None, "")
    assert (newest.step, newest.output, newest.num_writers) == (10, f"{tmp_path}/export-10", 2)
    assert find_checkpoint(str(tmp_path), 5, "").checkpoint == f"{tmp_path}/checkpoint-00000005"
    assert find_checkpoint(str(tmp_path), 5, "late").output == str(Path("late").absolute())
    with pytest.raises(ValueError, match=r"step = 7: .* has the checkpoints of steps 5, 10"):
        find_checkpoint(str(tmp_path), 7, "")
    (tmp_path / "export-10").mkdir()
    with pytest.raises(ValueError, match="exists: delete it"):
        find_checkpoint(str(tmp_path), 10, "")
    (tmp_path / "checkpoint-00000010" / "state.json").write_text("")
    assert find_checkpoint(str(tmp_path), None, "").step == 5
    with pytest.raises(ValueError, match=r"step = 10: state\.json has 0 bytes"):
        find_checkpoint(str(tmp_path), 10, "")


def test_one_worker_is_enough_except_under_zero_3(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 5)
    late = find_checkpoint(str(tmp_path), None, "")
    config = gpt2_scratch()
    assert configure(config, late).workers.num_workers == 1
    assert configure(config, late).run.export_directory == late.output
    third = configure(replace(config, workers=replace(config.workers, zero_stage=3)), late)
    assert third.workers.num_workers == 2


@pytest.mark.parametrize("has_failed", [False, True])
def test_runs_side_by_side_that_are_killed_while_they_are_finished_go_on(
    change: Change, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_failed: bool
) -> None:
    """Trials that have an outcome are in no group any more; if all have failed, their group begins again."""
    configs = [change({"run.name": name, "tracking.enabled": False}) for name in "ab"]
    starts: list[tuple[str, set[str]]] = []

    def fit(config: LanguageModelConfig, job: Any, **rest: Any) -> dict[str, Any]:
        starts.append((config.run.name, set(find_resumption(config.run.directory, {}).checkpoints)))
        if not starts[-1][1]:
            write_checkpoint(Path(config.run.directory), 5)
            write_record(config.run.directory, [checkpoint_name(5)])
        members = {one.run.name: {"num_steps": 5} for one in configs}
        failed = dict.fromkeys(members, "why") if has_failed else {}
        return {"members": {} if failed else members, "failed": failed, "unsent_metrics": {}}

    def kill(config: LanguageModelConfig, *rest: Any) -> None:
        if len(starts) == 1 and config.run.name == "b":
            raise KeyboardInterrupt

    def start() -> dict[str, str]:
        plans: list[Any] = [
            SimpleNamespace(
                config=config, tracking_uri="", data_cpus=0.0, summary_table=str, write_report=lambda *_: None,
                prepare=lambda config=config: PreparedTask(
                    create_task=print, num_samples=1, parameters={}, data_sets={}, outcome={}, config=config
                ),
            )
            for config in configs
            if not claim_directory(config)
        ]  # fmt: skip
        directory = str(tmp_path / "runs")
        return launch.train_group(plans, directory=directory, parent_run_id="", origin={}, record_models=None)

    monkeypatch.setattr(launch, "fit", fit)
    monkeypatch.setattr(launch, "write_card", kill)
    if has_failed:
        assert start() == {"a": "why", "b": "why"}
    else:
        with pytest.raises(KeyboardInterrupt):
            start()
    assert start() == ({"a": "why", "b": "why"} if has_failed else {})
    assert starts[0][0] == starts[1][0]
    assert [checkpoints for _, checkpoints in starts] == [set(), set() if has_failed else {checkpoint_name(5)}]
    assert all(bool(claim_directory(config)) != has_failed for config in configs)
    assert not list((tmp_path / "runs" / "side-by-side").iterdir())


def test_a_job_of_several_runs_is_not_done_in_this_process(change: Change) -> None:
    with pytest.raises(ValueError, match=r"workers\.local = True is for one training run"):
        check_room(change({"workers.local": True, "workers.num_workers": 1}), 0.0)


def test_ctrl_c_while_ray_train_runs_ends_with_130(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray Train, which handles Ctrl-C itself, ends the workers and then the process, as if all had gone well."""
    write_checkpoint(tmp_path / "run", 5)
    late = find_checkpoint(str(tmp_path / "run"), None, "")
    config = configure(gpt2_scratch(), late)
    config = replace(config, run=replace(config.run, storage=str(tmp_path), name="run"))
    prepared = SimpleNamespace(create_task=print)
    plan: Any = SimpleNamespace(config=config, prepare_with_room=lambda: prepared)

    def end(trainer: TorchTrainer) -> NoReturn:
        (tmp_path / "run" / ".export").mkdir()
        raise SystemExit(0)

    monkeypatch.setattr(TorchTrainer, "fit", end)
    with pytest.raises(SystemExit) as ended:
        run_job(lambda arguments: export.make_late_export(plan, late) or 0)
    assert ended.value.code == 130
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint-00000005"]
