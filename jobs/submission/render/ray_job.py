"""KubeRay's RayJob: a cluster for one job, queued by Kueue, started again after a failure, cleared away in stages."""

from __future__ import annotations

from collections.abc import Mapping

import yaml

from jobs.submission.entrypoint import Entrypoint
from jobs.submission.render.pods import Manifest, metadata
from jobs.submission.render.ray_cluster import RAY, cluster_spec
from jobs.submission.values import ClusterValues, check_name

_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"


def ray_job(
    values: ClusterValues, entrypoint: Entrypoint, *, name: str, revision: str, variables: Mapping[str, str]
) -> Manifest:
    """Return a RayJob whose submitter runs beside the head, so that no one outside need reach the cluster.

    KubeRay starts a job that failed again on a new cluster, where it goes on from its last checkpoint.

    Args:
        values: the cluster.
        entrypoint: the job.
        name: name of the object.
        revision: revision of the code; recorded with the job.
        variables: environment variables of the job.

    Raises:
        ValueError: if the name cannot be that of a Kubernetes object.
    """
    check_name("name", name)
    about = metadata(values, name, RAY)
    if values.queue:
        about["labels"] = {**about["labels"], _QUEUE_LABEL: values.queue}
    job = values.job
    rules = [
        ("DeleteWorkers", "SUCCEEDED", 0),
        ("DeleteWorkers", "FAILED", 0),
        ("DeleteCluster", "SUCCEEDED", 60 * job.keep_cluster_minutes),
        ("DeleteCluster", "FAILED", 60 * job.keep_cluster_minutes),
        ("DeleteSelf", "SUCCEEDED", 86_400 * job.keep_record_days),
        ("DeleteSelf", "FAILED", 86_400 * job.keep_record_days),
    ]
    spec: Manifest = {
        "entrypoint": entrypoint.command,
        "runtimeEnvYAML": yaml.safe_dump({"env_vars": dict(variables)}, sort_keys=True),
        "metadata": {"revision": revision or "unknown", "name": name},
        "submissionMode": "SidecarMode",
        "backoffLimit": job.backoff_limit,
        "activeDeadlineSeconds": 3600 * job.max_hours,
        "deletionStrategy": {
            "deletionRules": [
                {"policy": policy, "condition": {"jobStatus": status, "ttlSeconds": seconds}}
                for policy, status, seconds in rules
            ]
        },
        "rayClusterSpec": cluster_spec(values),
    }
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": about, "spec": spec}
