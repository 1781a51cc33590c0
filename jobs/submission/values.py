"""The values from which the files for a cluster are rendered: one dataclass for each part, checked when it is created."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from importlib.metadata import version

from jobs.engine.checks import check_not_negative, check_positive

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?")


def check_name(field_name: str, value: str) -> None:
    """Raise ValueError if a value cannot be the name of a Kubernetes object whose own name may get a suffix."""
    if not _NAME.fullmatch(value):
        raise ValueError(
            f"{field_name} = {value!r} must consist of at most 42 small letters, digits and dashes, as mine-2 does"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageValues:
    """The container images, which `Dockerfile` builds."""

    repository: str = "registry.example.com/tempnet"
    """Repository of the images. The tags are those of the target: cpu, cuda and mlflow."""
    tag: str = "0.1.0"
    """Version in the tags, as in REPOSITORY:VERSION-cpu."""
    python: str = "python:3.11-slim-bookworm"
    """Image that all targets start from: Debian with Python 3.11."""
    cuda_architectures: str = "8.0;9.0"
    """GPU architectures that DeepSpeed's operations are built for: 8.0 is A100, 9.0 is H100."""

    def reference(self, target: str) -> str:
        """Return the full name of the image of a target."""
        return f"{self.repository}:{self.tag}-{target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupValues:
    """A group of equal nodes, of which the autoscaler runs as many as are needed."""

    cpus: int = 8
    """CPUs of a node."""
    memory_gib: int = 32
    """Memory of a node, in GiB. Ray's object store takes at most 30 % of it."""
    gpus: int = 0
    """GPUs of a node."""
    min_nodes: int = 0
    """Nodes that always run."""
    max_nodes: int = 8
    """Nodes that run at most."""
    instance_type: str = "m7i.2xlarge"
    """Machine that `ray up` starts on AWS."""

    def __post_init__(self) -> None:
        check_positive("group", self, "cpus", "memory_gib")
        check_not_negative("group", self, "gpus", "min_nodes", "max_nodes")
        if self.min_nodes > self.max_nodes:
            raise ValueError(f"group.min_nodes = {self.min_nodes} must not exceed group.max_nodes = {self.max_nodes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotValues:
    """Where trainers run that the provider may take back, and how these nodes are recognised."""

    max_nodes: int = 8
    """Nodes that run at most. 0: no spot nodes."""
    label: str = "karpenter.sh/capacity-type"
    """Label of spot nodes."""
    value: str = "spot"
    """Value of that label, which the nodes carry as a taint too."""

    def __post_init__(self) -> None:
        check_not_negative("spot", self, "max_nodes")


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageValues:
    """Where runs, prepared data and MLflow's artifacts are kept."""

    uri: str = "s3://tempnet/runs"
    """Directory of the runs: a URI, or a path below `mount` if there is a shared volume."""
    endpoint: str = ""
    """Address of an S3 server other than Amazon's; empty: Amazon's."""
    region: str = "us-east-1"
    """Region of the bucket, and of `ray up`."""
    volume_gib: int = 0
    """Size of a shared volume that all nodes mount, in GiB. 0: there is only the bucket."""
    storage_class: str = "efs"
    """Storage class of the shared volume, which must allow ReadWriteMany."""
    mount: str = "/shared"
    """Where the shared volume is mounted."""

    def __post_init__(self) -> None:
        check_not_negative("storage", self, "volume_gib")
        if "://" not in self.uri and not self.volume_gib:
            raise ValueError(
                f"storage.uri = {self.uri!r} is a path, but there is no shared volume: give a URI, or storage.volume_gib"
            )
        if "://" not in self.uri and not self.uri.startswith(f"{self.mount}/"):
            raise ValueError(f"storage.uri = {self.uri!r} must lie below storage.mount = {self.mount!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobValues:
    """How a RayJob is run and cleared away."""

    backoff_limit: int = 3
    """How many times a failed job is started again, each time on a new cluster."""
    max_hours: int = 96
    """Hours after which the job is ended."""
    keep_cluster_minutes: int = 60
    """Minutes that the head stays after the end, so that its logs can be read. The workers end at once."""
    keep_record_days: int = 14
    """Days that the RayJob itself stays after its end."""
    grace_seconds: int = 120
    """Seconds that a pod has to end after it was told to: enough for a checkpoint."""

    def __post_init__(self) -> None:
        check_not_negative("job", self, "backoff_limit", "keep_cluster_minutes", "keep_record_days")
        check_positive("job", self, "max_hours", "grace_seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class MlflowValues:
    """The MLflow server, which keeps runs in PostgreSQL and artifacts in the bucket."""

    artifacts: str = "s3://tempnet/mlflow"
    """URI of the artifacts."""
    workers: int = 2
    """Processes of the server."""
    database_gib: int = 20
    """Size of PostgreSQL's volume, in GiB."""
    database_image: str = "postgres:17.6-bookworm"
    """Image of PostgreSQL."""

    def __post_init__(self) -> None:
        check_positive("mlflow", self, "workers", "database_gib")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterValues:
    """Everything that differs from one cluster to another."""

    name: str = "tempnet"
    """Name of the cluster, with which the names of all objects begin."""
    namespace: str = "tempnet"
    """Kubernetes namespace."""
    secret_name: str = "tempnet"
    """Secret with the keys redis-password, postgres-password, mlflow-admin-password, mlflow-session-key,
    MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY. It is never rendered:
    create it yourself."""
    queue: str = "tempnet"
    """Kueue's LocalQueue that admits the cluster; empty: no queue."""
    redis_image: str = "redis:8.2-bookworm"
    """Image of the Redis that keeps the state of Ray's head, so that the head can be lost; empty: none is kept."""
    image: ImageValues = field(default_factory=ImageValues)
    head: GroupValues = field(default_factory=lambda: GroupValues(cpus=4, memory_gib=16, instance_type="m7i.xlarge"))
    readers: GroupValues = field(default_factory=GroupValues)
    """Nodes without GPUs that read and prepare data."""
    trainers: GroupValues = field(
        default_factory=lambda: GroupValues(cpus=96, memory_gib=1024, gpus=8, max_nodes=16, instance_type="p5.48xlarge")
    )
    """Nodes with GPUs."""
    spot: SpotValues = field(default_factory=SpotValues)
    storage: StorageValues = field(default_factory=StorageValues)
    job: JobValues = field(default_factory=JobValues)
    mlflow: MlflowValues = field(default_factory=MlflowValues)

    def __post_init__(self) -> None:
        for name in ("name", "namespace", "secret_name"):
            check_name(name, getattr(self, name))
        if self.queue:
            check_name("queue", self.queue)
        if self.head.gpus or self.readers.gpus:
            raise ValueError("head.gpus and readers.gpus must be 0: GPUs belong to the trainers")
        if not self.trainers.gpus:
            raise ValueError("trainers.gpus = 0 must be positive: nodes without GPUs are the readers")

    @property
    def ray_version(self) -> str:
        """Version of Ray, which is that of the lock and so that of this environment."""
        return version("ray")
