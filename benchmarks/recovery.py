"""What a run loses at a checkpoint, when its workers are killed, when a node is lost, and until it uses one that comes.

    .venv/bin/python -m benchmarks.recovery

Two nodes on this machine, each with room for one worker of `gpt2-scratch-small`. The stall of a checkpoint is the time
between two steps with a checkpoint between them, less the median without one, by MLflow's timestamps. The other figures are
seconds from the event (SIGKILL of all workers; SIGKILL of all processes of a node; the command that starts a node) to the
first step that the new workers show.
"""

from __future__ import annotations

import signal
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from mlflow import MlflowClient

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "cluster"))
from node_support import Job, TwoNodes, two_nodes

STALL_SHARE, RESTART_SECONDS, RESIZE_SECONDS = 0.02, 40.0, 60.0
_STEADY_SECONDS = 15.0


def measure_stall(options: list[str], storage: Path, cluster: TwoNodes) -> None:
    """Print how long the workers stand still at a checkpoint."""
    every = 20
    job = Job(
        *options, "--run.name=stall", "--run.num-steps=160", f"--run.checkpoint-every={every}",
        environment=cluster.environment,
    )  # fmt: skip
    if job.end():
        raise RuntimeError(job.tail())
    client = MlflowClient(f"sqlite:///{storage}/mlflow.db")
    (run,) = client.search_runs(["1"], "attributes.run_name = 'stall'")
    times = {
        metric.step: metric.timestamp / 1000 for metric in client.get_metric_history(run.info.run_id, "train/loss")
    }
    gaps = {step: times[step + 1] - times[step] for step in times if step + 1 in times and step > every / 2}
    usual = statistics.median(gap for step, gap in gaps.items() if step % every)
    stalls = [gap - usual for step, gap in gaps.items() if step % every == 0]
    stall = statistics.mean(stalls)
    print(
        f"checkpoint: a step takes {usual:.3f} s; one with a checkpoint {stall:.3f} s more (mean of {len(stalls)}, "
        f"{min(stalls):.3f} to {max(stalls):.3f}): {stall / 60:.2%} of the time with one a minute "
        f"({STALL_SHARE:.0%} was to be)",
        flush=True,
    )


def measure_recovery(options: list[str], cluster: TwoNodes) -> None:
    """Print the seconds after which a run goes on."""
    job = Job(
        *options, "--run.name=recovery", "--run.num-steps=1000000", "--run.checkpoint-every=10", "--run.max-restarts=9",
        environment=cluster.environment,
    )  # fmt: skip
    job.wait(r"step +30/")

    def report(event: str, seconds: float, target: float) -> None:
        print(f"{event}: {seconds:.1f} s to the next step ({target:g} was to be)", flush=True)
        time.sleep(_STEADY_SECONDS)

    started = time.monotonic()
    cluster.kill_workers()
    report("workers killed", job.wait_for_new_workers(started) - started, RESTART_SECONDS)
    started = time.monotonic()
    cluster.node.kill()
    report("a node of two lost", job.wait_for_new_workers(started) - started, RESIZE_SECONDS)
    started = time.monotonic()
    cluster.start_node()
    grows = job.wait("the cluster has room for 2 workers: the run grows", started)
    print(f"a node came: {grows - started:.1f} s after its command the run begins to grow")
    report("a node came", job.wait_for_new_workers(grows) - started, RESIZE_SECONDS)
    job.process.send_signal(signal.SIGTERM)
    with suppress(Exception):
        job.end(seconds=60)


def main() -> None:
    """Measure, and print every figure beside its target."""
    with tempfile.TemporaryDirectory(prefix="recovery-") as name, two_nodes({}, {}) as cluster:
        options = [
            "gpt2-scratch-small", "--run.log-every=1", f"--run.storage={name}", "--workers.num-workers=1:2",
            "--workers.cpus-per-worker=1.5", "--workers.num-threads=1", "--workers.precision=fp32",
            "--validation.every=1000000",
        ]  # fmt: skip
        measure_stall(options, Path(name), cluster)
        measure_recovery(options, cluster)


if __name__ == "__main__":
    main()
