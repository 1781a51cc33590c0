"""Test the main job when a worker or the whole job is killed or interrupted, and when its loss is not finite."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from language_model_support import Make, assert_same_losses, has_checkpoint, models_of, options_of, submitted, train
from listening_support import family_of, is_loopback, listening, send
from mlflow import MlflowClient
from readme_support import lines_like, run_line
from support import BIN, LANGUAGE_MODEL_OPTIONS, ROOT, outcome_of, run_until, training_worker_pids, wait_for

pytestmark = pytest.mark.cluster


def test_a_killed_worker_costs_only_the_steps_since_the_checkpoint(
    cluster: dict[str, str], home: Path, reference: dict[str, Any]
) -> None:
    """The README's line has ZeRO 3, whose state is in the most pieces; the killed job below has ZeRO 2."""
    (line,) = lines_like("jobs.train_lm * --workers.zero-stage 3")
    killed: list[int] = []

    def kill() -> None:
        wait_for(lambda: has_checkpoint(home / "runs" / "mine"))
        pid = training_worker_pids(cluster)[-1]
        os.kill(pid, signal.SIGKILL)
        killed.append(pid)

    killer = threading.Thread(target=kill)
    killer.start()
    run_line(line, *LANGUAGE_MODEL_OPTIONS)
    killer.join()
    assert killed
    outcome = outcome_of(home, "mine")
    assert 5 <= outcome["resumed_from_step"] < 40
    assert_same_losses(outcome, reference)
    runs = MlflowClient(outcome["tracking_uri"]).search_runs(["1"])
    assert [run.info.run_name for run in runs].count("mine") == 1
    assert sorted(models_of(outcome)) == ["checkpoint-35", "checkpoint-40", "tempnet"]


def test_a_killed_job_goes_on_through_ray_job_submit(
    ray_head: dict[str, str], tiny: Make, reference: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    config = tiny("killed-job")
    run = Path(config.run.directory)
    environment = {name: value for name, value in ray_head.items() if name != "RAY_ADDRESS"}
    processes: list[psutil.Process] = []
    with (tmp_path / "first.log").open("w") as log:
        job = subprocess.Popen(
            [sys.executable, *submitted(config)[1]],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            wait_for(lambda: has_checkpoint(run) or job.poll() is not None)
            assert job.poll() is None, (tmp_path / "first.log").read_text()
            processes = family_of(job.pid)
            # On a busy machine the rest of this short run would end before all sockets have been read.
            send(signal.SIGSTOP, processes)
            listeners = listening(processes)
        finally:
            send(signal.SIGKILL, processes)
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    assert not (run / "outcome.json").exists()
    # The job had a Ray of its own, which listens on loopback, and so does the store at which its two workers meet.
    assert len({pid for pid, name, _ in listeners if name.startswith("ray::RayTrainWo")}) == 2
    assert [listener for listener in listeners if not is_loopback(listener[2])] == []
    submit, arguments = submitted(config)
    assert submit.startswith("ray job submit ")
    submit = submit.replace("ray job submit", f"ray job submit --address {ray_head['DASHBOARD']}")
    done = subprocess.run(
        f"{submit} python {shlex.join(arguments)}",
        shell=True, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "validation perplexity at τ" in done.stdout
    outcome = json.loads((run / "outcome.json").read_text())
    assert 5 <= outcome["resumed_from_step"] < 40
    assert f"continuing after step {outcome['resumed_from_step']}" in done.stdout
    assert outcome["world_size"] == 2
    jobs = MlflowClient(outcome["tracking_uri"]).get_run(outcome["mlflow_run_id"]).data.tags["ray_job_id"]
    assert re.fullmatch(r"[0-9a-f]{8}, raysubmit_\w+", jobs)
    assert_same_losses(outcome, reference)
    # A job that is started a third time has nothing to do, and says so.
    assert train(config) == outcome
    assert "This run is finished" in capsys.readouterr().out
    # Without the token not even the list of jobs can be read.
    refused = subprocess.run(
        [str(BIN / "ray"), "job", "list", "--address", ray_head["DASHBOARD"]],
        env=os.environ | {"RAY_AUTH_MODE": "disabled"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert refused.returncode != 0


@pytest.mark.long
def test_ctrl_c_says_how_to_go_on(ray_head: dict[str, str], tiny: Make) -> None:
    # The signal must come before the end, whatever else the machine has to do.
    config = tiny("interrupted", run={"num_steps": 1000})
    environment = {name: value for name, value in ray_head.items() if name != "RAY_ADDRESS"}
    arguments = ["gpt2-scratch", *options_of(config)]
    status, said = run_until(
        lambda: has_checkpoint(Path(config.run.directory)), "jobs.train_lm", arguments, environment, by=signal.SIGINT
    )
    assert status == 130, said
    assert f"the same command goes on from what is in {config.run.directory}" in said
    assert "Traceback" not in said
    client = MlflowClient(f"sqlite:///{config.run.resolved_storage}/mlflow.db")
    assert [run.info.status for run in client.search_runs(["1"])] == ["KILLED"]
