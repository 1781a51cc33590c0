"""Lists the runs in a storage with their state, from the files there alone: no Ray and no MLflow is asked."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from pyarrow.fs import FileSelector, FileType

from jobs.engine.console import FAILURE_FILE, PROGRESS_FILE, clock
from jobs.engine.lease import LEASE_FILE, is_ended_here
from jobs.engine.resumption import registered_step
from pipelines.storage import join, read_json, resolve

_SECONDS_TO_EXPIRE = 60.0  # as long as a driver lets a lease of another machine stand
_SECONDS_TO_STALL, _NOTES_TO_STALL = 60.0, 4.0  # without progress: at least a minute, and as long as four notes took
_NUM_READERS = 16
_MAX_CAUSE = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What is known of a run."""

    name: str
    """Name of the run, below the storage."""
    state: str
    """finished, running, stalled (its driver lives, but it shows no progress), failed, interrupted, lost (the driver has
    ended without a word) or waiting (no step was made, and nobody makes one: it waits its turn, or was stopped before)."""
    step: int
    """The newest step that is known of; of a run that does not train, the step that it would go on from."""
    num_steps: int
    loss: float | None
    tau_mean: float | None
    seconds_left: float | None
    """Seconds of training that remain at the last speed; None if the speed is not known or nothing remains."""
    failure: str
    """Why it failed the last time, when, and from which step it went on; empty if it never failed."""
    last_sign: float
    """Time of the last sign of life, in seconds since 1970; 0 if there is none."""


def list_runs(storage: str, *, now: float | None = None) -> list[RunSummary]:
    """Return the training runs in a directory or at a URI, also those one directory deeper, sorted by name."""
    filesystem, path = resolve(storage)
    if filesystem.get_file_info(path).type == FileType.NotFound:
        raise ValueError(f"storage = {storage!r} is missing: give the directory or URI of --run.storage")
    moment = time.time() if now is None else now
    names = list(_directories(storage))
    with ThreadPoolExecutor(_NUM_READERS) as pool:
        states = list(pool.map(lambda name: read_run(storage, name, now=moment), ["", *names]))
        inner = [
            f"{name}/{child}"
            for name, state in zip(names, states[1:], strict=True)
            if state is None
            for child in _directories(join(storage, name))
        ]
        states += pool.map(lambda name: read_run(storage, name, now=moment), inner)
    return sorted((state for state in states if state is not None), key=lambda state: state.name)


def _directories(uri: str) -> Iterator[str]:
    filesystem, path = resolve(uri)
    for entry in filesystem.get_file_info(FileSelector(path, allow_not_found=True)):
        if entry.type == FileType.Directory:
            yield entry.base_name


def read_run(storage: str, name: str, *, now: float) -> RunSummary | None:
    """Return the state of the run with a name, or None if there is no training run in this directory."""
    directory = join(storage, name) if name else storage
    num_steps = _number(_read(directory, "configuration.json"), "run.num_steps")
    if num_steps is None:
        return None
    outcome, progress, failure = (_read(directory, file) for file in ("outcome.json", PROGRESS_FILE, FAILURE_FILE))
    filesystem, path = resolve(join(directory, LEASE_FILE))
    last_beat = (filesystem.get_file_info(path).mtime_ns or 0) / 1e9
    last_sign = max(last_beat, *(_number(file, "time") or 0.0 for file in (progress, failure)))
    state = "finished" if outcome else _unfinished(directory, failure, progress, last_sign=last_sign, now=now)
    step = int(_number(progress, "step") or 0)
    if state in ("failed", "interrupted", "lost"):
        step = registered_step(directory)
    if state == "finished":
        step = int(_number(outcome, "num_steps") or step)
    seconds = _number(progress, "seconds_per_step")
    left = None if seconds is None or state == "finished" else seconds * (num_steps - step)
    validation = outcome.get("validation")
    validated = _number(validation, "tau_mean") if isinstance(validation, dict) else None
    return RunSummary(
        name=name or directory.rstrip("/").rpartition("/")[2],
        state=state,
        step=step,
        num_steps=int(num_steps),
        loss=_number(progress, "loss"),
        tau_mean=_number(progress, "tau_mean") if validated is None else validated,
        seconds_left=left,
        failure=_describe_failure(failure, now=now),
        last_sign=last_sign,
    )


def _unfinished(
    directory: str, failure: dict[str, Any], progress: dict[str, Any], *, last_sign: float, now: float
) -> str:
    """Return the state of a run that is not finished."""
    if lease := _read(directory, LEASE_FILE):
        if is_ended_here(lease) or now - last_sign > _SECONDS_TO_EXPIRE:
            return "lost"
        noted, between = _number(progress, "time"), _number(progress, "seconds_per_note") or 0.0
        is_late = noted is not None and now - noted > max(_SECONDS_TO_STALL, _NOTES_TO_STALL * between)
        return "stalled" if is_late else "running"
    if not progress and not failure and not registered_step(directory):
        return "waiting"
    is_newest = (_number(failure, "time") or 0.0) >= (_number(progress, "time") or 0.0)
    return "failed" if failure.get("is_final") and is_newest else "interrupted"


def _read(directory: str, file: str) -> dict[str, Any]:
    """Return the content of a JSON file; empty if it is missing, damaged, or just being replaced."""
    try:
        return read_json(join(directory, file)) or {}
    except (ValueError, OSError):
        return {}


def _number(values: dict[str, Any], name: str) -> float | None:
    """Return a number of a file; None if it is missing or is none: one bad file must not hide all other runs."""
    value = values.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _describe_failure(failure: dict[str, Any], *, now: float) -> str:
    if not failure:
        return ""
    cause = " ".join(str(failure.get("cause", "")).split())
    if len(cause) > _MAX_CAUSE:
        cause = f"{cause[:_MAX_CAUSE]}…"
    return f"{clock(max(0.0, now - (_number(failure, 'time') or now)))} ago, at step {failure.get('step')}: {cause}"


def table_of(runs: list[RunSummary]) -> list[list[str]]:
    """Return the rows of a table of runs, the heading first."""
    rows = [["run", "state", "step", "loss", "mean τ", "time left", "last failure"]]
    return rows + [[run.name, run.state, f"{run.step}/{run.num_steps}", *_figures(run), run.failure] for run in runs]


def _figures(run: RunSummary) -> list[str]:
    """Return loss, mean τ and the remaining time as texts; empty if they are not known."""
    pairs = ((run.loss, "{:.4f}".format), (run.tau_mean, "{:.4g}".format), (run.seconds_left, clock))
    return ["" if value is None else text(value) for value, text in pairs]


def describe_run(directory: str) -> str:
    """Return one line on a run that is started again: how far it was and why it failed; empty if it has no notes yet."""
    run = read_run(directory, "", now=time.time())
    if run is None or (run.loss is None and not run.failure):
        return ""
    known = zip(("loss {}", "mean τ {}", "{} left", "last failure {}"), [*_figures(run), run.failure], strict=True)
    told = [text.format(value) for text, value in known if value]
    return ", ".join([f"before this start: step {run.step} of {run.num_steps}", *told])
