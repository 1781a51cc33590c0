"""Submit a job to a Ray cluster, or write the manifest of a RayJob for Kubernetes.

For example:

    python -m jobs.submit ray --address http://head:8265 -- train_lm gpt2-scratch --data.train s3://bucket/train \
        --data.validation s3://bucket/test --run.storage s3://bucket/runs
    python -m jobs.submit rayjob --name mine -- train_lm gpt2-scratch --data.train s3://bucket/train --data.validation s3://bucket/test
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
import yaml

from jobs.engine.command_line import ending_in_one_line, fail, refusals_on_one_line, run_job
from jobs.submission.config import (
    Entrypoint,
    RaySubmission,
    check_variables,
    parse_entrypoint,
    sent_revision,
    variables_of_job,
)

MANIFESTS = Path(__file__).parents[1] / "infra" / "kubernetes" / "base"
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?")  # of a Kubernetes object to whose name KubeRay adds a suffix


@dataclass(frozen=True, slots=True, kw_only=True)
class RayJobSubmission:
    """Print the manifest of a RayJob, which runs a job on a Kubernetes cluster of its own: pipe it to `kubectl apply`."""

    name: str = ""
    """Name of the RayJob. If empty: the name of the run."""
    cluster: str = ""
    """YAML file with the RayCluster after which the job's own cluster is made. There may be other objects in it, as in
    what `kubectl kustomize` prints of an overlay. If empty: infra/kubernetes/base/ray-cluster.yaml."""
    variables: tuple[str, ...] = ()
    """Names of environment variables of this process to set for the job as well. Not for secrets."""
    output: str = ""
    """File to write. If empty: standard output."""

    def __post_init__(self) -> None:
        check_variables(self.variables)


def parse(arguments: Sequence[str]) -> tuple[RaySubmission | RayJobSubmission, Entrypoint]:
    """Parse the arguments into what to do and the job, which follows `--`; exits with a message if one is refused."""
    own, words = list(arguments), []
    if "--" in own:
        at = own.index("--")
        own, words = own[:at], own[at + 1 :]
    with refusals_on_one_line():
        request = tyro.extras.subcommand_cli_from_dict(
            {"ray": RaySubmission, "rayjob": RayJobSubmission},
            args=own,
            prog="python -m jobs.submit",
            description=__doc__,
        )
    try:
        return request, parse_entrypoint(words)
    except ValueError as error:
        fail(str(error))


def ray_job(request: RayJobSubmission, entrypoint: Entrypoint) -> dict[str, Any]:
    """Return the base's ray-job.yaml with the name, command, variables, revision and cluster of a job."""
    name = request.name or entrypoint.name
    if not _NAME.fullmatch(name):
        raise ValueError(f"name = {name!r} must consist of at most 42 small letters, digits and dashes, as mine-2 does")
    file = Path(request.cluster or MANIFESTS / "ray-cluster.yaml")
    try:
        objects = list(yaml.safe_load_all(file.read_text()))
    except yaml.YAMLError as error:
        raise ValueError(f"cluster = {str(file)!r} is no YAML: {error}") from error
    clusters = [item for item in objects if isinstance(item, dict) and item.get("kind") == "RayCluster"]
    if len(clusters) != 1:
        raise ValueError(f"cluster = {str(file)!r} must hold one object of kind RayCluster, not {len(clusters)}")
    manifest: dict[str, Any] = yaml.safe_load((MANIFESTS / "ray-job.yaml").read_text())
    manifest["metadata"] |= {"name": name, "namespace": clusters[0]["metadata"].get("namespace", "default")}
    manifest["spec"] |= {
        "entrypoint": entrypoint.command,
        "runtimeEnvYAML": yaml.safe_dump({"env_vars": variables_of_job(request.variables)}),
        "metadata": {"revision": sent_revision() or "unknown", "name": name},
        "rayClusterSpec": clusters[0]["spec"],
    }
    return manifest


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status, which is that of the job if one was followed."""
    request, entrypoint = parse(arguments)
    with ending_in_one_line():
        if isinstance(request, RaySubmission):
            from jobs.submission.ray_jobs import Submitter

            return Submitter(request, entrypoint).run()
        # What occurs several times is written in full, and a date as the text that Kubernetes wants.
        manifest = json.loads(json.dumps(ray_job(request, entrypoint), default=str))
        text = yaml.safe_dump(manifest, sort_keys=False, width=120)
        if request.output:
            Path(request.output).parent.mkdir(parents=True, exist_ok=True)
            Path(request.output).write_text(text)
        else:
            print(text, end="")
    return 0


if __name__ == "__main__":
    run_job(main)
