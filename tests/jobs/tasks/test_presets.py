"""Test every preset: it is complete, carries its paper's numbers, and its run is recognised, recorded and found again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForMaskedLM, RobertaTokenizerFast

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
from jobs.engine.hardware import training_memory
from jobs.engine.tracking import run_tags
from jobs.studies.reproduction.config import ReproduceConfig
from jobs.studies.sweeps import presets as sweeps
from jobs.tasks.presets import classifiers, clip, language_models, sentences
from jobs.tasks.sentence_encoder.data import build_encoder
from pipelines.text.tokenization import load_tokenizer
from tempnet.contrastive.config import LOSS_KINDS, check_negatives
from tempnet.models.sentence_encoder import num_positions
from tempnet.rho import check_rho

RUNS: dict[str, Callable[[], Any]] = {**language_models.PRESETS, **clip.PRESETS, **sentences.PRESETS}
PRESETS: dict[str, Callable[[], Any]] = {**RUNS, **classifiers.PRESETS, **sweeps.PRESETS}
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


def test_presets_that_differ_only_by_name_say_so() -> None:
    first: dict[str, str] = {}
    for name, preset in PRESETS.items():
        values = {key: value for key, value in fixed_values(preset()).items() if not key.endswith("run.name")}
        same = first.setdefault(repr(values), name)
        assert (f"The same as {same}" in (preset.__doc__ or "")) == (same != name), (name, same)


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
    assert (tags["preset"], tags["configuration_hash"]) == (name, configuration_hash(config))
    ours = ("frozen", "frozen-small", "frozen-rho-lr-small", "declutr-small-tempnet", "declutr-small-tempnet-small")
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
    assert config.run.name == name
    small = name.endswith("-small")
    of_tokenizers = {"gpt2": 50_257, "EleutherAI/pythia-160m": 50_277}
    vocabulary = 2048 if small else of_tokenizers.get(config.data.tokenizer, 32_000)
    rho = config.temperature.resolve_rho(vocabulary)
    if name.startswith("frozen"):
        assert rho is None
        assert config.temperature.needs_calibration
        return
    assert rho is not None
    check_rho(rho, vocabulary)
    assert config.temperature.network_config(vocabulary, rho, 8).input_size == vocabulary
    assert config.temperature.tau_range == (0.001, 2.0)
    if small:
        assert math.log(vocabulary) - rho == pytest.approx(config.temperature.target_entropy)
    else:
        assert config.temperature.rho == 10.0
        assert f"{name}-small" in RUNS


@pytest.mark.parametrize(
    ("name", "num_steps", "batch_size", "weight_decay", "beta2"),
    [
        ("gpt2-scratch", 320_000, 32, 0.1, 0.95),
        ("gpt2-finetune", 50_000, 32, 0.1, 0.95),
        ("llama1-7b-frozen", 10_000, 16, 0.1, 0.95),
        ("llama2-7b-frozen", 30_000, 16, 0.01, 0.999),
        ("llama2-13b-frozen", 30_000, 16, 0.01, 0.999),
        ("llama2-chat-7b-frozen", 30_000, 16, 0.01, 0.999),
        ("llama2-chat-13b-frozen", 30_000, 16, 0.01, 0.999),
        ("llama2-chat-70b-frozen", 20_000, 16, 0.01, 0.999),
    ],
)
def test_language_models_carry_the_numbers_of_table_5(
    name: str, num_steps: int, batch_size: int, weight_decay: float, beta2: float
) -> None:
    config = language_models.PRESETS[name]()
    optimizer = config.optimizer
    assert (config.run.num_steps, optimizer.batch_size) == (num_steps, batch_size)
    assert (optimizer.weight_decay, optimizer.beta2) == (weight_decay, beta2)
    assert (optimizer.beta1, optimizer.epsilon, optimizer.warmup_share) == (0.9, 1e-8, 0.01)
    assert config.model.is_frozen == name.endswith("frozen")
    if config.model.is_frozen:
        num_parameters = int(name.removesuffix("b-frozen").rpartition("-")[2]) * 10**9
        assert batch_size % config.workers.num_workers == 0
        memory = training_memory(config.workers, num_trained=0, num_frozen=num_parameters)
        assert sum(memory.values()) < 40e9  # half the memory of a large GPU


@pytest.mark.parametrize("name", clip.PRESETS)
def test_a_contrastive_preset_is_consistent_and_its_rho_feasible(name: str) -> None:
    config = clip.PRESETS[name]()
    assert config.run.name == name
    num_samples = 20_000 if name.endswith("-small") else 2_900_000
    check_negatives(config.temperature.loss_config, config.optimizer.batch_size, num_samples)
    network = config.temperature.network_config(config.model.embedding_size)
    loss = config.temperature.loss_config
    assert (network.tau_min, network.tau_max) == (loss.tau_min, loss.tau_max)
    if not name.endswith("-small"):
        assert f"{name}-small" in RUNS
        optimizer = config.optimizer
        assert optimizer.batch_size == 512
        assert (optimizer.weight_decay, optimizer.beta1, optimizer.beta2) == (0.02, 0.9, 0.999)
        assert config.run.num_steps * optimizer.warmup_share == pytest.approx(1000)
        rho = {"fastclip_v2": 7.0, "fastclip_v3": 6.5, "neuclip": 6.5}.get(loss.name, 8.0)  # arXiv 2407.01445's code
        assert (config.temperature.rho, config.model.image_size) == (rho, 224)
        if loss.kind.normaliser == "global" and loss.kind.temperature != "learned":
            assert (loss.tau_min, loss.tau_max, loss.gamma, loss.tau) == (0.001, 0.05, 0.8, 0.01)
    elif name in ("clip-cc3m-tempnet-small", "clip-cc3m-noise-15-small", "clip-cc12m-tempnet-frozen-small"):
        assert config.temperature.rho < math.log(config.optimizer.batch_size - 1)
        assert config.model.freeze == (config.temperature.target_tau is None)


def test_the_contrastive_presets_cover_every_loss() -> None:
    assert {preset().temperature.loss for preset in clip.PRESETS.values()} | {"clip_fixed"} == set(LOSS_KINDS)


@pytest.mark.parametrize("name", sentences.PRESETS)
def test_a_preset_of_sentence_encoders_is_consistent(name: str) -> None:
    config = sentences.PRESETS[name]()
    assert config.run.name == name
    is_twin = config.data.train.startswith("data/sample")
    assert is_twin == (f"{name}-small" not in RUNS) == (not config.model.path)
    assert config.temperature.loss_config.kind.normaliser == ("global" if "tempnet" in name else "in_batch")


def test_declutr_carries_its_papers_numbers() -> None:
    config = sentences.PRESETS["declutr-base"]()
    data, optimizer = config.data, config.optimizer
    assert (data.num_anchors, data.num_positives, data.min_length) == (2, 2, 32)
    assert data.least_num_tokens == 2048
    assert (optimizer.batch_size, optimizer.learning_rate_base, optimizer.weight_decay) == (16, 5e-5, 0.1)
    assert (optimizer.decay, optimizer.warmup_share, optimizer.max_grad_norm) == ("linear", 0.1, 1.0)
    assert (config.temperature.loss, config.temperature.tau) == ("clip_fixed", 0.05)
    assert (config.objective.contrastive_weight, config.objective.mlm_weight, data.mask_share) == (1.0, 1.0, 0.15)


def test_the_longest_span_of_every_full_preset_fits_roberta(tmp_path: Path) -> None:
    """RoBERTa has 514 position embeddings, two of which padding reserves."""
    vocabulary = {token: number for number, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", "<mask>", "a"])}
    RobertaTokenizerFast(vocab=vocabulary, merges=[]).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path), needs_eos=False)
    settings = {"vocab_size": len(tokenizer), "max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1}
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    AutoModelForMaskedLM.from_config(AutoConfig.for_model("roberta", **settings, **sizes)).save_pretrained(tmp_path)
    for config in (preset() for preset in sentences.PRESETS.values()):
        if config.model.path:
            encoder = build_encoder(replace(config, model=replace(config.model, path=str(tmp_path))), tokenizer)
            longest = tokenizer("a" * config.data.max_length, return_tensors="pt")
            assert longest["input_ids"].shape == (1, 512)
            with torch.no_grad():
                assert encoder(**longest).logits.isfinite().all()
        else:  # of short spans; what is longer would be cut when the encoder is used
            assert num_positions(build_encoder(config, tokenizer).config) == 128


@pytest.mark.parametrize("name", classifiers.PRESETS)
def test_a_preset_of_classifiers_is_consistent(name: str) -> None:
    config = classifiers.PRESETS[name]()
    assert config.run.name == name
    grid = config.grid
    assert len(grid.settings) == (1 + 4 * 5 * 7 * 7 * 5 if "grid" in name else 2)
    assert grid.settings[0].name == "ce"
    assert (grid.seeds, grid.num_folds) == ((2, 16, 128, 2048), 5)
