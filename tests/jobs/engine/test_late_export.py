"""Tests which checkpoint of a run is exported, which requests are refused before anything is started, and Ctrl-C."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from ray.train.torch import TorchTrainer

from jobs.engine import late_export
from jobs.engine.checkpoint_files import write_file_list
from jobs.engine.command_line import run_job
from jobs.engine.late_export import configure, find_checkpoint
from jobs.export import main
from jobs.tasks.presets.language_models import gpt2_scratch


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
    with pytest.raises(ValueError, match=r"step = 7: .* has the checkpoints of steps 5, 10"):
        find_checkpoint(str(tmp_path), 7, "")
    (tmp_path / "export-10").mkdir()
    with pytest.raises(ValueError, match="exists: delete it"):
        find_checkpoint(str(tmp_path), 10, "")


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    for step in (5, 10):
        write_checkpoint(tmp_path, step)
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


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path)])
    assert ended.value.code == 2
    assert "not the directory of a run" in capsys.readouterr().err


def test_ctrl_c_while_ray_train_runs_ends_with_130(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray Train, which handles Ctrl-C itself, ends the workers and then the process, as if all had gone well."""
    write_checkpoint(tmp_path / "run", 5)
    late = find_checkpoint(str(tmp_path / "run"), None, "")
    config = configure(gpt2_scratch(), late)
    config = replace(config, run=replace(config.run, storage=str(tmp_path), name="run"))
    prepared = SimpleNamespace(create_task=print)
    plan: Any = SimpleNamespace(config=config, data_cpus=0, prepare=lambda: prepared)

    def end(trainer: TorchTrainer) -> NoReturn:
        (tmp_path / "run" / ".export").mkdir()
        raise SystemExit(0)

    monkeypatch.setattr(TorchTrainer, "fit", end)
    monkeypatch.setattr(late_export, "start_ray", lambda: None)
    monkeypatch.setattr(late_export, "check_resources", lambda **needed: None)
    with pytest.raises(SystemExit) as ended:
        run_job(lambda arguments: late_export.make_late_export(plan, late) or 0)
    assert ended.value.code == 130
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint-00000005"]
