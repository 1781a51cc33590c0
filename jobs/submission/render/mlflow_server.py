"""The MLflow server of a cluster, with its runs in PostgreSQL and its artifacts in a bucket."""

from __future__ import annotations

from jobs.submission.render.pods import (
    Manifest,
    container_security,
    labels,
    metadata,
    pod_security,
    resources,
    secret_variable,
    storage_variables,
)
from jobs.submission.render.services import MLFLOW, POSTGRES, service, stateful_set
from jobs.submission.values import ClusterValues

_DATA = "/var/lib/postgresql/data"


def mlflow_server(values: ClusterValues) -> list[Manifest]:
    """Return the server, its database, and their addresses."""
    return [
        *_database(values),
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": metadata(values, f"{values.name}-{MLFLOW}", MLFLOW),
            "spec": {
                "replicas": 1,
                "selector": {"matchLabels": labels(values, MLFLOW)},
                "template": {
                    "metadata": {"labels": labels(values, MLFLOW)},
                    "spec": {
                        "containers": [_container(values)],
                        "volumes": [{"name": "scratch", "emptyDir": {}}],
                        "securityContext": pod_security(),
                        "automountServiceAccountToken": False,
                    },
                },
            },
        },
        service(values, MLFLOW, 5000),
    ]


def _container(values: ClusterValues) -> Manifest:
    name = f"{values.name}-{MLFLOW}"
    variables = {
        "MLFLOW_DATABASE": f"postgresql+psycopg://mlflow@{values.name}-{POSTGRES}:5432/mlflow",
        "MLFLOW_ARTIFACTS": values.mlflow.artifacts,
        "MLFLOW_HOST": "0.0.0.0",
        # MLflow answers only those who call it by one of these names.
        "MLFLOW_ALLOWED_HOSTS": f"{name}:5000,{name}.{values.namespace}:5000,localhost:5000",
        "MLFLOW_WORKERS": str(values.mlflow.workers),
        "MLFLOW_LOGINS": "/tmp/logins",
    }
    probe = {"tcpSocket": {"port": 5000}, "periodSeconds": 10}
    return {
        "name": MLFLOW,
        "image": values.image.reference("mlflow"),
        "command": ["infra/mlflow/serve.sh"],
        "env": [
            *({"name": key, "value": value} for key, value in variables.items()),
            secret_variable(values, "PGPASSWORD", "postgres-password"),
            secret_variable(values, "MLFLOW_AUTH_ADMIN_PASSWORD", "mlflow-admin-password"),
            secret_variable(values, "MLFLOW_FLASK_SERVER_SECRET_KEY", "mlflow-session-key"),
            *storage_variables(values),
        ],
        "ports": [{"name": MLFLOW, "containerPort": 5000}],
        "readinessProbe": probe,
        "livenessProbe": {**probe, "initialDelaySeconds": 120},
        "resources": resources(cpus=2, memory_gib=4),
        "securityContext": container_security(),
        "volumeMounts": [{"name": "scratch", "mountPath": "/tmp"}],
    }


def _database(values: ClusterValues) -> list[Manifest]:
    container: Manifest = {
        "name": POSTGRES,
        "image": values.mlflow.database_image,
        "env": [
            {"name": "POSTGRES_USER", "value": "mlflow"},
            {"name": "POSTGRES_DB", "value": "mlflow"},
            # The directory must be empty at the first start, which the root of a volume need not be.
            {"name": "PGDATA", "value": f"{_DATA}/pgdata"},
            secret_variable(values, "POSTGRES_PASSWORD", "postgres-password"),
        ],
        "ports": [{"name": POSTGRES, "containerPort": 5432}],
        "readinessProbe": {"exec": {"command": ["pg_isready", "--username", "mlflow"]}, "periodSeconds": 10},
        "resources": resources(cpus=1, memory_gib=2),
    }
    return [
        stateful_set(values, POSTGRES, container, mount=_DATA, gib=values.mlflow.database_gib),
        service(values, POSTGRES, 5432),
    ]
