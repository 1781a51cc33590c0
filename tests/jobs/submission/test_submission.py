"""Test what is decided about a submission before anything is sent: its command, its name, its environment."""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
from ray.dashboard.modules.job.pydantic_models import JobDetails
from ray.runtime_env import RuntimeEnv

from jobs import submit
from jobs.engine.revision import LOCK, check_locked, checkout_revision
from jobs.submission import ray_jobs
from jobs.submission.config import RaySubmission, parse_entrypoint
from jobs.tasks.presets import clip, language_models


@pytest.mark.parametrize(
    ("words", "module", "name"),
    [
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


def test_a_preset_has_the_name_of_its_run_and_others_one_of_their_own() -> None:
    for job, presets in (("train_lm", language_models.PRESETS), ("train_clip", clip.PRESETS)):
        for preset, make in presets.items():
            assert parse_entrypoint([job, preset]).name == make().run.name  # type: ignore[attr-defined]
    # Without a run, the arguments decide.
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
        (["train_lm", "x", "--tracking.uri", "http://me:word@host"], r"^http://\*\*\*@host holds a login or secret"),
    ],
)
def test_an_unknown_job_or_one_with_a_secret_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_entrypoint(words)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"address": "head:8265"}, r"address = 'head:8265' must begin with http://"),
        ({"address": "http://me:hunter2@head:8265"}, r"address = 'http://\*\*\*@head:8265' must not hold a login"),
        ({"max_wait_minutes": 0.0}, r"submit\.max_wait_minutes = 0\.0 must be positive"),
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
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://two:2")
    monkeypatch.setenv("RAY_ADDRESS", "http://three:3")
    assert RaySubmission(address="http://one:1").resolved_address == "http://one:1"
    assert RaySubmission().resolved_address == "http://two:2"
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS")
    assert RaySubmission().resolved_address == "http://three:3"
    monkeypatch.delenv("RAY_ADDRESS")
    with pytest.raises(ValueError, match="names no cluster"):
        _ = RaySubmission().resolved_address


def test_a_job_gets_its_revision_and_checks_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODE", "1")
    monkeypatch.setenv("TEMPNET_REVISION", "told")
    runtime = RaySubmission(variables=("MODE",), stop_seconds=7).runtime_environment()
    expected = {"MODE": "1", "TEMPNET_LOCKED": "1", "RAY_JOB_STOP_WAIT_TIME_S": "7"}
    assert runtime["env_vars"] == expected | {"TEMPNET_REVISION": checkout_revision() or "told"}
    assert runtime["working_dir"] == str(Path.cwd())
    assert "TEMPNET_LOCKED" not in RaySubmission(environment="unchecked").runtime_environment()["env_vars"]
    installing = RuntimeEnv(**RaySubmission(environment="pip").runtime_environment())
    pinned = [line for line in LOCK.read_text().splitlines() if not line.startswith("#")]
    assert sorted(installing["pip"]["packages"]) == sorted(pinned)


def test_other_packages_than_those_of_the_lock_are_named(tmp_path: Path) -> None:
    check_locked()  # The tests run in the environment of the lock.
    lock = tmp_path / "requirements.lock"
    lock.write_text(f"# a comment\nnumpy==0.1\nRay=={version('ray')}\ntorch=={version('torch').partition('+')[0]}\n")
    with pytest.raises(ValueError, match=rf"numpy {version('numpy')} instead of 0\.1\. Install them"):
        check_locked(lock)
    with pytest.raises(ValueError, match="is missing: the packages cannot be checked"):
        check_locked(tmp_path / "nothing")


@pytest.mark.parametrize("error", [aiohttp.ServerDisconnectedError(), aiohttp.ClientPayloadError(), OSError()])
def test_a_job_is_followed_on_after_its_log_has_broken_off(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265")
    submitter = ray_jobs.Submitter(RaySubmission(name="mine"), parse_entrypoint(["train_lm", "gpt2-scratch"]))
    statuses = iter(["RUNNING", "SUCCEEDED"])

    async def tail(submission_id: str) -> AsyncIterator[str]:
        yield "begins\n"
        raise error

    client = SimpleNamespace(
        get_job_info=lambda submission_id: JobDetails(
            type="SUBMISSION", entrypoint="python", status=next(statuses), driver_exit_code=0
        ),
        get_job_logs=lambda submission_id: "begins\n",
        tail_job_logs=tail,
    )
    monkeypatch.setattr(submitter, "_connect", lambda wait: client)
    assert submitter._follow() == 0
    # The log of a job that takes its place after a loss is printed from its first line.
    client.list_jobs = lambda: [
        JobDetails(type="SUBMISSION", entrypoint="python -m jobs.train_lm gpt2-scratch", submission_id="mine-2",
                   status="RUNNING", metadata={"name": "mine"})
    ]  # fmt: skip
    submitter._submit(client)
    assert submitter._num_printed == 0


def test_a_cluster_that_is_not_there_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_jobs, "_SECONDS_TO_ANSWER", 0.1)
    monkeypatch.setattr(ray_jobs, "_SECONDS_BETWEEN_TRIES", 0.1)
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "")  # The submission sets it, and the end of the test restores it.
    with pytest.raises(SystemExit) as ended:
        submit.main(["ray", "--address", "http://127.0.0.1:1", "--", "train_lm", "gpt2-scratch"])
    assert ended.value.code == 1
    assert "no Ray job server answers at http://127.0.0.1:1" in capsys.readouterr().err


ENDED, LOST = "JOB_ENTRYPOINT_COMMAND_ERROR", None


@pytest.mark.parametrize(
    ("status", "exit_code", "error_type", "expected"),
    [
        ("SUCCEEDED", 0, None, 0),
        ("STOPPED", None, None, 130),
        ("FAILED", 2, ENDED, 2),
        ("FAILED", -15, ENDED, 143),
        ("FAILED", None, "RUNTIME_ENV_SETUP_FAILURE", 1),
        # A further submission may cure these:
        ("FAILED", -9, ENDED, LOST),
        ("FAILED", None, "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE", LOST),
    ],
)
def test_the_status_is_that_of_the_job_unless_the_cluster_lost_it(
    status: str, exit_code: int | None, error_type: str | None, expected: int | None
) -> None:
    details = JobDetails(
        type="SUBMISSION", entrypoint="python", message="it ended",
        status=status, driver_exit_code=exit_code, error_type=error_type,
    )  # fmt: skip
    with pytest.raises(ray_jobs.JobLostError) if expected is LOST else nullcontext():
        assert ray_jobs.status_of(details) == expected
