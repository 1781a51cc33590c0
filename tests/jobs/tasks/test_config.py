"""Tests that every preset is complete, wrong values are named, and a run is recognised by what identifies it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jobs.engine.command_line import parse_preset
from jobs.engine.hardware import state_bytes_per_worker
from jobs.engine.identity import configuration_hash, differences, fixed_values, flatten
from jobs.tasks.base import resolve_paths
from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.language_model.models import build_tempnet, loss_config, resolve_rho
from jobs.tasks.presets.language_models import PRESETS
from tempnet.dro import check_rho

VOCABULARIES = {"gpt2": 50_257, "EleutherAI/pythia-160m": 50_277}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_consistent_and_its_rho_feasible(name: str) -> None:
    config = PRESETS[name]()
    assert config.run.name == name
    small = name.endswith("-small")
    vocabulary = 2048 if small else VOCABULARIES.get(config.data.tokenizer, 32_000)
    rho = resolve_rho(config, vocabulary)
    if name.startswith("frozen"):
        assert rho is None
        assert config.temperature.needs_calibration
        return
    assert rho is not None
    check_rho(rho, vocabulary)
    assert config.temperature.network_config(vocabulary, rho, 8).input_size == vocabulary
    assert (config.temperature.tau_min, config.temperature.tau_max) == (0.001, 2.0)
    if small:
        assert math.log(vocabulary) - rho == pytest.approx(config.temperature.target_entropy)
    else:
        assert config.temperature.rho == 10.0
        assert f"{name}-small" in PRESETS


def test_presets_carry_the_numbers_of_table_5() -> None:
    expected = {
        "gpt2-scratch": (320_000, 32, 0.1, 0.95),
        "gpt2-finetune": (50_000, 32, 0.1, 0.95),
        "llama1-7b-frozen": (10_000, 16, 0.1, 0.95),
        "llama2-7b-frozen": (30_000, 16, 0.01, 0.999),
        "llama2-13b-frozen": (30_000, 16, 0.01, 0.999),
        "llama2-chat-7b-frozen": (30_000, 16, 0.01, 0.999),
        "llama2-chat-13b-frozen": (30_000, 16, 0.01, 0.999),
        "llama2-chat-70b-frozen": (20_000, 16, 0.01, 0.999),
    }
    for name, row in expected.items():
        config = PRESETS[name]()
        settings = config.optimizer
        assert (config.run.num_steps, settings.batch_size, settings.weight_decay, settings.beta2) == row, name
        assert (settings.beta1, settings.epsilon, settings.warmup_share) == (0.9, 1e-8, 0.01)
        assert config.model.is_frozen == name.endswith("frozen")


EIGHT_BITS = ["--model.path=x", "--model.precision=int8", "--workers.precision=bf16"]


@pytest.mark.parametrize("name", [name for name in PRESETS if name.endswith("b-frozen")])
def test_a_gpu_has_room_for_its_part_of_a_frozen_base(name: str) -> None:
    config = PRESETS[name]()
    num_parameters = float(name.removesuffix("b-frozen").rpartition("-")[2]) * 1e9
    assert config.optimizer.batch_size % config.workers.num_workers == 0
    assert state_bytes_per_worker(0, num_parameters, config.workers) < 40e9  # This is half the memory of a large GPU.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimizer.batch-size", "15"], "optimizer.batch_size = 15 is not divisible by workers.num_workers = 2"),
        (["--optimizer.micro-batch-size", "3"], "not divisible by optimizer.micro_batch_size = 3"),
        (["--run.num-steps", "0"], "run.num_steps = 0 must be positive"),
        (["--run.name", "a/b"], "run.name = 'a/b' must be a plain file name"),
        (["--temperature.loss", "drro"], "temperature.loss = 'drro' is unknown: choose one of ce"),
        (["--temperature.target-entropy", "None"], "both None: ρ can be calibrated only on a model"),
        (["--temperature.rho", "3", "--temperature.target-entropy=4"], "target_entropy = 4.0: give one of them"),
        (
            ["--temperature.rho", "None", "--temperature.target_entropy", "None"],
            "both None: ρ can be calibrated only on a",
        ),
        (["--data.max-bad-share", "1.5"], "data.max_bad_share = 1.5 must lie in"),
        (["--optimizer.learning-rate-base", "-1"], "optimizer.learning_rate_base = -1.0 must be positive"),
        (["--optimizer.learning-rate-base", "inf"], "learning_rate_base = inf must be positive and finite"),
        (["--optimizer.max-grad-norm", "nan"], "optimizer.max_grad_norm = nan must not be negative"),
        (["--optimizer.beta1", "1"], "optimizer.beta1 = 1 must be below 1"),
        (["--run.seed", "-1"], "run.seed = -1 must not be negative"),
        (["--workers.num-threads", "-3"], "workers.num_threads = -3 must not be negative"),
        (["--validation.num-blocks", "-1"], "validation.num_blocks = -1 must not be negative"),
        (["--data.context-length", "1"], "data.context_length = 1 must be at least 2"),
        (["--model.freeze", "True"], "model.freeze = True needs model.path"),
        (["--model.precision", "int8"], "model.precision = int8 is for a frozen base (model.freeze)"),
        (["--model.path=x", "--model.precision=fp8", "--workers.precision=fp32"], "must be bf16, not fp32"),
        ([*EIGHT_BITS, "--workers.zero-stage=3"], "int8: weights in eight bits cannot be divided among workers by"),
        ([*EIGHT_BITS, "--model.whole-export"], "model.whole_export must be False, because an export has no"),
        (["--model.path=x", "--model.num-gpus=2"], "model.num_gpus = 2 must be 1, or more with workers.use_gpu and"),
        (["--optimizer.rest-share-tempnet", "1"], "optimizer.rest_share_tempnet = 1 leaves the TempNet no steps"),
        (
            ["--optimizer.rest-share-tempnet", "0.6", "--optimizer.warmup-share-tempnet", "0.5"],
            "optimizer.rest_share_tempnet = 0.6 leaves the TempNet no steps after its warm-up of 0.5",
        ),
        (["--model.num-heads", "7"], "not divisible by num_heads = 7"),
        (["--workers.zero-stage", "0", "--workers.offload-optimizer"], "needs workers.zero_stage 1, 2 or 3"),
        (["--tracking.max-model-gib", "-1"], "tracking.max_model_gib = -1 must not be negative"),
        (["--temperature.target-tau", "0.8", "--temperature.loss", "ce"], "choose temperature.loss dro"),
        (
            ["--temperature.target-tau", "0.8", "--temperature.loss", "ts_ce"],
            "target_tau = 0.8 steers the ρ of a robust",
        ),
        (["--temperature.target-tau", "2"], "target_tau = 2 must lie between τ₀ = 0.001 and τ_max = 2"),
        (
            ["--temperature.target-tau", "0.8", "--temperature.rho-gain", "0"],
            "temperature.rho_gain = 0.0 must be positive",
        ),
        (["--temperature.target-tau", "0.8", "--model.path", "x"], "on a frozen base the calibrated ρ is final"),
        (
            ["--temperature.loss", "distil"],
            "and distillation.teacher = '': the loss distil needs a teacher to learn from",
        ),
        (
            ["--distillation.teacher", "x"],
            "loss = 'dro' and distillation.teacher = 'x': the loss distil needs a teacher",
        ),
        (
            ["--temperature.loss", "distil", "--distillation.teacher", "x", "--workers.zero-stage", "3"],
            "workers.zero_stage = 3 divides the model's weights, which the loss distil reads in parts",
        ),
        (
            [
                "--temperature.loss=distil",
                "--distillation.teacher=x",
                "--temperature.rho=None",
                "--temperature.target-entropy=None",
            ],
            "distillation.keep = 'entropy' needs temperature.target_entropy or temperature.rho",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_values_are_refused_with_their_name(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse_preset(PRESETS, ["gpt2-scratch-small", *arguments], job="train_lm", purpose="")
    assert exit_info.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
    assert said.count("\n") == 1


def test_the_proper_score_needs_no_rho() -> None:
    arguments = ["frozen-small", "--model.path", "base", "--temperature.loss"]
    config, _ = parse_preset(PRESETS, [*arguments, "proper"], job="train_lm", purpose="")
    assert not config.temperature.needs_calibration
    assert loss_config(config, 100).rho == 0.0
    assert 0.5 < build_tempnet(config, 100, 0.0, state_size=8)(torch.zeros(1, 100)).item() < 1.5
    config, _ = parse_preset(PRESETS, [*arguments, "dro"], job="train_lm", purpose="")
    assert config.temperature.needs_calibration


@pytest.mark.parametrize(
    ("preset", "arguments", "expected"),
    [
        ("gpt2-scratch-small", ["--temperature.rho", "3"], (3.0, None)),
        ("gpt2-scratch-small", ["--temperature.rho=3", "--temperature.target_entropy=None"], (3.0, None)),
        ("gpt2-scratch-small", ["--temperature.rho", "None"], (None, 4.9)),
        ("gpt2-scratch", ["--temperature.target-entropy", "4"], (None, 4.0)),
        ("gpt2-scratch", ["--temperature.target_entropy=None"], (10.0, None)),
    ],
)
def test_a_given_rho_or_target_entropy_takes_the_place_of_the_other_one_of_the_preset(
    preset: str, arguments: list[str], expected: tuple[float | None, float | None]
) -> None:
    config, _ = parse_preset(PRESETS, [preset, *arguments], job="train_lm", purpose="")
    assert (config.temperature.rho, config.temperature.target_entropy) == expected


def test_the_sizes_of_a_random_model_are_not_checked_if_a_path_is_given() -> None:
    words = ["gpt2-scratch-small", "--model.path", "x", "--model.num-heads", "7"]
    config, _ = parse_preset(PRESETS, words, job="train_lm", purpose="")
    assert config.model.hidden_size % config.model.num_heads


def test_misspelt_presets_and_fields_are_answered_with_near_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_preset(PRESETS, ["gpt2-scrath-small"], job="train_lm", purpose="")
    assert "did you mean gpt2-scratch-small" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse_preset(PRESETS, ["gpt2-scratch-small", "--temperature.roh", "3"], job="train_lm", purpose="")
    assert "--temperature.rho" in capsys.readouterr().err


def test_values_given_on_the_command_line_arrive() -> None:
    config, dry_run = parse_preset(
        PRESETS,
        ["gpt2-scratch-small", "--workers.zero-stage", "3", "--temperature.target-entropy", "3.5", "--dry-run"],
        job="train_lm",
        purpose="",
    )
    assert dry_run
    assert (config.workers.zero_stage, config.temperature.target_entropy) == (3, 3.5)
    untouched = replace(
        config,
        workers=replace(config.workers, zero_stage=2),
        temperature=PRESETS["gpt2-scratch-small"]().temperature,
    )
    assert untouched == PRESETS["gpt2-scratch-small"]()


def test_the_help_lists_every_preset(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse_preset(PRESETS, ["--help"], job="train_lm", purpose="Train.")
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    for name, preset in PRESETS.items():
        assert f"{name} " in text
        assert (preset.__doc__ or "").splitlines()[0] in text


def changed(config: LanguageModelConfig, section: str, **values: object) -> LanguageModelConfig:
    return replace(config, **{section: replace(getattr(config, section), **values)})


def test_a_run_is_identified_by_what_changes_its_result() -> None:
    config = PRESETS["gpt2-scratch-small"]()
    for other in (changed(config, "run", log_every=7), changed(config, "tracking", uri="http://localhost:1")):
        assert configuration_hash(other) == configuration_hash(config)
    other = changed(config, "optimizer", learning_rate_base=1e-3)
    assert configuration_hash(other) != configuration_hash(config)
    assert differences(fixed_values(config), fixed_values(other)) == ["optimizer.learning_rate_base: 0.002 → 0.001"]


def test_local_paths_become_absolute_and_hub_names_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    config = changed(PRESETS["gpt2-scratch"](), "data", train="text", validation="s3://bucket/x")
    values = flatten(resolve_paths(config))
    assert values["data.train"] == str(tmp_path / "text")
    assert values["data.validation"] == "s3://bucket/x"
    assert values["data.tokenizer"] == "gpt2"
    assert values["run.storage"] == str(tmp_path / "runs")


def test_a_relative_storage_inside_an_uploaded_working_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploaded = tmp_path / "runtime_resources" / "working_dir_files"
    uploaded.mkdir(parents=True)
    monkeypatch.chdir(uploaded)
    monkeypatch.delenv("TEMPNET_HOME", raising=False)
    with pytest.raises(ValueError, match=r"run\.storage = 'runs' is relative to the uploaded working directory"):
        _ = PRESETS["gpt2-scratch"]().run.resolved_storage
    monkeypatch.setenv("TEMPNET_HOME", str(tmp_path))
    assert PRESETS["gpt2-scratch"]().run.resolved_storage == str(tmp_path)


def test_a_student_that_begins_anew_takes_the_tokenizer_of_its_teacher() -> None:
    words = ["gpt2-scratch-small", "--temperature.loss=distil", "--distillation.teacher=t"]
    for more, expected in (
        (["--data.tokenizer="], "t"),
        (["--data.tokenizer=own"], "own"),
        (["--data.tokenizer=", "--model.path=m", "--model.freeze=False"], "m"),
    ):
        config, _ = parse_preset(PRESETS, [*words, *more], job="train_lm", purpose="")
        assert config.tokenizer == expected
