"""Submit a job to a Ray cluster or as a RayJob of Kubernetes, and render the files of a cluster.

For example:

    python -m jobs.submit ray --address http://head:8265 -- train_lm gpt2-scratch --run.storage s3://bucket/runs
    python -m jobs.submit rayjob --name mine -- train_lm gpt2-scratch --data.train s3://bucket/train --data.validation s3://bucket/test
    python -m jobs.submit render --output infra
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from jobs.engine.command_line import FAILED, fail, refusals_on_one_line, run_job
from jobs.submission.config import RaySubmission, check_variables
from jobs.submission.entrypoint import Entrypoint, parse_entrypoint


@dataclass(frozen=True, slots=True, kw_only=True)
class RayJobSubmission:
    """Print the manifest of a RayJob, which runs a job on a Kubernetes cluster of its own: pipe it to `kubectl apply`."""

    name: str = ""
    """Name of the RayJob. If empty: the name of the run."""
    values: str = ""
    """YAML file with the values of the cluster. If empty: the defaults, which `render` shows."""
    variables: tuple[str, ...] = ()
    """Names of environment variables of this process to set for the job as well. Not for secrets."""
    output: str = ""
    """File to write. If empty: standard output."""

    def __post_init__(self) -> None:
        check_variables(self.variables)


@dataclass(frozen=True, slots=True, kw_only=True)
class Render:
    """Render the Dockerfile, the manifests of Ray and MLflow, and the configuration of `ray up` from one set of values."""

    values: str = ""
    """YAML file with the values of the cluster. If empty: the defaults."""
    output: str = "infra"
    """Directory to write to."""


def parse(arguments: Sequence[str]) -> tuple[RaySubmission | RayJobSubmission | Render, Entrypoint | None]:
    """Parse the arguments into what to do and the job, which follows `--`; None for `render`.

    Exits the process with a message on an unknown option or job, or a value that is refused.
    """
    own, words = list(arguments), []
    if "--" in own:
        at = own.index("--")
        own, words = own[:at], own[at + 1 :]
    with refusals_on_one_line():
        request = tyro.extras.subcommand_cli_from_dict(
            {"ray": RaySubmission, "rayjob": RayJobSubmission, "render": Render},
            args=own,
            prog="python -m jobs.submit",
            description=__doc__,
        )
    try:
        if isinstance(request, Render):
            if words:
                raise ValueError(f"render takes no job, but {words[0]!r} follows --")
            return request, None
        return request, parse_entrypoint(words)
    except ValueError as error:
        fail(str(error))


def submit_to_ray(request: RaySubmission, entrypoint: Entrypoint) -> int:
    """Submit a job to a Ray cluster and return its exit status."""
    from jobs.submission.ray_jobs import SubmissionError, Submitter

    # Let `kill` (SIGTERM) stop the job as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return Submitter(request, entrypoint).run()
    except SubmissionError as error:
        fail(str(error), FAILED)


def write_ray_job(request: RayJobSubmission, entrypoint: Entrypoint) -> None:
    """Write the manifest of a RayJob."""
    from jobs.submission.environment import sent_revision, sent_variables
    from jobs.submission.render.files import as_yaml, write_files
    from jobs.submission.render.ray_job import ray_job
    from jobs.submission.values_file import read_values

    manifest = ray_job(
        read_values(request.values),
        entrypoint,
        name=request.name or entrypoint.name,
        revision=sent_revision(),
        variables=sent_variables(request.variables, is_checked=True),
    )
    if request.output:
        write_files({request.output: as_yaml([manifest])}, ".")
    else:
        print(as_yaml([manifest]), end="")


def render(request: Render) -> None:
    """Write the files of a cluster and print their names."""
    from jobs.submission.render.files import render_files, write_files
    from jobs.submission.values_file import read_values

    print("\n".join(write_files(render_files(read_values(request.values)), request.output)))


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status, which is that of the job if one was followed."""
    request, entrypoint = parse(arguments)
    try:
        if isinstance(request, Render):
            render(request)
        elif isinstance(request, RayJobSubmission):
            assert entrypoint is not None
            write_ray_job(request, entrypoint)
        else:
            assert entrypoint is not None
            return submit_to_ray(request, entrypoint)
    except (ValueError, OSError) as error:
        fail(str(error))
    return 0


if __name__ == "__main__":
    run_job(main)
