"""All files that are rendered for a cluster, and where they are written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from jobs.submission.entrypoint import Entrypoint
from jobs.submission.render.image import dockerfile, ignored_files
from jobs.submission.render.mlflow_server import mlflow_server
from jobs.submission.render.pods import Manifest
from jobs.submission.render.ray_cluster import ray_cluster
from jobs.submission.render.ray_job import ray_job
from jobs.submission.render.ray_up import ray_up
from jobs.submission.render.services import network_policies, redis, shared_volume
from jobs.submission.values import ClusterValues

_HEADER = "# Rendered by `python -m jobs.submit render`: change the values there, not this file.\n"
EXAMPLE = Entrypoint("jobs.train_lm", ("gpt2-scratch", "--data.train", "s3://tempnet/openwebtext2/train", "--data.validation",
                                       "s3://tempnet/openwebtext2/validation"))  # fmt: skip
"""The job of the RayJob that is rendered as an example."""


def render_files(values: ClusterValues) -> dict[str, str]:
    """Return the text of every file by its path below the output directory."""
    example = ray_job(values, EXAMPLE, name=f"{values.name}-example", revision="", variables={})
    return {
        "image/Dockerfile": _HEADER + dockerfile(values),
        "image/Dockerfile.dockerignore": ignored_files(),
        "kubernetes/ray-cluster.yaml": as_yaml([ray_cluster(values)]),
        "kubernetes/ray-job.yaml": as_yaml([example]),
        "kubernetes/services.yaml": as_yaml([*redis(values), *shared_volume(values), *network_policies(values)]),
        "kubernetes/mlflow.yaml": as_yaml(mlflow_server(values)),
        "ray/cluster.yaml": as_yaml([ray_up(values)]),
    }


def as_yaml(manifests: Sequence[Manifest]) -> str:
    """Return manifests as the text of one YAML file."""
    texts = [yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, width=120) for manifest in manifests]
    return _HEADER + "---\n".join(texts)


def write_files(files: dict[str, str], directory: str) -> list[str]:
    """Write files below a directory and return their paths.

    Raises:
        OSError: if a file cannot be written.
    """
    paths = []
    for name, text in files.items():
        path = Path(directory) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        paths.append(str(path))
    return paths


class _Dumper(yaml.SafeDumper):
    """Writes a value in full wherever it occurs, without anchors, which KubeRay's users would have to follow."""

    def ignore_aliases(self, data: object) -> bool:
        return True
