"""Submits a job to Ray's job server, follows it, stops it, and submits it again if the cluster has lost it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import sys
import time
from typing import Any

import aiohttp
import requests
from ray.dashboard.modules.job.pydantic_models import JobDetails
from ray.exceptions import AuthenticationError
from ray.job_submission import JobStatus, JobSubmissionClient

from jobs.engine import FailedError
from jobs.engine.command_line import FAILED, INTERRUPTED
from jobs.engine.masking import masked
from jobs.submission.config import Entrypoint, RaySubmission, sent_revision

_SECONDS_BETWEEN_TRIES = 2.0
_SECONDS_TO_ANSWER = 10.0  # for a cluster that was not reached before
_SIGKILL = 9
_UNREACHABLE = (OSError, RuntimeError, requests.RequestException, aiohttp.ClientError)
# Modules of Ray that log every file that is not uploaded and every connection that ends.
_TALKATIVE = ("ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk", "ray._private.runtime_env")


class JobLostError(Exception):
    """The cluster has lost the job: its driver's node died, or a new head knows nothing of it."""


class SubmissionError(FailedError):
    """The job cannot be submitted or followed; the message says what to do."""


class Submitter:
    """Submits one job and follows it to its end."""

    def __init__(self, request: RaySubmission, entrypoint: Entrypoint) -> None:
        self._request = request
        self._entrypoint = entrypoint
        self._address = request.resolved_address
        self._name = request.name or entrypoint.name
        self.submission_id = ""
        self._num_printed = 0
        for name in _TALKATIVE:
            logging.getLogger(name).setLevel(logging.ERROR)

    def run(self) -> int:
        """Submit the job, or find it running; follow it and return its status. On Ctrl-C it is stopped."""
        self._submit(self._connect(wait=False))
        if self._request.detach:
            return 0
        num_resubmissions = 0
        while True:
            try:
                return self._follow()
            except JobLostError as lost:
                if num_resubmissions == self._request.max_resubmissions:
                    raise SubmissionError(
                        f"the cluster lost the job {num_resubmissions + 1} times, at last: {lost}. The same command goes on "
                        "from the last checkpoint"
                    ) from lost
                num_resubmissions += 1
                _say(f"{lost}; submission {num_resubmissions} of {self._request.max_resubmissions} more")
                self._submit(self._connect(wait=True))
            except KeyboardInterrupt:
                self._stop()
                raise

    def _connect(self, *, wait: bool) -> JobSubmissionClient:
        """Return a client whose server answers; `wait` is whether to wait for it as long as the request allows."""
        # Ray prefers this variable to the argument of the client.
        os.environ["RAY_API_SERVER_ADDRESS"] = self._address
        seconds = 60 * self._request.max_wait_minutes if wait else _SECONDS_TO_ANSWER
        deadline = time.monotonic() + seconds
        is_told = False
        while True:
            try:
                return JobSubmissionClient(self._address)
            except AuthenticationError as error:
                raise SubmissionError(
                    f"the cluster at {self._address} refuses this token: set RAY_AUTH_MODE=token and its RAY_AUTH_TOKEN"
                ) from error
            except _UNREACHABLE as error:
                if time.monotonic() > deadline:
                    cause = error.__cause__ or error.__context__ or error  # Ray's own error names only the address
                    raise SubmissionError(
                        f"no Ray job server answers at {self._address} within {seconds:.0f} s "
                        f"({_first_line(cause)}): start the cluster, or correct --address"
                    ) from error
                if wait and not is_told:
                    _say(f"the cluster does not answer; waiting for it for {self._request.max_wait_minutes:g} minutes")
                    is_told = True
                time.sleep(_SECONDS_BETWEEN_TRIES)

    def _submit(self, client: JobSubmissionClient) -> None:
        """Submit the job under a free ID, or take over the job that runs already."""
        self._num_printed = 0
        known = {job.submission_id: job for job in client.list_jobs() if job.submission_id}
        for job in known.values():
            if not job.status.is_terminal() and (job.metadata or {}).get("name") == self._name:
                if job.entrypoint != self._entrypoint.command:
                    raise ValueError(
                        f"name = {self._name!r} is that of a running job, {job.entrypoint!r}: choose another --name, or "
                        f"stop it by: ray job stop {job.submission_id}"
                    )
                self.submission_id = str(job.submission_id)
                _say(f"job {self.submission_id} runs already; following it")
                return
        names = itertools.chain([self._name], (f"{self._name}-{number}" for number in itertools.count(2)))
        submission_id = next(name for name in names if name not in known)
        metadata = {"name": self._name, "revision": sent_revision() or "unknown"}
        try:
            self.submission_id = client.submit_job(
                entrypoint=self._entrypoint.command,
                submission_id=submission_id,
                runtime_env=self._request.runtime_environment(),
                metadata=metadata,
            )
        except (RuntimeError, requests.RequestException) as error:
            raise SubmissionError(f"the cluster did not take the job: {_first_line(error)}") from error
        _say(f"job {self.submission_id} is submitted, revision {metadata['revision']}")

    def _follow(self) -> int:
        """Print the job's log until it ends and return its status; JobLostError if the cluster has lost it."""
        while True:
            client = self._connect(wait=True)
            try:
                details = client.get_job_info(self.submission_id)
                if details.status.is_terminal():
                    with contextlib.suppress(*_UNREACHABLE):  # the node that had the log may be gone
                        text = client.get_job_logs(self.submission_id)
                        self._print(text, len(text))
                    return status_of(details)
                asyncio.run(self._print_log(client))
            except _UNREACHABLE as error:
                if "status code 404" in str(error):
                    raise JobLostError(f"the cluster does not know the job {self.submission_id}") from error
            time.sleep(_SECONDS_BETWEEN_TRIES / 10)

    async def _print_log(self, client: JobSubmissionClient) -> None:
        """Print the log as it grows, until the job ends or the connection breaks."""
        position = 0
        async for text in client.tail_job_logs(self.submission_id):
            position += len(text)
            self._print(text, position)

    def _print(self, text: str, end: int) -> None:
        """Print what is new of a part of the log that ends at the character `end`."""
        if end > self._num_printed:
            print(text[-(end - self._num_printed) :], end="", flush=True)
            self._num_printed = end

    def _stop(self) -> None:
        """Stop the job, and print its log until it has ended; a second Ctrl-C ends only the waiting."""
        _say(f"stopping {self.submission_id}, which may take {self._request.stop_seconds} s; Ctrl-C again not to wait")
        try:
            self._connect(wait=False).stop_job(self.submission_id)
            self._follow()
        except (JobLostError, *_UNREACHABLE) as error:
            _say(f"the job could not be stopped ({_first_line(error)}): ray job stop {self.submission_id}")


def status_of(details: JobDetails) -> int:
    """Return the exit status of a job that has ended; JobLostError if it did not end by itself."""
    if details.status == JobStatus.SUCCEEDED:
        return 0
    if details.status == JobStatus.STOPPED:
        return INTERRUPTED
    code = details.driver_exit_code
    if code is None:
        # Errors of the runtime environment and of the command would only come again with a further submission.
        if details.error_type is None or details.error_type.startswith("JOB_SUPERVISOR_ACTOR"):
            raise JobLostError(f"the cluster lost the job: {_first_line(details.message)}")
        _say(f"the job did not start: {_first_line(details.message)}")
        return FAILED
    if code in (-_SIGKILL, 128 + _SIGKILL):
        raise JobLostError("the job's process was killed, perhaps because its machine was short of memory")
    return code if code >= 0 else 128 - code


def _first_line(error: Any) -> str:
    lines = [line for line in masked(str(error)).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def _say(text: str) -> None:
    print(f"[submit] {text}", file=sys.stderr, flush=True)
