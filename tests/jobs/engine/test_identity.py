"""Test what identifies a run, a path and a model, and that what is no record of a run is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.engine.config import RunSection, TrainingConfig
from jobs.engine.export import configuration_from, model_digest, read_task, tempnet_digest, write_task
from jobs.engine.fields import (
    absolute_path,
    configuration_hash,
    differences,
    fixed_values,
    flatten,
    resolve_fields,
    with_fields,
)
from jobs.engine.launch import claim_directory
from jobs.tasks.base import resolve_paths
from jobs.tasks.presets.language_models import PRESETS
from tempnet import TempNet, TempNetConfig
from tempnet.fingerprints import files_digest


def test_a_run_is_identified_by_what_changes_its_result() -> None:
    config = PRESETS["gpt2-scratch-small"]()
    for values in ({"run.log_every": 7}, {"tracking.uri": "http://localhost:1"}):
        assert configuration_hash(with_fields(config, values)) == configuration_hash(config)
    other = with_fields(config, {"optimizer.learning_rate_base": 1e-3})
    assert configuration_hash(other) != configuration_hash(config)
    assert differences(fixed_values(config), fixed_values(other)) == ["optimizer.learning_rate_base: 0.002 → 0.001"]
    # A field that was added later counts only where it differs from what runs did before.
    assert "temperature.input" not in fixed_values(config)
    changed = with_fields(config, {"temperature.input": "hidden"})
    assert fixed_values(changed)["temperature.input"] == "hidden"
    assert configuration_hash(changed) != configuration_hash(config)


def test_a_precision_that_is_left_to_the_machine_is_the_one_that_it_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: False)
    config = with_fields(PRESETS["gpt2-scratch-small"](), {"temperature.tau_max": 2.0})
    assert config.workers.precision == "auto"
    for use_gpu, precision in ((False, "fp32"), (True, "bf16")):
        left = with_fields(config, {"workers.use_gpu": use_gpu})
        given = with_fields(left, {"workers.precision": precision})
        assert flatten(left) == flatten(given)
        assert configuration_hash(left) == configuration_hash(given)
        assert resolve_fields(left) == given
        assert resolve_fields(given) == given
    other = with_fields(config, {"workers.precision": "bf16"})
    assert differences(fixed_values(config), fixed_values(other)) == ["workers.precision: 'fp32' → 'bf16'"]

    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert PRESETS["gpt2-scratch-small"]().workers.resolved_precision == "bf16"


def test_only_what_exists_here_becomes_absolute(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    assert absolute_path("model") == str(tmp_path / "model")
    assert [absolute_path(value) for value in ("", "gpt2", "s3://b/model")] == ["", "gpt2", "s3://b/model"]

    # A link to a file keeps the suffix that tells its format.
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "5f1e").touch()
    (tmp_path / "text.jsonl").symlink_to(tmp_path / "blobs" / "5f1e")
    (tmp_path / "data").symlink_to(tmp_path / "blobs")
    assert absolute_path(f"{tmp_path}/blobs/../text.jsonl") == str(tmp_path / "text.jsonl")
    assert absolute_path(str(tmp_path / "data")) == str(tmp_path / "blobs")

    monkeypatch.setenv("HOME", str(tmp_path))
    assert [absolute_path(value) for value in ("~/model", "~/*.tar")] == [f"{tmp_path}/model", f"{tmp_path}/*.tar"]


def test_what_a_run_writes_is_absolute_for_its_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"storage": "runs", "prepared": "ready", "export": "exports/a"}
    config = with_fields(PRESETS["gpt2-scratch-small"](), {f"run.{name}": place for name, place in names.items()})
    Path(config.run.directory).mkdir(parents=True)
    write_task(config)
    for run in (resolve_paths(config).run, RunSection(**read_task(config.run.directory)[1]["run"])):
        assert {name: getattr(run, name) for name in names} == {name: f"{tmp_path}/{names[name]}" for name in names}
    assert not with_fields(config, {"run.export": ""}).run.resolved.export  # it moves with the directory of the run


def test_a_range_that_is_measured_is_not_the_one_that_is_given(tmp_path: Path) -> None:
    changes = {"run.storage": str(tmp_path), "temperature.loss": "proper"}
    measured = with_fields(PRESETS["gpt2-scratch-small"](), changes)
    given = with_fields(measured, {"temperature.tau_max": 2.0})
    claim_directory(measured)
    with pytest.raises(ValueError, match=r"temperature\.tau_max: None → 2\.0"):
        claim_directory(given)
    assert configuration_hash(measured) == configuration_hash(given)


@pytest.mark.parametrize("size", [10, 5 << 20])
def test_a_model_with_a_changed_end_is_another(tmp_path: Path, size: int) -> None:
    digests = []
    for content in (bytes(size), b"1" + bytes(size - 1), bytes(size - 1) + b"1", bytes(size)):
        (tmp_path / "model.safetensors").write_bytes(content)
        digests.append(model_digest(str(tmp_path)))
    assert digests[0] == digests[3] == files_digest([tmp_path / "model.safetensors"])
    assert len(set(digests)) == 3


def test_configuration_and_weights_of_a_network_both_count() -> None:
    network = TempNet(TempNetConfig.for_logits(30, rho=1.0, hidden_size=4, num_prototypes=3))
    before = tempnet_digest(network)
    assert tempnet_digest(network) == before
    network.set_tau_max_eval(1.5)
    assert tempnet_digest(network) != before
    network.set_tau_max_eval(None)
    network.pool_bias.data += 1e-3
    assert tempnet_digest(network) != before


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="not the directory of a run, or the run is of an older version"):
        read_task(str(tmp_path))
    (tmp_path / "task.json").write_text(json.dumps({"configuration": {}}))
    with pytest.raises(ValueError, match="is damaged"):
        read_task(str(tmp_path))
    with pytest.raises(ValueError, match="has no field color: the run is of another version"):
        configuration_from(TrainingConfig, {"color": 1})
