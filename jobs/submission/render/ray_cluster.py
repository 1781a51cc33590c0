"""KubeRay's RayCluster: a head that computes nothing, readers without GPUs, and trainers with GPUs, also on spot nodes."""

from __future__ import annotations

from typing import Any

from jobs.engine.locked import LOCKED_VARIABLE
from jobs.submission.render.pods import (
    Manifest,
    container_security,
    labels,
    login_variables,
    metadata,
    pod_security,
    resources,
    shared_claim,
    storage_variables,
)
from jobs.submission.values import ClusterValues, GroupValues

RAY = "ray"
"""The component of Ray's pods."""
_SHARE_OF_OBJECT_STORE = 0.3


def ray_cluster(values: ClusterValues) -> Manifest:
    """Return a RayCluster that stays until it is deleted, for interactive work and `jobs.submit ray`."""
    about = metadata(values, values.name, RAY)
    return {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": about, "spec": cluster_spec(values)}


def cluster_spec(values: ClusterValues) -> Manifest:
    """Return the specification of a cluster, which RayCluster and RayJob share."""
    spec: Manifest = {
        "rayVersion": values.ray_version,
        "authOptions": {"mode": "token"},
        "enableInTreeAutoscaling": True,
        "autoscalerOptions": {
            "version": "v2",
            "upscalingMode": "Default",
            "idleTimeoutSeconds": 300,
            "resources": resources(cpus="500m", memory_gib=1),
            "securityContext": container_security(),
        },
    }
    if values.redis_image:
        # With its state in Redis, a head that is lost is replaced, and the workers go on.
        spec["gcsFaultToleranceOptions"] = {
            "redisAddress": f"{values.name}-redis:6379",
            "redisPassword": {
                "valueFrom": {"secretKeyRef": {"name": values.secret_name, "key": "redis-password"}},
            },
        }
    spec["headGroupSpec"] = {
        # Without CPUs of its own the head runs no tasks that could take memory from its control processes.
        "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
        "template": _pod(values, "ray-head", values.head, image="cpu"),
    }
    spec["workerGroupSpecs"] = [
        _group(values, "readers", values.readers, image="cpu"),
        _group(values, "trainers", values.trainers, image="cuda"),
    ]
    if values.spot.max_nodes:
        spec["workerGroupSpecs"].append(_spot_group(values))
    return spec


def _group(values: ClusterValues, name: str, group: GroupValues, *, image: str) -> Manifest:
    return {
        "groupName": name,
        "replicas": group.min_nodes,
        "minReplicas": group.min_nodes,
        "maxReplicas": group.max_nodes,
        "rayStartParams": {},
        "labels": {"tempnet.group": name},
        "template": _pod(values, "ray-worker", group, image=image),
    }


def _spot_group(values: ClusterValues) -> Manifest:
    group = _group(values, "trainers-spot", values.trainers, image="cuda")
    group |= {"replicas": 0, "minReplicas": 0, "maxReplicas": values.spot.max_nodes}
    pod = group["template"]["spec"]
    pod["nodeSelector"] = {values.spot.label: values.spot.value}
    pod["tolerations"] = [*pod.get("tolerations", []), _toleration(values.spot.label, values.spot.value)]
    return group


def _toleration(key: str, value: str) -> Manifest:
    return {"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"}


def _pod(values: ClusterValues, name: str, group: GroupValues, *, image: str) -> Manifest:
    """Return the template of a pod of Ray."""
    container: dict[str, Any] = {
        "name": name,
        "image": values.image.reference(image),
        "env": _variables(values),
        "resources": resources(cpus=group.cpus, memory_gib=group.memory_gib, gpus=group.gpus),
        "securityContext": container_security(),
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "scratch", "mountPath": "/tmp"}],
    }
    if name == "ray-head":
        ports = {"gcs-server": 6379, "dashboard": 8265, "client": 10001}
        container["ports"] = [{"name": port, "containerPort": number} for port, number in ports.items()]
    shm = f"{int(group.memory_gib * _SHARE_OF_OBJECT_STORE) or 1}Gi"
    volumes: list[Manifest] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": shm}},
        {"name": "scratch", "emptyDir": {}},
    ]
    if values.storage.volume_gib:
        container["volumeMounts"].append({"name": "shared", "mountPath": values.storage.mount})
        volumes.append({"name": "shared", "persistentVolumeClaim": {"claimName": shared_claim(values)}})
    spec: Manifest = {
        "containers": [container],
        "volumes": volumes,
        "securityContext": pod_security(),
        "terminationGracePeriodSeconds": values.job.grace_seconds,
    }
    if name == "ray-worker":
        spec["automountServiceAccountToken"] = False  # only the head's autoscaler talks to Kubernetes
    if group.gpus:
        spec["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    return {"metadata": {"labels": labels(values, RAY)}, "spec": spec}


def _variables(values: ClusterValues) -> list[Manifest]:
    """Return the environment variables of every container of Ray."""
    fixed = {
        "TEMPNET_HOME": values.storage.uri,
        "MLFLOW_TRACKING_URI": f"http://{values.name}-mlflow:5000",
        LOCKED_VARIABLE: "1",
        # By default Ray runs workers at niceness 15, so that other processes of the node slow the training down.
        "RAY_worker_niceness": "0",
    }
    variables: list[Manifest] = [{"name": name, "value": value} for name, value in fixed.items()]
    return variables + login_variables(values) + storage_variables(values)
