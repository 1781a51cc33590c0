"""Test the main job with real Ray Data, Ray Train, DeepSpeed and MLflow: its results, and what is killed and goes on.

That every stage of ZeRO and every number of workers trains the same, and what a frozen base and an export hold, is tested
without Ray in tests/jobs/engine/test_loop.py and tests/jobs/tasks/test_training.py.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from mlflow import MlflowClient
from readme_support import lines_like, recipe, run_line
from safetensors.torch import load_file
from server_support import BIN
from support import (
    LANGUAGE_MODEL_OPTIONS,
    ROOT,
    assert_same_losses,
    at_the_same_time,
    history,
    last_checkpoint,
    models_of,
    outcome_of,
    tiny_options,
    training_worker_pids,
    wait_for,
)

from jobs import train_lm
from pipelines.storage import compute_digest
from pipelines.stream import RankStream
from pipelines.text.blocks import BlockSource
from pipelines.text.manifest import Manifest

pytestmark = pytest.mark.cluster


def test_the_run_learned_and_left_everything_a_person_needs(reference: dict[str, Any]) -> None:
    losses = history(reference, "train/loss")
    assert sorted(losses) == list(range(1, 41))
    assert losses[40] < losses[1] - 0.3
    assert reference["resumed_from_step"] == 0
    assert reference["validation"]["cross_entropy"] < math.log(512)
    report = Path(reference["directory"]) / "report"
    names = {path.name for path in report.iterdir()}
    assert names == {"tokens.html", "histogram.png", "curves.png", "summary.txt", "outcome.json", "configuration.json"}
    client = MlflowClient(reference["tracking_uri"])
    run = client.get_run(reference["mlflow_run_id"])
    assert run.info.status == "FINISHED"
    assert run.data.params["temperature.target_entropy"] == "3.0"
    assert run.data.tags["temperature.verdict"] == reference["temperature_verdict"]
    assert run.data.metrics["verdict/robust/mean_shift_loss"] == reference["rivals"]["robust/mean_shift_loss"]
    assert float(run.data.params["resolved.rho"]) == pytest.approx(math.log(512) - 3.0)
    assert {entry.dataset.name for entry in run.inputs.dataset_inputs} == {"train", "validation"}
    assert {artifact.path for artifact in client.list_artifacts(run.info.run_id)} == names
    for key in ("train/tau_mean", "train/tau_q95", "train/regret", "train/tau_entropy_spearman", "train/gradient_norm",
                "train/data_wait_share", "train/learning_rate/base", "train/learning_rate/tempnet"):  # fmt: skip
        assert {10, 20, 30, 40} <= set(history(reference, key)), key
    assert sorted(history(reference, "validation/cross_entropy_tau")) == [20, 40]
    assert history(reference, "system/cpu_utilization_percentage")
    models = models_of(reference)
    assert sorted(models) == ["checkpoint-35", "checkpoint-40", "tempnet"]
    for model in models.values():
        assert Path(model.tags["uri"]).is_dir()
    scores = {metric.key: metric.value for metric in models["tempnet"].metrics}
    assert scores["validation/cross_entropy_tau"] == pytest.approx(reference["validation"]["cross_entropy_tau"])


def test_two_workers_had_the_batches_of_the_plan(home: Path, reference: dict[str, Any]) -> None:
    """One process reads them here in their order, without Ray."""
    fields = json.loads((home / "runs" / "gpt2-scratch-small" / "configuration.json").read_text())
    (prepared,) = (home / "runs" / "prepared").glob("train-64-*")
    text, digest = Manifest.load(str(prepared)), ""
    plan = text.plan(seed=fields["run.seed"], window_size=fields["data.shuffle_window"])
    stream = RankStream(source=BlockSource(manifest=text), plan=plan, batch_size=8, rank=0, world_size=1, num_readers=0)
    for batch in stream.batches(0, 40 * 8):
        digest = compute_digest([digest, int(batch["digest"].sum())])
    assert reference["world_size"] == 2
    assert reference["batches_digest"] == digest


def test_the_run_is_finished_and_listed(
    home: Path, reference: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run_line(recipe("run")[3], *LANGUAGE_MODEL_OPTIONS)  # nothing is left to do
    assert "This run is finished" in capsys.readouterr().out
    run_line(*lines_like("jobs.runs *"), "--json")
    runs = [json.loads(row) for row in capsys.readouterr().out.splitlines()]
    (run,) = (run for run in runs if run["name"] == "gpt2-scratch-small")
    assert (run["state"], run["step"], run["num_steps"], run["failure"]) == ("finished", 40, 40, "")


def test_an_export_is_made_of_a_checkpoint(home: Path, reference: dict[str, Any]) -> None:
    """The checkpoint of the last step gives the export that the run itself has made."""
    output = home / "exports" / "last"
    run_line(*lines_like("jobs.export *"), f"--output={output}")
    for place in (Path(), Path("tempnet")):
        made, own = (load_file(export / place / "model.safetensors") for export in (output, Path(reference["export"])))
        assert made.keys() == own.keys()
        assert all(torch.equal(made[name], own[name]) for name in own)
    assert not list((home / "runs" / "gpt2-scratch-small").glob(".export*"))


def test_a_tempnet_on_a_frozen_base_in_bf16_is_the_same_in_one_process_without_ray(
    home: Path, reference: dict[str, Any]
) -> None:
    (line,) = lines_like("jobs.train_lm frozen-small *")
    options = [
        "--run.num-steps=10", "--run.log-every=10", "--data.context-length=64", "--temperature.hidden-size=32",
        "--temperature.num-prototypes=16", "--temperature.num-calibration-tokens=1024", "--optimizer.batch-size=8",
        "--optimizer.learning-rate-tempnet=0.05", "--workers.num-workers=1", "--workers.num-threads=1",
        "--workers.zero-stage=3", "--workers.offload-optimizer", "--validation.num-blocks=32",
        "--validation.num-oracle-tokens=256",
    ]  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        train_lm.main([*shlex.split(line)[3:], *options, "--temperature.calibrated-tau=1.9999"])
    assert ended.value.code == 2
    assert not (home / "runs" / "frozen-small").exists()  # A run that cannot start does not take the name.
    run_line(line, *options)
    outcome = outcome_of(home, "frozen-small")
    losses = history(outcome, "train/loss")
    assert losses[10] < losses[1]
    # No Ray is at this address.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": "127.0.0.1:1"}
    words = [*shlex.split(line)[1:], *options, "--workers.local", "--run.name=alone"]
    subprocess.run([sys.executable, *words], cwd=home, env=environment, check=True)
    alone = outcome_of(home, "alone")
    assert history(alone, "train/loss") == losses
    assert (alone["validation"], alone["batches_digest"]) == (outcome["validation"], outcome["batches_digest"])
    assert files_of(home, "alone") == files_of(home, "frozen-small")


def files_of(home: Path, name: str) -> list[str]:
    """Return what is in the directory of a run, without what Ray Train itself notes there."""
    run = home / "runs" / name
    files = [file for file in run.rglob("*") if "snapshot" not in file.name and not file.name.startswith(".")]
    return sorted(str(file.relative_to(run)) for file in files)


def send(number: signal.Signals, processes: list[psutil.Process]) -> None:
    """Send a signal to every process that has not ended meanwhile, as an idle worker of Ray may have."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def assert_ray_is_private(job: int, processes: list[psutil.Process]) -> None:
    """Assert that the Ray of a job, with its workers, is closed to other users and machines.

    Its processes have a group of their own, so that a signal to the job's whole group leaves Ray alone while the job saves,
    and the job's priority.
    """
    listeners, sessions = [], set[str]()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            name, command = process.name(), " ".join(process.cmdline())
            sessions |= set(re.findall(r"--session[-_]dir[= ](\S+)", command))
            if command.startswith("ray::") or name in ("gcs_server", "raylet"):
                assert os.getpgid(process.pid) != os.getpgid(job), command
                assert process.nice() == os.nice(0), command
            found = process.net_connections("inet")
            listeners += [(name, place.laddr.ip) for place in found if place.status == psutil.CONN_LISTEN]
    assert {"gcs_server", "raylet"} <= {name for name, _ in listeners}
    assert any(name.startswith("ray::RayTrainWo") for name, _ in listeners)  # where the workers meet
    open_to_others = [one for one in listeners if not ip_address(one[1].removeprefix("::ffff:")).is_loopback]
    assert open_to_others == []
    (session,) = sessions
    private, token = Path(session).parents[1], Path.home() / ".ray" / "auth_token"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (private, token)] == [0o700, 0o600]


