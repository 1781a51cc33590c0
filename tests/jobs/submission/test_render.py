"""Test that what is rendered for a cluster satisfies the published schemas, is safe, and follows from the values."""

from __future__ import annotations

import copy
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray.autoscaler
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.autoscaler._private.util import prepare_config, validate_config
from schema_support import is_valid, problems_of

from jobs.submission.entrypoint import Entrypoint
from jobs.submission.render.files import render_files
from jobs.submission.render.image import dockerfile
from jobs.submission.render.mlflow_server import mlflow_server
from jobs.submission.render.ray_cluster import ray_cluster
from jobs.submission.render.ray_job import ray_job
from jobs.submission.render.ray_up import ray_up
from jobs.submission.render.services import network_policies, redis, shared_volume
from jobs.submission.values import ClusterValues, GroupValues, SpotValues, StorageValues
from jobs.submission.values_file import read_values

ROOT = Path(__file__).parents[3]
JOB = Entrypoint("jobs.train_lm", ("gpt2-scratch", "--run.name", "two words"))

all_values = st.builds(
    ClusterValues,
    name=st.from_regex(r"[a-z]([a-z0-9-]{0,12}[a-z0-9])?", fullmatch=True),
    queue=st.sampled_from(["", "team-a"]),
    redis_image=st.sampled_from(["", "redis:8.2-bookworm"]),
    readers=st.builds(
        GroupValues, cpus=st.integers(1, 64), memory_gib=st.integers(1, 512), min_nodes=st.integers(0, 3)
    ),
    trainers=st.builds(GroupValues, gpus=st.integers(1, 8), max_nodes=st.integers(1, 64)),
    spot=st.builds(SpotValues, max_nodes=st.integers(0, 3)),
    storage=st.one_of(
        st.builds(StorageValues, endpoint=st.sampled_from(["", "http://minio:9000"])),
        st.builds(StorageValues, uri=st.just("/shared/runs"), volume_gib=st.integers(1, 10_000)),
    ),
)


def manifests_of(values: ClusterValues) -> list[dict[str, Any]]:
    """Return every Kubernetes object of a cluster."""
    job = ray_job(values, JOB, name="a-job", revision="0123", variables={"A": "1"})
    others = [*redis(values), *shared_volume(values), *network_policies(values), *mlflow_server(values)]
    return [ray_cluster(values), job, *others]


@settings(max_examples=10)
@given(all_values)
def test_every_manifest_satisfies_its_schema_whatever_the_values_are(values: ClusterValues) -> None:
    for manifest in manifests_of(values):
        assert problems_of(manifest) == [], manifest["kind"]
    validate_ray_up(ray_up(values))


def validate_ray_up(config: dict[str, Any]) -> None:
    """Validate by the schema that ships with Ray, and as `ray up` does after it has filled in its defaults."""
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    jsonschema.validate(config, schema)
    validate_config(prepare_config(copy.deepcopy(config)))


