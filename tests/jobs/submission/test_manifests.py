"""Test that the files of infra/ satisfy the published schemas and are safe, and what `jobs.submit rayjob` makes of them."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray.autoscaler
import yaml
from jsonschema import Draft202012Validator
from ray.autoscaler._private.util import prepare_config, validate_config
from readme_support import lines_like, run_line

from jobs import submit

ROOT = Path(__file__).parents[3]
KUBERNETES = ROOT / "infra" / "kubernetes"
KUSTOMIZATIONS = sorted(path.parent for path in KUBERNETES.rglob("kustomization.yaml"))
FULL = KUBERNETES / "overlays" / "fault-tolerant"
each_kustomization = pytest.mark.parametrize("directory", KUSTOMIZATIONS, ids=lambda path: path.name)
Manifest = dict[str, Any]


def load(path: Path) -> list[Any]:
    """Return the documents of a YAML file, in which nothing is shared."""
    return [json.loads(json.dumps(document)) for document in yaml.safe_load_all(path.read_text())]


def build(directory: Path) -> list[Manifest]:
    """Return the objects of a kustomization, as `kubectl kustomize` does with the few means that infra/ uses."""
    (kustomization,) = load(directory / "kustomization.yaml")
    objects: list[Manifest] = []
    for name in kustomization["resources"]:
        objects += build(directory / name) if (directory / name).is_dir() else load(directory / name)
    for patch in kustomization.get("patches", []):
        kind, name = patch["target"]["kind"], patch["target"]["name"]
        (target,) = (item for item in objects if (item["kind"], item["metadata"]["name"]) == (kind, name))
        for step in load(directory / patch["path"])[0]:
            *way, last = step["path"].removeprefix("/").split("/")
            place: Any = target
            for key in way:
                place = place[int(key) if isinstance(place, list) else key]
            if last == "-":
                place.append(step["value"])
            else:
                assert (step["op"] == "replace") == (last in place)
                place[last] = step["value"]
    return objects


@functools.cache
def manifests_of(directory: Path) -> list[Manifest]:
    """Return every object of a kustomization and, at the end, a RayJob with its cluster. They are not to be changed."""
    objects, (job,) = build(directory), load(KUBERNETES / "base" / "ray-job.yaml")
    (cluster,) = (item["spec"] for item in objects if item["kind"] == "RayCluster")
    return [*objects, job | {"spec": job["spec"] | {"rayClusterSpec": cluster}}]


@functools.cache
def validators() -> dict[str, Draft202012Validator]:
    """Return the validator of each kind, by `apiVersion/kind`. The schemas of KubeRay refer to those of Kubernetes."""
    files = [path.read_text() for path in (Path(__file__).parent / "schemas").glob("*.json")]
    schemas = [json.loads(text.replace("kubernetes-1.34.0.json#", "#")) for text in files]
    definitions = {name: definition for schema in schemas for name, definition in schema["$defs"].items()}
    return {
        kind: Draft202012Validator({**reference, "$defs": definitions})
        for schema in schemas
        for kind, reference in schema["kinds"].items()
    }


def validator_of(manifest: Manifest) -> Draft202012Validator:
    return validators()[f"{manifest['apiVersion']}/{manifest['kind']}"]


def places_in(value: Any) -> Iterator[Manifest]:
    """Yield every mapping inside a manifest."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        yield from places_in(item)


@each_kustomization
def test_every_manifest_satisfies_its_schema(directory: Path) -> None:
    for manifest in manifests_of(directory):
        validator_of(manifest).validate(manifest)


def test_the_service_of_vllm_satisfies_its_schema_and_is_behind_a_policy() -> None:
    """`tests/cluster/test_vllm_server.py` reads what is meant for Ray Serve with its own classes."""
    service, policy = load(ROOT / "infra" / "serving" / "ray-service.yaml")
    validator_of(service).validate(service)
    validator_of(policy).validate(policy)
    pods = [place["metadata"]["labels"] for place in places_in(service) if "containers" in place.get("spec", ())]
    assert pods == [policy["spec"]["podSelector"]["matchLabels"]] * 2
    service["spec"]["rayClusterConfig"]["unheardOf"] = 1
    assert not validator_of(service).is_valid(service)
    assert service["spec"]["rayClusterConfig"]["rayVersion"] == version("ray")


def test_the_configuration_of_ray_up_satisfies_the_schema_of_ray() -> None:
    (config,) = load(ROOT / "infra" / "ray" / "cluster.yaml")
    jsonschema.validate(config, json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text()))
    validate_config(prepare_config(config))  # as `ray up` does after it has filled in its defaults


