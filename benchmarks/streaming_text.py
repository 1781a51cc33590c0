"""Training that starts while its text is prepared: when the first step comes, and how long later ones wait for data.

    .venv/bin/python -m benchmarks.streaming_text [--megabytes 200] [--num-steps 150]

The preset `gpt2-scratch-small` trains on the tar of `benchmarks.text_preparation`, with the command that a person types:
with `--data.prepare streaming`, and then with `ahead`, whose text is prepared in a directory of its own. Shown are the
seconds from the start of the command, Ray's start and the preparation of the validation text included, and from the start
of the training loop on rank 0; the share of the time after the first step that was spent waiting for data; and whether the
digests of all batches are the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import ray
import tyro
from mlflow import MlflowClient

from benchmarks.text_preparation import read_texts, write_tar
from jobs.engine.metrics import metric_history
from jobs.engine.tracking import TrackedRun, metric_name

FIRST_STEP_SECONDS, WAIT_SHARE = 30.0, 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What to measure."""

    megabytes: int = 200
    """Size of the tar in units of 10⁶ bytes."""
    num_steps: int = 150
    """Number of steps of each run."""
    source: str = "data/sample/text/train"
    """Text that the tar is made from."""
    validation: str = "data/sample/text/validation"
    """Validation text."""
    with_ahead: bool = True
    """Whether the text is also prepared ahead, and the batches are compared."""
    options: tuple[str, ...] = ()
    """Further options of both runs, each as `--name=value`."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a run tells."""

    first_step: float
    """Seconds from the start of the command to the end of the first step."""
    first_step_of_loop: float
    """Seconds of the first step itself, with the wait for its batch."""
    wait_share: float
    """Share of the time after the first step that was spent waiting for data."""
    digests: list[float]
    """Digest of every batch."""
    num_parts: int
    """Number of parts that were prepared when the run had ended."""


def run(prepare: str, tar: Path, storage: Path, arguments: Arguments) -> Run:
    """Train, and return what the run has logged."""
    command = [
        sys.executable, "-m", "jobs.train_lm", "gpt2-scratch-small", f"--data.train={tar}",
        f"--data.validation={arguments.validation}", f"--data.prepare={prepare}", f"--run.storage={storage}",
        f"--run.name={prepare}", f"--run.prepared={storage}/prepared-{prepare}", f"--run.num-steps={arguments.num_steps}",
        "--run.log-every=1", "--validation.every=1000000", *arguments.options,
    ]  # fmt: skip
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    started = time.time()
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{prepare} failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    outcome = json.loads(next((storage / prepare).rglob("outcome.json")).read_text())
    tracked = TrackedRun(uri=outcome["tracking_uri"], run_id=outcome["mlflow_run_id"])
    tokens, speeds, shares, digests = (
        metric_history(tracked, f"train/{name}")
        for name in ("tokens", "tokens_per_second", "data_wait_share", "batch_digest")
    )
    history = MlflowClient(tracked.uri).get_metric_history(tracked.run_id, metric_name("train/tokens_per_second"))
    seconds = {step: (tokens[step] - tokens.get(step - 1, 0.0)) / speeds[step] for step in speeds}
    waited = sum(shares[step] * seconds[step] for step in seconds if step > 1)
    return Run(
        first_step=min(metric.timestamp for metric in history) / 1000 - started,
        first_step_of_loop=seconds[1],
        wait_share=waited / sum(seconds[step] for step in seconds if step > 1),
        digests=[digests[step] for step in sorted(digests)],
        num_parts=len(list(storage.glob(f"prepared-{prepare}/*/part-*.json"))),
    )


def main(arguments: Arguments) -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as directory:
        tar = Path(directory) / "text.jsonl.zst.tar"
        num_members, _ = write_tar(tar, read_texts(arguments.source), arguments.megabytes * 10**6)
        print(f"{tar.stat().st_size / 1e6:.0f} MB in {num_members} members; ray {ray.__version__}", flush=True)
        runs = {}
        for prepare in ("streaming", "ahead") if arguments.with_ahead else ("streaming",):
            runs[prepare] = result = run(prepare, tar, Path(directory), arguments)
            print(
                f"{prepare}: first step {result.first_step:.1f} s after the command, {result.first_step_of_loop:.1f} s after "
                f"the loop; then {result.wait_share:.2%} of {arguments.num_steps - 1} steps waiting for data; "
                f"{result.num_parts} parts prepared at the end",
                flush=True,
            )
    if arguments.with_ahead:
        same = runs["streaming"].digests == runs["ahead"].digests
        print(f"batches of both: {'the same' if same else 'DIFFERENT'}, {len(runs['ahead'].digests)} of them")
    print(f"targets: first step within {FIRST_STEP_SECONDS:g} s, waiting below {WAIT_SHARE:.0%}, the same batches")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