def places_of(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every mapping inside a manifest."""
    if isinstance(value, dict):
        yield value
        for item in value.values():
            yield from places_of(item)
    elif isinstance(value, list):
        for item in value:
            yield from places_of(item)


def is_free(mapping: dict[str, Any]) -> bool:
    """Return whether a mapping has keys that the user chooses, such as labels: all of its values are texts."""
    return all(isinstance(value, str) for value in mapping.values())


def test_an_unknown_field_fails_wherever_it_is() -> None:
    num_tried = 0
    for manifest in manifests_of(ClusterValues())[1:]:  # the first is within the second
        for number, place in enumerate(places_of(manifest)):
            if is_free(place):
                continue
            wrong = copy.deepcopy(manifest)
            list(places_of(wrong))[number]["unheardOf"] = 1
            assert not is_valid(wrong), place
            num_tried += 1
    assert num_tried > 150
    config = ray_up(ClusterValues())
    with pytest.raises(jsonschema.ValidationError):
        validate_ray_up(config | {"unheard_of": 1})


@pytest.mark.parametrize(
    "change",
    [
        {"submissionMode": "Sidecar"},
        {"backoffLimit": "3"},
        {"shutdownAfterJobFinishes": True},
        {"ttlSecondsAfterFinished": 60},
        {"submitterConfig": {"backoffLimit": 1}},
        {"deletionStrategy": {"deletionRules": []}},
        {"deletionStrategy": {"deletionRules": [{"policy": "DeleteAll", "condition": {"jobStatus": "FAILED"}}]}},
        {"deletionStrategy": {"deletionRules": [{"policy": "DeleteSelf", "condition": {"ttlSeconds": 3}}]}},
    ],
)
def test_a_wrong_value_of_a_ray_job_fails(change: dict[str, Any]) -> None:
    manifest = ray_job(ClusterValues(), JOB, name="a", revision="", variables={})
    assert problems_of(manifest) == []
    assert problems_of(manifest | {"spec": manifest["spec"] | change})


def test_the_files_of_the_repository_are_those_of_the_default_values() -> None:
    for name, text in render_files(ClusterValues()).items():
        assert (ROOT / "infra" / name).read_text() == text, f"type: .venv/bin/python -m jobs.submit render ({name})"
        if name.endswith(".yaml"):
            assert list(yaml.safe_load_all(text))


@settings(max_examples=10)
@given(all_values)
def test_no_pod_has_privileges_and_no_manifest_holds_a_password(values: ClusterValues) -> None:
    pods = [place for manifest in manifests_of(values) for place in places_of(manifest) if "containers" in place]
    assert len(pods) >= 7
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            for variable in container.get("env", []):
                is_secret = re.search("PASSWORD|SECRET|KEY|USERNAME", variable["name"]) is not None
                assert is_secret == ("valueFrom" in variable), variable
    clusters = [manifest["spec"].get("rayClusterSpec", manifest["spec"]) for manifest in manifests_of(values)[:2]]
    assert all(cluster["authOptions"] == {"mode": "token"} for cluster in clusters)


@settings(max_examples=10)
@given(all_values)
def test_every_pod_is_behind_a_policy_and_every_service_leads_to_pods(values: ClusterValues) -> None:
    manifests = manifests_of(values)
    templates = [
        place for manifest in manifests for place in places_of(manifest) if "containers" in place.get("spec", ())
    ]
    pods = [template["metadata"]["labels"] for template in templates]
    policies = [manifest["spec"] for manifest in manifests if manifest["kind"] == "NetworkPolicy"]
    services = [manifest["spec"] for manifest in manifests if manifest["kind"] == "Service"]
    for pod in pods:
        assert any(policy["podSelector"]["matchLabels"].items() <= pod.items() for policy in policies)
    for service in services:
        assert any(service["selector"].items() <= pod.items() for pod in pods)
    assert all(rule["from"] for policy in policies for rule in policy["ingress"])


def test_groups_follow_from_the_values() -> None:
    values = ClusterValues(trainers=GroupValues(gpus=4, min_nodes=1, max_nodes=16), spot=SpotValues(max_nodes=5))
    head, groups = (ray_cluster(values)["spec"][key] for key in ("headGroupSpec", "workerGroupSpecs"))
    assert [(group["groupName"], group["minReplicas"], group["maxReplicas"]) for group in groups] == [
        ("readers", 0, 8), ("trainers", 1, 16), ("trainers-spot", 0, 5),
    ]  # fmt: skip
    gpus = [group["template"]["spec"]["containers"][0]["resources"]["limits"].get("nvidia.com/gpu") for group in groups]
    assert gpus == [None, "4", "4"]
    assert groups[2]["template"]["spec"]["nodeSelector"] == {"karpenter.sh/capacity-type": "spot"}
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert ray_cluster(values)["spec"]["rayVersion"] == version("ray")
    without = ray_cluster(replace(values, spot=SpotValues(max_nodes=0)))["spec"]["workerGroupSpecs"]
    assert [group["groupName"] for group in without] == ["readers", "trainers"]


def test_a_ray_job_runs_what_was_typed() -> None:
    manifest = ray_job(ClusterValues(), JOB, name="mine", revision="0123", variables={"TEMPNET_REVISION": "0123"})
    spec = manifest["spec"]
    assert shlex.split(spec["entrypoint"]) == [
        "python",
        "-m",
        "jobs.train_lm",
        "gpt2-scratch",
        "--run.name",
        "two words",
    ]
    assert yaml.safe_load(spec["runtimeEnvYAML"]) == {"env_vars": {"TEMPNET_REVISION": "0123"}}
    assert manifest["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "tempnet"
    with pytest.raises(ValueError, match="name = 'Mine' must consist of"):
        ray_job(ClusterValues(), JOB, name="Mine", revision="", variables={})


def test_the_image_is_locked_and_its_user_has_no_privileges() -> None:
    text = dockerfile(ClusterValues())
    stages = {name: base for base, name in re.findall(r"^FROM (\S+) AS (\S+)", text, re.MULTILINE)}
    assert [stages[target] for target in ("cpu", "cuda", "mlflow")] == ["code"] * 3
    code = text[text.index(" AS code") :]
    assert "\nUSER 1000:1000\n" in code
    assert "USER" not in code[code.index("\nUSER 1000:1000\n") + 6 :]
    # Every installation is of the lock, or constrained by it.
    for line in re.findall(r"pip install .*?(?:\n|$)", text):
        assert "requirements.lock" in line or "['server']" in text[text.index(line) :][:400], line
    copied = set(re.findall(r"^!(\S+)", (ROOT / "infra/image/Dockerfile.dockerignore").read_text(), re.MULTILINE))
    assert {"infra", "jobs", "pipelines", "tempnet", "requirements.lock"} <= copied
    assert all((ROOT / name).exists() for name in copied)


def test_values_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "values.yaml"
    path.write_text("name: mine\ntrainers:\n  gpus: 4\nstorage:\n  uri: s3://bucket/runs\n")
    values = read_values(str(path))
    assert (values.name, values.trainers.gpus, values.storage.uri) == ("mine", 4, "s3://bucket/runs")
    assert values.trainers.max_nodes == ClusterValues().trainers.max_nodes
    assert read_values("") == ClusterValues()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainers:\n  gpu: 4\n", r"trainers\.gpu is no field: did you mean gpus\?"),
        ("trainers:\n  gpus: many\n", r"trainers\.gpus = 'many' must be of type int"),
        ("trainers: 4\n", "trainers must be a mapping"),
        ("trainers:\n  gpus: 0\n", r"trainers\.gpus = 0 must be positive"),
        ("name: Mine\n", "name = 'Mine' must consist of"),
        ("storage:\n  uri: /runs\n", "is a path, but there is no shared volume"),
        ("storage:\n  uri: /runs\n  volume_gib: 5\n", "must lie below storage.mount"),
        ("readers:\n  min_nodes: 9\n", r"group\.min_nodes = 9 must not exceed"),
        ("a: [", "is no YAML"),
    ],
)
def test_a_wrong_value_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "values.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_values(str(path))