@each_kustomization
def test_no_pod_has_privileges_and_no_manifest_holds_a_password(directory: Path) -> None:
    pods = [place for place in places_in(manifests_of(directory)) if "containers" in place]
    assert len(pods) >= 7
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            for variable in container["env"]:
                assert bool(re.search("PASS|SECRET|KEY|USERNAME", variable["name"])) == ("valueFrom" in variable)
    for manifest in manifests_of(directory):
        assert not re.search("PASS|SECRET|KEY", str(list(manifest.get("data", ()))))
        if manifest["kind"].startswith("Ray"):
            assert manifest["spec"].get("rayClusterSpec", manifest["spec"])["authOptions"] == {"mode": "token"}


@each_kustomization
def test_every_pod_is_behind_a_policy_and_every_service_leads_to_pods(directory: Path) -> None:
    manifests = manifests_of(directory)
    templates = [place for place in places_in(manifests) if "containers" in place.get("spec", ())]
    pods = [template["metadata"]["labels"].items() for template in templates]
    policies = [manifest["spec"] for manifest in manifests if manifest["kind"] == "NetworkPolicy"]
    services = [manifest["spec"] for manifest in manifests if manifest["kind"] == "Service"]
    for pod in pods:
        assert any(policy["podSelector"]["matchLabels"].items() <= pod for policy in policies)
    for service in services:
        assert any(service["selector"].items() <= pod for pod in pods)
    assert all(rule["from"] for policy in policies for rule in policy["ingress"])


def test_the_image_is_locked_and_its_user_has_no_privileges() -> None:
    text = (ROOT / "infra/image/Dockerfile").read_text()
    stages = {name: base for base, name in re.findall(r"^FROM (\S+) AS (\S+)", text, re.MULTILINE)}
    assert [stages[target] for target in ("cpu", "cuda", "mlflow")] == ["code"] * 3
    assert re.findall(r"^USER (.*)", text[text.index(" AS code") :], re.MULTILINE) == ["1000:1000", "root", "1000:1000"]
    assert re.search(r"^FROM code AS cuda\n(.+\n)*.*install .* gcc .*\n.*\nUSER 1000:1000", text, re.MULTILINE)
    # Every installation is of the lock, or constrained by it.
    for line in re.findall(r"pip install .*?(?:\n|$)", text):
        assert "requirements.lock" in line or "['server']" in text[text.index(line) :][:400], line
    copied = set(re.findall(r"^!(\S+)", (ROOT / "infra/image/Dockerfile.dockerignore").read_text(), re.MULTILINE))
    assert {"infra", "jobs", "pipelines", "tempnet", "requirements.lock"} <= copied
    assert all((ROOT / name).exists() for name in copied)


def test_the_readmes_ray_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (line,) = lines_like("jobs.submit rayjob *")
    run_line(line)
    (job,) = load(Path("ray-job.yaml"))
    validator_of(job).validate(job)
    assert job["metadata"]["name"] == "gpt2-scratch"
    # KubeRay refuses rules of deletion that do not fit a cluster that grows, and Kueue a job that leaves its cluster.
    assert job["spec"]["shutdownAfterJobFinishes"]
    assert "deletionStrategy" not in job["spec"]
    assert job["spec"]["entrypoint"] == f"python -m jobs.{line.partition(' -- ')[2]}"
    assert yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]["TEMPNET_LOCKED"] == "1"


def test_a_ray_job_has_the_cluster_of_an_overlay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    *objects, expected = manifests_of(FULL)
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump_all(objects).replace("  headGroupSpec:", "  day: 2026-11-30\n  headGroupSpec:"))
    assert submit.main(["rayjob", "--cluster", str(file), "--name", "mine", "--", "train_lm", "gpt2-scratch"]) == 0
    job = yaml.safe_load(capsys.readouterr().out)
    assert job["metadata"] == expected["metadata"] | {"name": "mine"}
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster == expected["spec"]["rayClusterSpec"] | {"day": "2026-11-30"}
    assert cluster["rayVersion"] == version("ray")
    readers, *_ = cluster["workerGroupSpecs"]
    assert json.loads(json.loads(readers["rayStartParams"]["resources"])) == {"reader": 1}
    pods = {group["groupName"]: group["template"]["spec"] for group in cluster["workerGroupSpecs"]}
    assert pods["trainers-spot"].pop("nodeSelector") == {"karpenter.sh/capacity-type": "spot"}
    pods["trainers-spot"]["tolerations"].pop()
    assert pods["trainers-spot"] == pods["trainers"]
    for text, name, message in (
        ("", "Mine", "name = 'Mine' must consist of"),
        ("kind: Service", "mine", "must hold one object of kind RayCluster, not 0"),
    ):
        file.write_text(text)
        with pytest.raises(SystemExit):
            submit.main(["rayjob", "--cluster", str(file), "--name", name, "--", "train_lm", "gpt2-scratch"])
        assert message in capsys.readouterr().err
