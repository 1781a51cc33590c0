"""Test what is decided about a submission before anything is sent: its command, its name, its environment."""

from __future__ import annotations

import shlex
from importlib.metadata import version
from pathlib import Path

import pytest
from ray.dashboard.modules.job.pydantic_models import JobDetails
from ray.runtime_env import RuntimeEnv

from jobs import submit
from jobs.engine.locked import LOCK, check_locked
from jobs.engine.revision import checkout_revision
from jobs.submission import ray_jobs
from jobs.submission.config import RaySubmission
from jobs.submission.entrypoint import parse_entrypoint
from jobs.submission.environment import runtime_environment
from jobs.tasks.presets import clip, language_models


@pytest.mark.parametrize(
    ("words", "module", "name"),
    [
        (["train_lm", "gpt2-scratch"], "jobs.train_lm", "gpt2-scratch"),
        (["jobs.train_lm", "gpt2-scratch", "--run.name", "mine"], "jobs.train_lm", "mine"),
        (["train_clip", "clip-cc3m", "--run.seed=1", "--run.name=a b/c"], "jobs.train_clip", "a-b-c"),
        (["sweep", "gpt2-rho-lr", "--base.run.name", "rho"], "jobs.sweep", "rho"),
        (["line_classifier.train", "--run.name", "lines"], "line_classifier.train", "lines"),
    ],
)
def test_a_job_is_named_after_its_run(words: list[str], module: str, name: str) -> None:
    entrypoint = parse_entrypoint(words)
    assert (entrypoint.module, entrypoint.name) == (module, name)
    assert shlex.split(entrypoint.command) == ["python", "-m", module, *words[1:]]


def test_a_preset_has_the_name_of_its_run() -> None:
    for job, presets in (("train_lm", language_models.PRESETS), ("train_clip", clip.PRESETS)):
        for preset, make in presets.items():
            assert parse_entrypoint([job, preset]).name == make().run.name  # type: ignore[attr-defined]


def test_a_job_without_a_run_is_named_by_its_arguments() -> None:
    one, same, other = (parse_entrypoint(["evaluate_lm", "--models", model]).name for model in "aab")
    assert one == same != other
    assert one.startswith("evaluate-lm-")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no job is named"),
        (["trian_lm"], "did you mean train_lm"),
        (["submit", "ray"], "job 'submit' is unknown"),
        (["xyzzy"], "there are: analyse, calibrate,"),
    ],
)
def test_an_unknown_job_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_entrypoint(words)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"address": "head:8265"}, r"address = 'head:8265' must begin with http://"),
        ({"address": "http://me:hunter2@head:8265"}, r"address = 'http://\*\*\*@head:8265' must not hold a login"),
        ({"max_wait_minutes": 0.0}, r"submit\.max_wait_minutes = 0\.0 must be positive"),
        ({"working_dir": "/nowhere"}, r"working_dir = '/nowhere' is no directory"),
        ({"variables": ("NOT_THERE",)}, r"variables = 'NOT_THERE' is not set here"),
        ({"variables": ("MY_TOKEN",)}, r"variables = 'MY_TOKEN' holds a secret"),
        ({"variables": ("TRACKING",)}, r"variables = 'TRACKING' holds a secret"),
    ],
)
def test_a_wrong_request_is_refused(fields: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "hunter2")
    monkeypatch.setenv("TRACKING", "http://me:hunter2@mlflow:5000")
    with pytest.raises(ValueError, match=message) as refused:
        RaySubmission(**fields)  # type: ignore[arg-type]
    assert "hunter2" not in str(refused.value)


def test_the_address_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="names no cluster"):
        _ = RaySubmission().resolved_address
    monkeypatch.setenv("RAY_ADDRESS", "http://one:1")
    assert RaySubmission().resolved_address == "http://one:1"
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://two:2")
    assert RaySubmission().resolved_address == "http://two:2"
    assert RaySubmission(address="http://three:3").resolved_address == "http://three:3"


