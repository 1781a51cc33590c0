"""Tests that the fields of a run tell what identifies it, and that an earlier run is recognised by the same hash."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jobs.engine.fields import absolute_path, resolve_fields, with_absolute_paths
from jobs.engine.identity import configuration_hash, differences, fixed_values, flat_fields, flatten, with_fields
from jobs.studies.reproduction.config import ReproduceConfig
from jobs.studies.sweeps import presets as sweeps
from jobs.tasks.presets import classifiers, clip, language_models, sentences

PRESETS: dict[str, Any] = {
    **language_models.PRESETS,
    **clip.PRESETS,
    **sentences.PRESETS,
    **classifiers.PRESETS,
    **sweeps.PRESETS,
}
FREE_IN_EVERY_RUN = {
    "run.storage",
    "run.prepared",
    "run.export",
    "run.grace_seconds",
    "run.checkpoint_every",
    "run.num_checkpoints_kept",
    "run.log_every",
    "run.max_restarts",
    "run.max_wait_minutes",
    "workers.num_workers",
    "workers.cpus_per_worker",
    "workers.placement",
    "workers.memory_gib",
    "tracking.uri",
    "tracking.enabled",
    "tracking.optional",
    "tracking.preset",
    "tracking.paper",
    "tracking.system_metrics",
    "tracking.max_model_gib",
}
FREE_WITH_TEXT = {"data.prepare", "data.num_parts_ahead", "data.prepare_cpus"}
"""How text is prepared, which does not change the batches."""
FREE_WITH_SHARDS = {"data.cache_gib", "data.reader_resources"}
"""Where shards are read, and how much of them a node keeps."""
HASHES = {
    "gpt2-scratch": "56b55c3fed0f",
    "gpt2-scratch-small": "572d25b89b4c",
    "frozen-small": "8a6676e210fa",
    "llama2-chat-70b-frozen": "a1cd4de7c4c7",
    "clip-cc3m-tempnet": "cc0d47c680a7",
    "clip-cc3m-tempnet-small": "78371dea7a2e",
    "clip-cc3m-sogclr-given-small": "b00a61f13f3f",
    "declutr-small": "7ab484bbaa9e",
    "declutr-small-tempnet-small": "55400e3d3d15",
    "triple-entropy-grid": "8eea8feea226",
    "triple-entropy-small": "2f914e9e39bf",
}


@pytest.fixture
def with_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this machine's CPUs appear to have instructions for bfloat16."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)


@pytest.fixture
def without_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: False)


@pytest.mark.parametrize("name", HASHES)
def test_runs_made_before_are_recognised(name: str, with_bfloat16: None) -> None:
    assert configuration_hash(PRESETS[name]()) == HASHES[name], "runs made before could not be continued"


@pytest.mark.parametrize("name", PRESETS)
def test_what_may_change_when_a_run_is_continued(name: str) -> None:
    config = PRESETS[name]()
    free = {
        field.removeprefix("base.")
        for field, _, metadata in flat_fields(config)
        if metadata.get("is_free_to_change", False)
    }
    has_text = any(field.endswith("data.prepare") for field in flatten(config))
    has_cache = any(field.endswith("data.cache_gib") for field in flatten(config))
    expected = FREE_IN_EVERY_RUN | (FREE_WITH_TEXT if has_text else set()) | (FREE_WITH_SHARDS if has_cache else set())
    if any(field.endswith("model.whole_export") for field in flatten(config)):
        expected = expected | {"model.whole_export"}
    if any(field.endswith("model.device_map") for field in flatten(config)):
        expected = expected | {"model.device_map", "model.num_gpus"}
    assert has_cache == hasattr(getattr(config, "base", config).data, "cache_gib")
    assert {field for field in free if not field.startswith(("grid.", "sweep."))} == expected
    assert ("grid.num_concurrent" in free) == hasattr(config, "grid")
    assert ("sweep.num_concurrent" in free) == hasattr(config, "sweep")


def test_a_precision_that_is_left_to_the_machine_is_the_one_that_it_chooses(without_bfloat16: None) -> None:
    config = PRESETS["gpt2-scratch-small"]()
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


def test_cpus_with_instructions_for_bfloat16_use_it(with_bfloat16: None) -> None:
    assert PRESETS["gpt2-scratch-small"]().workers.resolved_precision == "bf16"


def test_a_field_that_was_added_later_identifies_a_run_only_where_it_differs_from_what_runs_did_before() -> None:
    config = PRESETS["gpt2-scratch-small"]()
    assert "temperature.input" not in fixed_values(config)
    changed = with_fields(config, {"temperature.input": "hidden"})
    assert fixed_values(changed)["temperature.input"] == "hidden"
    assert configuration_hash(changed) != configuration_hash(config)


def test_presets_that_differ_only_by_name_say_so() -> None:
    first: dict[str, str] = {}
    for name, preset in PRESETS.items():
        values = {key: value for key, value in fixed_values(preset()).items() if not key.endswith("run.name")}
        same = first.setdefault(repr(values), name)
        assert (f"The same as {same}" in (preset.__doc__ or "")) == (same != name), (name, same)


def test_what_may_change_when_a_reproduction_is_continued() -> None:
    config = ReproduceConfig(experiment="T2")
    free = flatten(config).keys() - fixed_values(config).keys()
    of_tracking = {field for field in FREE_IN_EVERY_RUN if field.startswith("tracking.")}
    assert free == {"storage", "num_concurrent"} | of_tracking
    assert configuration_hash(config) == "a5bcd0a7d548"


@pytest.mark.parametrize("name", PRESETS)
def test_every_field_that_names_data_or_a_model_is_a_path(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.engine.fields.absolute_path", lambda value: value and "absolute")
    config = PRESETS[name]()
    found = {field for field, value in flatten(with_absolute_paths(config)).items() if value == "absolute"}
    names = ("train", "validation", "train_captions", "validation_captions", "tokenizer", "path", "image_path",
             "text_path", "table", "directory", "file")  # fmt: skip
    assert found == {field for field, value in flatten(config).items() if value and field.rpartition(".")[2] in names}


def test_only_what_exists_here_becomes_absolute(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    assert absolute_path("model") == str(tmp_path / "model")
    assert [absolute_path(value) for value in ("", "gpt2", "s3://b/model")] == ["", "gpt2", "s3://b/model"]


def test_a_link_to_a_file_keeps_the_suffix_that_tells_its_format(tmp_path: Any) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "5f1e").touch()
    (tmp_path / "text.jsonl").symlink_to(tmp_path / "blobs" / "5f1e")
    (tmp_path / "data").symlink_to(tmp_path / "blobs")
    assert absolute_path(f"{tmp_path}/blobs/../text.jsonl") == str(tmp_path / "text.jsonl")
    assert absolute_path(str(tmp_path / "data")) == str(tmp_path / "blobs")