def test_a_job_and_a_worker_that_are_killed_cost_the_steps_since_the_checkpoint(
    ray_head: dict[str, str], corpus: Path, reference: dict[str, Any], tmp_path: Path
) -> None:
    """The job has a private Ray of its own; it goes on through `ray job submit`, where one of its workers is killed, too."""
    words, run = tiny_options(corpus, tmp_path / "runs", "killed"), tmp_path / "runs" / "killed"
    environment = {name: value for name, value in ray_head.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, "-m", "jobs.train_lm", *words]
    processes: list[psutil.Process] = []
    with (tmp_path / "first.log").open("w") as log:
        job = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            wait_for(lambda: last_checkpoint(run) > 0 or job.poll() is not None)
            assert job.poll() is None, (tmp_path / "first.log").read_text()
            process = psutil.Process(job.pid)
            processes = [process, *process.children(recursive=True)]
            # On a busy machine the rest of this short run would end before all sockets have been read.
            send(signal.SIGSTOP, processes)
            assert_ray_is_private(job.pid, processes)
        finally:
            send(signal.SIGKILL, processes)
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    assert not (run / "outcome.json").exists()

    before, killed, head = last_checkpoint(run), list[int](), ray_head["HEAD_PID"]

    def kill_the_youngest_worker() -> None:
        wait_for(lambda: last_checkpoint(run) > before and bool(training_worker_pids(head)))
        killed.append(training_worker_pids(head)[-1])
        os.kill(killed[0], signal.SIGKILL)

    (line,) = lines_like("ray job submit *")
    line = line.replace("ray job submit", f"ray job submit --address {ray_head['DASHBOARD']}")
    submit = f"{line.partition(' -m jobs.train_lm ')[0]} -m jobs.train_lm {shlex.join(words)}"
    with at_the_same_time(kill_the_youngest_worker):
        done = subprocess.run(
            submit, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.findall(r"continuing after step (\d+)\n", done.stdout)[0]) >= before
    assert f"its process {killed[0]} on " in done.stdout
    outcome = json.loads((run / "outcome.json").read_text())
    assert before < outcome["resumed_from_step"] < 40
    # A checkpoint whose last part arrived when the loss was already told is the newer one.
    (step,) = re.findall(r"; restart 1 of 1, from step (\d+)\n", done.stdout)
    assert before <= int(step) <= outcome["resumed_from_step"]
    assert outcome["world_size"] == 2
    assert_same_losses(outcome, reference)
    runs = MlflowClient(outcome["tracking_uri"]).search_runs(["1"])
    assert [found.info.run_name for found in runs] == ["killed"]
    assert re.fullmatch(r"[0-9a-f]{8}, raysubmit_\w+", runs[0].data.tags["ray_job_id"])
    assert sorted(models_of(outcome)) == ["checkpoint-35", "checkpoint-40", "tempnet"]
    # Without the token not even the list of jobs can be read.
    refused = subprocess.run(
        [str(BIN / "ray"), "job", "list", "--address", ray_head["DASHBOARD"]],
        env=os.environ | {"RAY_AUTH_MODE": "disabled"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert refused.returncode != 0
