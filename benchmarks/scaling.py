"""Training throughput of two workers against one, each with one thread, the data pipeline included.

    .venv/bin/python -m benchmarks.scaling [--num-rounds 3] [--seconds 25]

`gpt2-scratch-small` on the sample data, with the command that a person types and the same global batch. All forms are started
first, and wait at their 20th step; then each trains for some seconds in turn, round after round, while all processes of the
others are stopped (SIGSTOP). So a ratio compares times that lie beside each other, and a start costs nothing.

Beside two workers stands what two cores of the machine give at all: the same training step, in plain PyTorch, in two
processes that have nothing to do with each other, each with half of the batch, against one process.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import psutil
import torch
import tyro
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.measure import job_environment, print_setting, print_table, ratios, spread, train_lm_command
from jobs.studies.reproduction.direct import training_step
from tempnet import TempNet, TempNetConfig
from tempnet.models.causal_lm import TemperatureCausalLM
from tempnet.softmax.config import TemperatureLossConfig

TARGET = 1.75
VOCAB_SIZE, BATCH_SIZE, CONTEXT_LENGTH = 2048, 16, 128  # those of gpt2-scratch-small on the sample data
_NUM_FIRST_STEPS, _STEPS_PER_LINE = 20, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What to measure."""

    num_rounds: int = 3
    seconds: float = 25.0
    """Seconds for which every form trains in a round."""
    zero_stages: tuple[int, ...] = (0, 2)
    """ZeRO stages under which two workers train; one worker trains under the first of them."""
    precision: str = "fp32"
    """Precision of all runs of the job."""
    alone: int = 0
    """Print the steps of a training without the job, with this number of texts in a batch, and measure nothing else."""


class Training:
    """A training in processes of its own, which is stopped and goes on; it prints `step N/`."""

    def __init__(self, command: Sequence[str], num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=job_environment()
        )
        self._steps: list[tuple[float, int]] = []
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)
            if found := re.match(r"step +(\d+)/", line):
                self._steps.append((time.monotonic(), int(found[1])))

    def wait_for(self, step: int) -> None:
        """Wait until a step is printed, and stop; a training that has ended raises RuntimeError with its last lines."""
        while not self._steps or self._steps[-1][1] < step:
            self._check(is_running=self._process.poll() is None)
            time.sleep(0.1)
        self._send(signal.SIGSTOP)

    def start(self) -> int:
        """Go on; return the number of lines that were printed before."""
        self._send(signal.SIGCONT)
        return len(self._steps)

    def stop(self, start: int) -> float:
        """Stop; return the tokens a second between the first and the last line since the start, of at least two."""
        self._check(is_running=self._process.poll() is None and len(self._steps) > start + 1)
        self._send(signal.SIGSTOP)
        (first, at), *_, (last, step) = self._steps[start:]
        return (step - at) * self._num_tokens / (last - first)

    def close(self) -> None:
        """End all processes."""
        self._send(signal.SIGKILL)
        self._process.wait()

    def _check(self, *, is_running: bool) -> None:
        if not is_running:
            self._reader.join(timeout=1.0)
            raise RuntimeError(f"a training has ended, or is too slow for a round:\n{''.join(self._lines[-40:])}")

    def _send(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            for process in [*psutil.Process(self._process.pid).children(recursive=True), self._process]:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)


def train_alone(batch_size: int) -> NoReturn:
    """Do training steps with one thread, in fp32, and print `step N/`, until the process is killed."""
    torch.set_num_threads(1)
    base = AutoConfig.for_model(
        "gpt2", vocab_size=VOCAB_SIZE, n_embd=192, n_layer=4, n_head=6, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    )  # fmt: skip
    module = TemperatureCausalLM(
        AutoModelForCausalLM.from_config(base, attn_implementation="eager"),
        TempNet(TempNetConfig.for_logits(VOCAB_SIZE, rho=3.0)),
        TemperatureLossConfig(name="dro", rho=3.0),
        vocab_size=VOCAB_SIZE,
    )
    ids, targets = torch.randint(VOCAB_SIZE, (2, batch_size, CONTEXT_LENGTH))
    step, number = training_step(module, ids, torch.arange(CONTEXT_LENGTH).expand_as(ids), targets), 0
    while True:
        step()
        number += 1
        if number % _STEPS_PER_LINE == 0:
            print(f"step {number}/", flush=True)


def forms(arguments: Arguments, storage: Path) -> dict[str, list[list[str]]]:
    """Return the name of every form with its commands, which train at the same time."""

    def job(num_workers: int, stage: int) -> list[list[str]]:
        options = [
            "--run.num-steps=1000000", f"--run.log-every={_STEPS_PER_LINE}", "--run.checkpoint-every=1000000",
            "--validation.every=1000000", "--workers.num-threads=1", f"--workers.precision={arguments.precision}",
            f"--workers.num-workers={num_workers}", f"--workers.zero-stage={stage}",
        ]  # fmt: skip
        return [train_lm_command(storage, f"workers-{num_workers}-zero-{stage}", *options)]

    def processes(number: int) -> list[list[str]]:
        return [[sys.executable, "-m", "benchmarks.scaling", "--alone", str(BATCH_SIZE // number)]] * number

    found = {"one worker": job(1, arguments.zero_stages[0])}
    found |= {f"two workers, ZeRO {stage}": job(2, stage) for stage in arguments.zero_stages}
    return found | {"one process": processes(1), "two independent processes": processes(2)}


def main(arguments: Arguments) -> None:
    """Print the tokens a second of every form, and their ratios to one worker or process, beside the target."""
    if arguments.alone:
        train_alone(arguments.alone)
    print_setting(arguments, "torch", "ray", "deepspeed")
    with tempfile.TemporaryDirectory(prefix="scaling-") as storage, ExitStack() as stack:
        trainings: dict[str, list[Training]] = {}
        for name, commands in forms(arguments, Path(storage)).items():
            num_tokens = BATCH_SIZE * CONTEXT_LENGTH // len(commands)
            trainings[name] = [Training(command, num_tokens) for command in commands]
            for training in trainings[name]:
                stack.callback(training.close)
            for training in trainings[name]:
                training.wait_for(_NUM_FIRST_STEPS)
        speeds: dict[str, list[float]] = {name: [] for name in trainings}
        for _ in range(arguments.num_rounds):
            for name, together in trainings.items():
                starts = [training.start() for training in together]
                time.sleep(arguments.seconds)
                speeds[name].append(sum(one.stop(at) for one, at in zip(together, starts, strict=True)))
    rows = []
    for name, of_rounds in speeds.items():
        base = speeds["one process" if "process" in name else "one worker"]
        rows.append([name, spread(of_rounds, 0), spread(ratios(of_rounds, base))])
    print_table([f"target {TARGET:g}", "tokens/s", "of one"], rows)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
