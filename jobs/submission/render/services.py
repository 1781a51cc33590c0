"""What a cluster needs beside Ray: Redis for the head's state, a shared volume, and policies for the network."""

from __future__ import annotations

from jobs.submission.render.pods import (
    Manifest,
    container_security,
    labels,
    metadata,
    pod_security,
    resources,
    secret_variable,
    shared_claim,
)
from jobs.submission.render.ray_cluster import RAY
from jobs.submission.values import ClusterValues

MLFLOW, POSTGRES, REDIS = "mlflow", "postgres", "redis"
ACCESS_LABEL = "tempnet/access"
"""Label of namespaces whose pods may reach Ray's job server and MLflow."""
_SYSTEM_USER = 999
"""User that the images of Redis and PostgreSQL run as."""


def service(values: ClusterValues, component: str, port: int) -> Manifest:
    """Return the address of a component inside the Kubernetes cluster."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(values, f"{values.name}-{component}", component),
        "spec": {
            "type": "ClusterIP",
            "selector": labels(values, component),
            "ports": [{"name": component, "port": port, "targetPort": port}],
        },
    }


def stateful_set(values: ClusterValues, component: str, container: Manifest, *, mount: str, gib: int) -> Manifest:
    """Return one replica of a database and its volume."""
    container = {
        **container,
        "securityContext": container_security(),
        "volumeMounts": [{"name": "data", "mountPath": mount}],
    }
    claim = {
        "metadata": {"name": "data"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": f"{gib}Gi"}}},
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata(values, f"{values.name}-{component}", component),
        "spec": {
            "serviceName": f"{values.name}-{component}",
            "replicas": 1,
            "selector": {"matchLabels": labels(values, component)},
            "template": {
                "metadata": {"labels": labels(values, component)},
                "spec": {
                    "containers": [container],
                    "securityContext": pod_security(_SYSTEM_USER),
                    "automountServiceAccountToken": False,
                },
            },
            "volumeClaimTemplates": [claim],
        },
    }


def redis(values: ClusterValues) -> list[Manifest]:
    """Return the Redis that keeps the state of Ray's head; nothing if the values name no image for it."""
    if not values.redis_image:
        return []
    # The password comes by standard input, because other processes can read arguments.
    script = 'printf "requirepass %s\\n" "$REDIS_PASSWORD" | exec redis-server - --appendonly yes --dir /data'
    container: Manifest = {
        "name": REDIS,
        "image": values.redis_image,
        "command": ["sh", "-c", script],
        "env": [secret_variable(values, "REDIS_PASSWORD", "redis-password")],
        "ports": [{"name": REDIS, "containerPort": 6379}],
        "resources": resources(cpus=1, memory_gib=2),
    }
    return [stateful_set(values, REDIS, container, mount="/data", gib=5), service(values, REDIS, 6379)]


def shared_volume(values: ClusterValues) -> list[Manifest]:
    """Return the claim of the shared volume; nothing if there is only a bucket."""
    if not values.storage.volume_gib:
        return []
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": metadata(values, shared_claim(values), "storage"),
            "spec": {
                "accessModes": ["ReadWriteMany"],
                "storageClassName": values.storage.storage_class,
                "resources": {"requests": {"storage": f"{values.storage.volume_gib}Gi"}},
            },
        }
    ]


def network_policies(values: ClusterValues) -> list[Manifest]:
    """Return who may connect to what: each component only to those that it serves, and all else is refused."""
    everyone = {"namespaceSelector": {"matchLabels": {ACCESS_LABEL: "true"}}}
    operator = {
        "namespaceSelector": {},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}},
    }
    ray, mlflow = _pods(values, RAY), _pods(values, MLFLOW)
    policies = [
        _policy(values, RAY, [_allow([ray]), _allow([operator, everyone], 8265)]),
        _policy(values, MLFLOW, [_allow([ray, everyone], 5000)]),
        _policy(values, POSTGRES, [_allow([mlflow], 5432)]),
    ]
    if values.redis_image:
        policies.append(_policy(values, REDIS, [_allow([ray, operator], 6379)]))
    return policies


def _pods(values: ClusterValues, component: str) -> Manifest:
    return {"podSelector": {"matchLabels": labels(values, component)}}


def _allow(peers: list[Manifest], port: int = 0) -> Manifest:
    ports = {"ports": [{"protocol": "TCP", "port": port}]} if port else {}
    return {"from": peers, **ports}


def _policy(values: ClusterValues, component: str, ingress: list[Manifest]) -> Manifest:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(values, f"{values.name}-{component}", component),
        "spec": {
            "podSelector": {"matchLabels": labels(values, component)},
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    }
