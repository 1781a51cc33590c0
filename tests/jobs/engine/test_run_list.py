"""Test that the list of runs tells the state of each from its files, locally and in an object store."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jobs import runs
from jobs.engine.config import RunSection
from jobs.engine.console import Progress, note_failure
from jobs.engine.lease import LEASE_FILE, Lease
from jobs.engine.run_list import RunSummary, describe_run, list_runs
from pipelines.storage import resolve, write_json


def begin(directory: str, *, step: int = 0) -> None:
    """Write the files that a run with 100 steps has after some of them."""
    filesystem, path = resolve(directory)
    filesystem.create_dir(path, recursive=True)
    write_json(f"{directory}/configuration.json", {"run.num_steps": 100, "run.seed": 0})
    if step:
        figures = {"loss": 2.5, "tau_mean": 0.8, "seconds_per_step": 3.0, "seconds_per_note": 3.0}
        write_json(f"{directory}/progress.json", {"step": step, "time": time.time(), **figures})


def only(storage: str, *, now: float | None = None) -> RunSummary:
    (run,) = list_runs(storage, now=now)
    return run


def test_the_states_of_a_run(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    begin(str(directory))
    assert (only(str(tmp_path)).state, only(str(tmp_path)).step) == ("waiting", 0)

    with Lease(str(directory)):
        begin(str(directory), step=40)
        run = only(str(tmp_path))
        assert (run.name, run.state, run.step, run.num_steps) == ("run", "running", 40, 100)
        assert (run.loss, run.tau_mean, run.seconds_left, run.failure) == (2.5, 0.8, 180.0, "")
        lease = json.loads((directory / LEASE_FILE).read_text())
        # It lives, but has shown no progress for long.
        for seconds, state in ((3.0, "stalled"), (30.0, "running")):
            late = {"step": 40, "time": time.time() - 90, "seconds_per_note": seconds}
            (directory / "progress.json").write_text(json.dumps(late))
            assert only(str(tmp_path)).state == state
        begin(str(directory), step=40)
        # A driver on another machine is believed for a minute.
        (directory / LEASE_FILE).write_text(json.dumps(lease | {"machine": "another"}))
        assert only(str(tmp_path)).state == "running"
        assert only(str(tmp_path), now=time.time() + 120).state == "lost"
        # The process of a driver on this machine can be seen.
        (directory / LEASE_FILE).write_text(json.dumps(lease | {"start_ticks": 1}))
        assert only(str(tmp_path)).state == "lost"
        (directory / LEASE_FILE).write_text(json.dumps(lease))

    note_failure(str(directory), "worker 0: its process died", step=30, is_final=False)
    run = only(str(tmp_path))
    assert run.state == "interrupted"
    assert run.failure.endswith("ago, at step 30: worker 0: its process died")
    assert "last failure" in describe_run(str(directory))
    note_failure(str(directory), "no room\non the disk" + "!" * 200, step=30, is_final=True)
    run = only(str(tmp_path))
    assert run.state == "failed"
    assert "no room on the disk!" in run.failure
    assert len(run.failure) < 150

    write_json(f"{directory}/outcome.json", {"num_steps": 100, "validation": {"tau_mean": 0.9}})
    run = only(str(tmp_path))
    assert (run.state, run.step, run.tau_mean, run.seconds_left) == ("finished", 100, 0.9, None)


def test_damaged_files_and_other_directories_do_no_harm(tmp_path: Path) -> None:
    for name in ("prepared", "sweep/trial-1"):
        (tmp_path / name).mkdir(parents=True)
    begin(str(tmp_path / "sweep" / "trial-1"), step=5)
    begin(str(tmp_path / "whole"), step=5)
    (tmp_path / "whole" / "progress.json").write_text("{")
    assert [(run.name, run.step) for run in list_runs(str(tmp_path))] == [("sweep/trial-1", 0), ("whole", 0)]
    for bad in ({"step": "x", "time": [], "loss": {}, "seconds_per_step": "1"}, {"time": None, "step": float("nan")}):
        (tmp_path / "whole" / "progress.json").write_text(json.dumps(bad))
        (tmp_path / "whole" / "failure.json").write_text(json.dumps(bad))
        (tmp_path / "whole" / "outcome.json").write_text(json.dumps({"num_steps": [], "validation": "x"}))
        (tmp_path / "whole" / LEASE_FILE).write_text(json.dumps({"pid": "x"}))
        assert [run.name for run in list_runs(str(tmp_path))] == ["sweep/trial-1", "whole"]
    assert describe_run(str(tmp_path / "prepared")) == ""


def test_runs_in_an_object_store(bucket: str) -> None:
    storage = f"s3://{bucket}/runs"
    begin(f"{storage}/one", step=20)
    run = only(storage)
    assert (run.name, run.state, run.loss) == ("one", "interrupted", 2.5)


def test_progress_is_noted_and_never_stops_a_run(tmp_path: Path) -> None:
    context: Any = SimpleNamespace(terminal=None, say=print)
    (tmp_path / "file").touch()
    for storage in (tmp_path, tmp_path / "file"):
        run = RunSection(name="a", storage=str(storage), num_steps=100)
        with suppress(OSError):
            begin(run.directory)
        progress = Progress(context, run, first_step=0, unit="tokens", with_lines=False)
        progress.show(40, 2.5, 0.8, 1.0)
        progress.show(50, 2.4, None, 1.0)
        progress.close()
        note_failure(run.directory, "a cause", step=1, is_final=False)
    found = only(str(tmp_path))
    assert (found.loss, found.tau_mean, found.state) == (2.4, 0.8, "interrupted")


def test_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begin(str(tmp_path / "a"), step=20)
    begin(str(tmp_path / "b"))
    note_failure(str(tmp_path / "b"), "file \x1b]0;title\x07\x1b[2J\u202e.txt", step=0, is_final=False)
    assert runs.main([str(tmp_path)]) == 0
    table = capsys.readouterr().out.splitlines()
    assert [row.split("|")[1].strip() for row in table[2:]] == ["a", "b"]
    assert r"file \x1b]0;title\x07\x1b[2J\u202e.txt" in table[3]  # and no terminal acts on it
    assert "20/100" in table[2] or "0/100" in table[2]
    assert runs.main([str(tmp_path), "--state", "lost"]) == 0
    assert capsys.readouterr().out == f"no run in {tmp_path}, of 2, is lost\n"
    assert runs.main([str(tmp_path), "--json"]) == 0
    assert [json.loads(line)["name"] for line in capsys.readouterr().out.splitlines()] == ["a", "b"]
