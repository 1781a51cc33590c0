"""Train without Ray for tests: in processes that are started once, connected by gloo, and called with functions.

They are forks of a process that has imported what takes seconds.

with processes(2) as call:
    first, second = call(function, *arguments)  # function(rank, num_processes, *arguments) in both processes
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from jobs.engine.worker import DirectoryReport, WorkerJob, train_here

Call = Callable[..., list[Any]]
_ROOT = Path(__file__).parents[1]


def _serve(rank: int, num_processes: int, rendezvous: str, pipe: Connection) -> None:
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_processes)}
    os.environ |= {"DS_ACCELERATOR": "cpu", **place}
    torch.set_num_threads(1)
    _divide_all_weights()
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=num_processes)
    while (message := pipe.recv()) is not None:
        function, arguments = message
        try:
            pipe.send((function(rank, num_processes, *arguments), ""))
        except Exception:
            pipe.send((None, traceback.format_exc()))
    dist.destroy_process_group()


def _divide_all_weights() -> None:
    """Have ZeRO 3 divide small weights, too, and keep none whole after use, as if they were those of a large model."""
    from jobs.engine import deepspeed_engine

    configured = deepspeed_engine.deepspeed_config
    none_whole = ("stage3_param_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance")

    def divided(config: Any) -> dict[str, Any]:
        values = configured(config)
        if config.workers.zero_stage == 3:
            values["zero_optimization"] |= dict.fromkeys(none_whole, 0)
        return values

    deepspeed_engine.deepspeed_config = divided


@dataclass
class Asking:
    """A terminal through which a run is asked to save or to stop after some lines of progress."""

    after_step: int
    must_stop: bool
    step: int = 0
    num_answers: int = 0

    def say(self, line: str) -> None:
        """Ignore a line."""

    def show(self, step: int, text: str) -> None:
        """Note the step, and wait until the request is heard, which the loop asks for twice a second."""
        self.step = step
        if step == self.after_step:
            time.sleep(1.2)

    def sign(self, rank: int, step: int, place: str) -> None:
        pass

    def requests(self) -> tuple[bool, int] | None:
        is_due = self.step >= self.after_step
        self.num_answers += is_due
        return (is_due and self.must_stop, int(self.num_answers > 1))


@contextmanager
def processes(num_processes: int) -> Iterator[Call]:
    """Start processes connected by gloo; yield `call(function, *arguments)`, which returns their results in order."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["jobs.engine.loop", "jobs.engine.launch", "transformers.models.auto.modeling_auto"])
    with patch.dict(os.environ, DS_ACCELERATOR="cpu"):  # which DeepSpeed reads when it is imported
        forkserver.ensure_running()
    with tempfile.TemporaryDirectory() as directory:
        pipes, started = [], []
        for rank in range(num_processes):
            here, there = context.Pipe()
            started.append(context.Process(target=_serve, args=(rank, num_processes, f"{directory}/rendezvous", there)))
            started[-1].start()
            there.close()
            pipes.append(here)

        def call(function: Callable[..., Any], *arguments: Any) -> list[Any]:
            for pipe in pipes:
                pipe.send((function, arguments))
            answers = [pipe.recv() for pipe in pipes]  # EOFError if a process has died
            for _, error in answers:
                assert not error, error
            return [result for result, _ in answers]

        try:
            yield call
        finally:
            for pipe, process in zip(pipes, started, strict=True):
                with suppress(OSError):  # the process may have been killed
                    pipe.send(None)
                process.join(timeout=10)
                process.kill()


_READS = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "unique_consecutive"}


class HostReads(TorchDispatchMode):
    """Notes where our own code reads a value of a tensor, for which the host would wait if the tensor were on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        places = args[1] if name.startswith(("index", "_index")) and isinstance(args[1], (list, tuple)) else ()
        if name in _READS or any(isinstance(place, Tensor) and place.dtype == torch.bool for place in places):
            self.note()
        return func(*args, **(kwargs or {}))

    def note(self) -> None:
        """Note the innermost line outside of PyTorch, if it is ours and not one that a GPU skips."""
        frames = (frame for frame in reversed(traceback.extract_stack()) if frame.filename != __file__)
        frame = next(frame for frame in frames if "/torch/" not in frame.filename)
        if Path(frame.filename).is_relative_to(_ROOT / "tests") or "site-packages" in frame.filename:
            return
        if "is_cuda or" not in (frame.line or ""):
            self.found.append(f"{Path(frame.filename).relative_to(_ROOT)}: {frame.line}")


def recording(create_task: Callable[[int, int], Any], file: str, rank: int, world_size: int) -> Any:
    """Create a task that writes a line about every step into `<file>-<rank>`: its number, its loss, its batch's digest.

    Alone, it also writes what :class:`HostReads` finds in steps without statistics into `<file>.reads`.
    """
    task = create_task(rank, world_size)
    train_step = task.train_step

    def recorded(engine: Any, batch: dict[str, Any], *, step: int, **rest: Any) -> Any:
        watches = world_size == 1 and not rest["with_statistics"] and not task.config.workers.compiles
        with HostReads() if watches else nullcontext() as reads:
            result = train_step(engine, batch, step=step, **rest)
        if reads is not None:
            Path(f"{file}.reads").write_text("\n".join(reads.found))
        with open(f"{file}-{rank}", "a") as lines:
            lines.write(f"{json.dumps([step + 1, result.loss.double().tolist(), int(batch['digest'].sum())])}\n")
        return result

    task.train_step = recorded
    return task


def history(file: Path | str) -> dict[int, tuple[float, int]]:
    """Return step → (loss, digest of the batch), summed over ranks; of a step that was made again, the last counts."""
    steps: dict[int, tuple[float, int]] = {}
    for path in sorted(Path(file).parent.glob(f"{Path(file).name}-*")):
        lines = map(json.loads, path.read_text().splitlines())
        for step, (loss, digest) in {step: values for step, *values in lines}.items():
            before = steps.get(step, (0.0, 0))
            steps[step] = (before[0] + loss, (before[1] + digest) % (1 << 48))
    return steps


def train_plan(
    rank: int, world_size: int, make: Callable[[], Any], file: str, settings: dict[str, Any]
) -> dict[str, Any]:
    """Prepare the plan that `make` returns and train it in this process as a job with these fields; write its report.

    The steps are recorded in a file (`recording`).
    """
    from jobs.engine.launch import finish

    plan = make()
    config = plan.config.with_num_workers(world_size)
    for turn in range(world_size):  # one process prepares the data, the others find them
        try:
            if turn == rank:
                prepared = plan.prepare()
        finally:
            dist.barrier()
    if rank == 0:
        Path(config.run.directory).mkdir(parents=True, exist_ok=True)
        prepared.write_records(config.run.directory)
    job = WorkerJob(create_task=partial(recording, prepared.create_task, file), **settings)
    result = train_here(job, config, NotedReport(config))
    return finish(plan, prepared, None, result) if "num_steps" in result else result


class NotedReport(DirectoryReport):
    """Also notes what is reported in `reported.jsonl` of the run's directory."""

    def __call__(self, metrics: Mapping[str, float], directory: Path | None, *, step: int) -> None:
        """Store this rank's part of a checkpoint."""
        if dist.get_rank() == 0:
            with open(f"{self._run.directory}/reported.jsonl", "a") as lines:
                lines.write(f"{json.dumps({'step': step, **metrics})}\n")
        super().__call__(metrics, directory, step=step)
