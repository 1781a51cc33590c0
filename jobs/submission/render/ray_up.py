"""The configuration of `ray up`, which starts a cluster on AWS without Kubernetes."""

from __future__ import annotations

from typing import Any

from jobs.submission.values import ClusterValues, GroupValues

_HEAD = "head"
_TOKEN_FILE = "~/.ray/auth_token"


def ray_up(values: ClusterValues) -> dict[str, Any]:
    """Return the configuration, in which every node runs the project's image and needs the token of Ray."""
    prefix = "RAY_AUTH_MODE=token RAY_worker_niceness=0"
    environment = {
        "TEMPNET_HOME": values.storage.uri,
        "AWS_DEFAULT_REGION": values.storage.region,
        **({"AWS_ENDPOINT_URL": values.storage.endpoint} if values.storage.endpoint else {}),
    }
    options = [f"--env {name}={value}" for name, value in environment.items()]
    types: dict[str, Any] = {
        _HEAD: _node(values.head, num_cpus=0, limits=(0, 0)),
        "readers": _node(values.readers),
        "trainers": _node(values.trainers, image=values.image.reference("cuda")),
    }
    if values.spot.max_nodes:
        spot = _node(values.trainers, image=values.image.reference("cuda"), limits=(0, values.spot.max_nodes))
        spot["node_config"]["InstanceMarketOptions"] = {"MarketType": "spot"}
        types["trainers-spot"] = spot
    return {
        "cluster_name": values.name,
        "max_workers": values.readers.max_nodes + values.trainers.max_nodes + values.spot.max_nodes,
        "idle_timeout_minutes": 5,
        "provider": {"type": "aws", "region": values.storage.region, "cache_stopped_nodes": False},
        "auth": {"ssh_user": "ubuntu"},
        "docker": {
            "image": values.image.reference("cpu"),
            "container_name": "tempnet",
            "pull_before_run": True,
            "run_options": ["--ulimit nofile=65536:65536", *options],
        },
        # Whoever has this file may run code on the cluster. `ray get-auth-token --generate` makes it.
        "file_mounts": {_TOKEN_FILE: _TOKEN_FILE},
        "head_node_type": _HEAD,
        "available_node_types": types,
        "setup_commands": [f"chmod 600 {_TOKEN_FILE}"],
        "head_start_ray_commands": [
            "ray stop",
            f"{prefix} ray start --head --port=6379 --num-cpus=0 --dashboard-host=127.0.0.1 "
            "--autoscaling-config=~/ray_bootstrap_config.yaml --disable-usage-stats",
        ],
        "worker_start_ray_commands": [
            "ray stop",
            f"{prefix} ray start --address=$RAY_HEAD_IP:6379 --disable-usage-stats",
        ],
    }


def _node(
    group: GroupValues, *, image: str = "", num_cpus: int | None = None, limits: tuple[int, int] | None = None
) -> dict[str, Any]:
    """Return a type of node; `num_cpus` and `limits` (fewest, most nodes) take the place of the group's."""
    fewest, most = limits or (group.min_nodes, group.max_nodes)
    found: dict[str, Any] = {
        "min_workers": fewest,
        "max_workers": most,
        "resources": {"CPU": group.cpus if num_cpus is None else num_cpus},
        "node_config": {"InstanceType": group.instance_type},
    }
    if group.gpus:
        found["resources"]["GPU"] = group.gpus
    if image:
        found["docker"] = {"worker_image": image}
    return found
