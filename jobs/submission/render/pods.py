"""Parts of Kubernetes manifests that several files share: metadata, containers that run without privileges, secrets."""

from __future__ import annotations

from typing import Any

from jobs.submission.values import ClusterValues

Manifest = dict[str, Any]

USER_ID = 1000
"""User that the images run as."""


def metadata(values: ClusterValues, name: str, component: str) -> Manifest:
    """Return the metadata of an object; `component` tells the network policies what it is."""
    return {"name": name, "namespace": values.namespace, "labels": labels(values, component)}


def labels(values: ClusterValues, component: str) -> dict[str, str]:
    """Return the labels by which objects of one component are found."""
    return {
        "app.kubernetes.io/part-of": "tempnet",
        "app.kubernetes.io/instance": values.name,
        "app.kubernetes.io/component": component,
    }


def pod_security(user: int = USER_ID) -> Manifest:
    """Return the security context of a pod, which the restricted pod security standard of Kubernetes accepts."""
    return {
        "runAsNonRoot": True,
        "runAsUser": user,
        "runAsGroup": user,
        "fsGroup": user,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> Manifest:
    """Return the security context of a container: no privileges, and none to be gained."""
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def secret_variable(values: ClusterValues, variable: str, key: str, *, optional: bool = False) -> Manifest:
    """Return an environment variable whose value is a key of the cluster's Secret."""
    reference: Manifest = {"name": values.secret_name, "key": key}
    if optional:
        reference["optional"] = True
    return {"name": variable, "valueFrom": {"secretKeyRef": reference}}


def storage_variables(values: ClusterValues) -> list[Manifest]:
    """Return the environment variables with which a process reaches the bucket.

    The keys are optional, because a node may have access by its own identity.
    """
    found = [{"name": "AWS_DEFAULT_REGION", "value": values.storage.region}]
    if values.storage.endpoint:
        found.append({"name": "AWS_ENDPOINT_URL", "value": values.storage.endpoint})
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        found.append(secret_variable(values, key, key, optional=True))
    return found


def login_variables(values: ClusterValues) -> list[Manifest]:
    """Return the environment variables with which a job logs in to the MLflow server."""
    return [secret_variable(values, key, key) for key in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")]


def resources(*, cpus: float | str, memory_gib: float, gpus: int = 0) -> Manifest:
    """Return requests and limits that are equal, so that Ray knows what a pod has and it is the last to be evicted."""
    amounts: dict[str, str] = {"cpu": str(cpus), "memory": f"{memory_gib:g}Gi"}
    if gpus:
        amounts["nvidia.com/gpu"] = str(gpus)
    return {"requests": dict(amounts), "limits": dict(amounts)}


def shared_claim(values: ClusterValues) -> str:
    """Return the name of the claim of the shared volume."""
    return f"{values.name}-shared"