def test_a_job_gets_its_revision_and_checks_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODE", "1")
    monkeypatch.setenv("TEMPNET_REVISION", "told")
    runtime = runtime_environment(RaySubmission(variables=("MODE",), stop_seconds=7))
    assert runtime["env_vars"] == {
        "MODE": "1",
        "TEMPNET_REVISION": checkout_revision() or "told",
        "TEMPNET_LOCKED": "1",
        "RAY_JOB_STOP_WAIT_TIME_S": "7",
    }
    assert runtime["working_dir"] == str(Path.cwd())
    assert "TEMPNET_LOCKED" not in runtime_environment(RaySubmission(environment="unchecked"))["env_vars"]


def test_ray_installs_exactly_the_lock() -> None:
    runtime = RuntimeEnv(**runtime_environment(RaySubmission(environment="pip")))
    pinned = [line for line in LOCK.read_text().splitlines() if not line.startswith("#")]
    assert sorted(runtime["pip"]["packages"]) == sorted(pinned)


def test_other_packages_than_those_of_the_lock_are_named(tmp_path: Path) -> None:
    check_locked()  # The tests run in the environment of the lock.
    lock = tmp_path / "requirements.lock"
    lock.write_text(f"# a comment\nnumpy==0.1\nRay=={version('ray')}\ntorch=={version('torch').partition('+')[0]}\n")
    with pytest.raises(ValueError, match=rf"numpy {version('numpy')} instead of 0\.1\. Install them"):
        check_locked(lock)
    with pytest.raises(ValueError, match="is missing: the packages cannot be checked"):
        check_locked(tmp_path / "nothing")


def test_a_ray_job_is_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--", "train_lm", "gpt2-scratch", "--run.name", "mine"]
    assert submit.main(["rayjob", *words]) == 0
    printed = capsys.readouterr().out
    assert "kind: RayJob\n" in printed
    assert "name: mine\n" in printed
    assert submit.main(["rayjob", "--output", "out/job.yaml", *words]) == 0
    assert Path("out/job.yaml").read_text() == printed


def test_a_cluster_that_is_not_there_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_jobs, "_SECONDS_TO_ANSWER", 0.1)
    monkeypatch.setenv(
        "RAY_API_SERVER_ADDRESS", ""
    )  # It is set by the submission, and restored at the end of the test.
    with pytest.raises(SystemExit) as ended:
        submit.main(["ray", "--address", "http://127.0.0.1:1", "--", "train_lm", "gpt2-scratch"])
    assert ended.value.code == 1
    assert "no Ray job server answers at http://127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"status": "SUCCEEDED", "driver_exit_code": 0}, 0),
        ({"status": "STOPPED"}, 130),
        ({"status": "FAILED", "driver_exit_code": 1, "error_type": "JOB_ENTRYPOINT_COMMAND_ERROR"}, 1),
        ({"status": "FAILED", "driver_exit_code": 2, "error_type": "JOB_ENTRYPOINT_COMMAND_ERROR"}, 2),
        ({"status": "FAILED", "driver_exit_code": -15, "error_type": "JOB_ENTRYPOINT_COMMAND_ERROR"}, 143),
        ({"status": "FAILED", "error_type": "RUNTIME_ENV_SETUP_FAILURE"}, 1),
        # What a further submission may cure:
        ({"status": "FAILED", "driver_exit_code": -9, "error_type": "JOB_ENTRYPOINT_COMMAND_ERROR"}, None),
        ({"status": "FAILED", "driver_exit_code": 137, "error_type": "JOB_ENTRYPOINT_COMMAND_ERROR"}, None),
        ({"status": "FAILED", "error_type": "JOB_SUPERVISOR_ACTOR_DIED"}, None),
        ({"status": "FAILED", "error_type": "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE"}, None),
    ],
)
def test_the_status_is_that_of_the_job_unless_the_cluster_lost_it(
    fields: dict[str, object], expected: int | None
) -> None:
    details = JobDetails(type="SUBMISSION", entrypoint="python", message="it ended", **fields)
    if expected is None:
        with pytest.raises(ray_jobs.JobLostError):
            ray_jobs.status_of(details)
    else:
        assert ray_jobs.status_of(details) == expected
