"""Test every preset: it is complete, carries its paper's numbers, and its run is recognised, recorded and found again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.engine.export import configuration_from, read_task, write_task
from jobs.engine.fields import (
    configuration_hash,
    fixed_values,
    flat_fields,
    flatten,
    resolve_fields,
    with_absolute_paths,
    with_fields,
)
from jobs.engine.tracking import run_tags
from jobs.studies.reproduction.config import ReproduceConfig
from jobs.studies.sweeps import presets as sweeps
from jobs.tasks.presets import classifiers, clip, images, language_models, sentences
from tempnet.contrastive.config import LOSS_KINDS, check_negatives
from tempnet.rho import check_rho

RUNS: dict[str, Callable[[], Any]] = {**language_models.PRESETS, **clip.PRESETS, **sentences.PRESETS, **images.PRESETS}
PRESETS: dict[str, Callable[[], Any]] = {**RUNS, **classifiers.PRESETS, **sweeps.PRESETS}
HASHES = {
    "gpt2-scratch": "56b55c3fed0f",
    "gpt2-scratch-small": "56dac5cc79ac",
    "gpt2-finetune": "69b3ea2edda7",
    "llama1-7b-frozen": "ceafa4f1800f",
    "llama2-7b-frozen": "30a584527a73",
    "llama2-13b-frozen": "25aa07c644a6",
    "llama2-chat-7b-frozen": "2821e6a439f7",
    "llama2-chat-13b-frozen": "b16ee008c131",
    "frozen-small": "4aacbfc8dc25",
    "llama2-chat-70b-frozen": "a1cd4de7c4c7",
    "clip-cc3m-tempnet": "cc0d47c680a7",
    "clip-cc3m-tempnet-small": "d9a24e8f0d80",
    "clip-cc3m-sogclr-given-small": "816dccf560af",
    "declutr-base": "591b21f180e2",
    "declutr-small": "7ab484bbaa9e",
    "declutr-small-tempnet-small": "01c6cd43c8c2",
    "triple-entropy-grid": "8eea8feea226",
    "triple-entropy-small": "2f914e9e39bf",
}
FREE_IN_EVERY_RUN = {
    *(f"run.{name}" for name in ("storage", "prepared", "export", "grace_seconds", "max_stall_minutes",
                                 "checkpoint_every", "log_every", "num_checkpoints_kept", "max_restarts",
                                 "max_wait_minutes")),
    *(f"workers.{name}" for name in ("num_workers", "cpus_per_worker", "placement", "memory_gib", "compile", "local",
                                     "micro_batch")),
    *(f"tracking.{name}" for name in ("uri", "enabled", "optional", "preset", "paper", "system_metrics", "max_model_gib")),
}  # fmt: skip
FREE_WITH = {
    "data.prepare": {"data.prepare", "data.num_parts_ahead", "data.prepare_cpus"},
    "data.cache_gib": {"data.cache_gib", "data.reader_resources"},
    "model.whole_export": {"model.whole_export"},
    "model.device_map": {"model.device_map", "model.num_gpus"},
}
"""Maps fields that not every preset has to those which may change where they are there."""


@pytest.mark.parametrize("name", HASHES)
def test_runs_made_before_are_recognised(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert configuration_hash(PRESETS[name]()) == HASHES[name], "runs made before could not be continued"


@pytest.mark.parametrize("name", PRESETS)
def test_what_may_change_when_a_run_is_continued(name: str) -> None:
    config = PRESETS[name]()
    fields = list(flat_fields(config))
    free = {field.removeprefix("base.") for field, _, metadata in fields if metadata.get("is_free_to_change", False)}
    there = {field.removeprefix("base.") for field, _, _ in fields}
    expected = FREE_IN_EVERY_RUN.union(*(names for field, names in FREE_WITH.items() if field in there))
    groups = {f"{part}.num_concurrent" for part in ("grid", "sweep") if hasattr(config, part)}
    assert {field for field in free if not field.startswith(("grid.", "sweep."))} == expected
    assert {field for field in free if field.endswith("num_concurrent")} == groups


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


@pytest.mark.parametrize("name", RUNS)
def test_a_configuration_comes_back_from_the_record_of_its_run(name: str, tmp_path: Path) -> None:
    config = with_fields(RUNS[name](), {"run.storage": str(tmp_path)})
    Path(config.run.directory).mkdir()
    write_task(config)
    kind, values = read_task(config.run.directory)
    assert kind == type(config).__name__
    assert configuration_from(type(config), values) == with_absolute_paths(resolve_fields(config))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_found_by_its_name_and_its_place_in_a_paper(name: str) -> None:
    config = PRESETS[name]()
    tags = run_tags(config, getattr(config, "base", config).tracking)
    assert config.run.name == tags["preset"] == name
    assert tags["configuration_hash"] == configuration_hash(config)
    ours = ("frozen", "frozen-small", "frozen-rho-lr-small", "declutr-small-tempnet", "declutr-small-tempnet-small",
            "simclr-cifar10-tempnet", "simclr-cifar10-tempnet-small")  # fmt: skip
    assert ("paper.table" in tags) == (name not in ours)
    if "Table" in tags.get("paper.table", "") and "-small" not in name and "rho-lr" not in name:
        assert tags["paper.table"].partition(", ")[2] in (PRESETS[name].__doc__ or "")


def test_trials_are_found_by_the_preset_of_their_sweep_and_tags_change_no_hash() -> None:
    config = sweeps.PRESETS["gpt2-rho-lr-small"]()
    trial = config.trial(next(config.start())[0])
    tags = run_tags(trial, trial.tracking)
    assert (tags["preset"], tags["paper.table"]) == ("gpt2-rho-lr-small", "TempNet, §6.1")
    untagged = with_fields(trial, {"tracking.preset": "", "tracking.paper": "", "tracking.system_metrics": False})
    assert configuration_hash(untagged) == configuration_hash(trial)
    assert flatten(untagged) != flatten(trial)
    assert run_tags(untagged, untagged.tracking).keys() == {"configuration_hash"}


@pytest.mark.parametrize("name", language_models.PRESETS)
def test_the_rho_of_a_language_model_is_feasible(name: str) -> None:
    config = language_models.PRESETS[name]()
    of_tokenizers = {"gpt2": 50_257, "EleutherAI/pythia-160m": 50_277}
    vocabulary = 2048 if name.endswith("-small") else of_tokenizers.get(config.data.tokenizer, 32_000)
    rho = config.temperature.resolve_rho(vocabulary)
    if name.startswith("frozen"):
        assert rho is None
        assert config.temperature.needs_calibration
        return
    assert rho is not None
    check_rho(rho, vocabulary)
    if not name.endswith("-small"):
        assert config.temperature.rho == 10.0
        assert f"{name}-small" in RUNS


@pytest.mark.parametrize("name", clip.PRESETS)
def test_a_contrastive_preset_is_consistent_and_its_rho_feasible(name: str) -> None:
    config = clip.PRESETS[name]()
    loss, optimizer = config.temperature.loss_config, config.optimizer
    check_negatives(loss, optimizer.batch_size, 20_000 if name.endswith("-small") else 2_900_000)
    if not name.endswith("-small"):
        assert f"{name}-small" in RUNS
        assert (optimizer.batch_size, optimizer.weight_decay, optimizer.beta2) == (512, 0.02, 0.999)
        assert config.run.num_steps * optimizer.warmup_share == pytest.approx(1000)
        rho = {"fastclip_v2": 7.0, "fastclip_v3": 6.5, "neuclip": 6.5}.get(loss.name, 8.0)  # arXiv 2407.01445's code
        assert (config.temperature.rho, config.model.image_size) == (rho, 224)
        if loss.kind.normaliser == "global" and loss.kind.temperature != "learned":
            assert (loss.tau_min, loss.tau_max, loss.gamma, loss.tau) == (0.001, 0.05, 0.8, 0.01)


def test_the_contrastive_presets_cover_every_loss() -> None:
    assert {preset().temperature.loss for preset in clip.PRESETS.values()} | {"clip_fixed"} == set(LOSS_KINDS)
