"""Tests that presets of sentence encoders are complete, and that wrong values are named before anything starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForMaskedLM, RobertaTokenizerFast

from jobs.engine.command_line import parse_preset
from jobs.engine.contrastive import check_sizes
from jobs.tasks.base import resolve_paths
from jobs.tasks.presets.sentences import PRESETS
from jobs.tasks.sentence_encoder.config import SentenceConfig
from jobs.tasks.sentence_encoder.models import build_encoder
from jobs.tasks.sentence_encoder.plan import make_plan
from pipelines.text.tokenization import load_tokenizer, train_bpe, train_wordpiece

TEXT = " ".join(f"word{number}" for number in range(40))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sentences")
    for split in ("train", "validation"):
        (directory / split).mkdir()
        (directory / split / "a.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    train_wordpiece([TEXT], 200).save_pretrained(directory / "tokenizer")
    train_bpe([TEXT], 300).save_pretrained(directory / "bpe")
    return directory


def small(data: Path, *arguments: str) -> SentenceConfig:
    paths = [f"--data.{name}={data / name}" for name in ("train", "validation", "tokenizer")]
    config, _ = parse_preset(PRESETS, ["declutr-small-small", *paths, *arguments], job="train_sentences", purpose="")
    return config


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_consistent(name: str) -> None:
    config = PRESETS[name]()
    assert config.run.name == name
    is_twin = config.data.train.startswith("data/sample")
    assert is_twin == (f"{name}-small" not in PRESETS) == (not config.model.path)
    assert config.temperature.loss_config.kind.normaliser == ("global" if "tempnet" in name else "in_batch")


def test_presets_carry_the_papers_numbers() -> None:
    config = PRESETS["declutr-base"]()
    data, optimizer = config.data, config.optimizer
    assert (data.num_anchors, data.num_positives, data.min_length) == (2, 2, 32)
    assert data.least_num_tokens == 2048
    assert (optimizer.batch_size, optimizer.learning_rate_base, optimizer.weight_decay) == (16, 5e-5, 0.1)
    assert (optimizer.decay, optimizer.warmup_share, optimizer.max_grad_norm) == ("linear", 0.1, 1.0)
    assert (config.temperature.loss, config.temperature.tau) == ("clip_fixed", 0.05)
    assert (config.objective.contrastive_weight, config.objective.mlm_weight, data.mask_share) == (1.0, 1.0, 0.15)


@pytest.fixture(scope="module")
def roberta(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns a tiny RoBERTa with its special tokens and its 514 position embeddings, two of which padding reserves."""
    directory = tmp_path_factory.mktemp("roberta")
    vocabulary = {token: number for number, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", "<mask>", "a"])}
    tokenizer = RobertaTokenizerFast(vocab=vocabulary, merges=[])
    tokenizer.save_pretrained(directory)
    config = AutoConfig.for_model(
        "roberta",
        vocab_size=len(tokenizer),
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        max_position_embeddings=514,
        type_vocab_size=1,
        pad_token_id=1,
    )
    AutoModelForMaskedLM.from_config(config).save_pretrained(directory)
    return str(directory)


@pytest.mark.parametrize("name", [name for name in PRESETS if PRESETS[name]().model.path])
def test_the_longest_span_of_a_full_preset_fits_roberta(name: str, roberta: str) -> None:
    config = PRESETS[name]()
    tokenizer = load_tokenizer(roberta, needs_eos=False)
    encoder = build_encoder(replace(config, model=replace(config.model, path=roberta)), tokenizer)
    longest = tokenizer("a" * config.data.max_length, return_tensors="pt")
    assert longest["input_ids"].shape == (1, 512)
    with torch.no_grad():
        assert encoder(**longest).logits.isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data.num-anchors", "0"], "data.num_anchors = 0 must be positive"),
        (["--data.min-length", "40"], "data.max_length = 32 is below min_length = 40"),
        (["--data.min-num-tokens", "95"], "data.min_num_tokens = 95 is below (num_anchors + 1)·max_length = 96"),
        (["--data.mask-share", "1.2"], "data.mask_share = 1.2 must lie in [0, 1]"),
        (["--temperature.loss", "cyclip"], "temperature.loss = 'cyclip' is for images with captions"),
        (["--temperature.loss", "sogclr_given"], "temperature.loss = 'sogclr_given' is for images with captions"),
        (["--temperature.input-shift", "max"], "temperature.input_shift = max shifts logits"),
        (["--temperature.loss", "nt_xent"], "temperature.loss = 'nt_xent' is unknown: choose one of clip"),
        (["--objective.contrastive-weight", "0", "--objective.mlm-weight", "0"], "leaves nothing to learn"),
        (["--objective.mlm-weight", "-1"], "objective.mlm_weight = -1.0 must not be negative"),
        (
            ["--optimizer.micro-batch-size", "4"],
            "optimizer.micro_batch_size = 4: a contrastive loss compares all samples",
        ),
        (["--workers.zero-stage", "3"], "workers.zero_stage = 3"),
        (
            ["--temperature.loss", "tempnet", "--temperature.target-tau", "0.02"],
            "target_tau = 0.02: ρ is steered for language models and for images with captions",
        ),
        (["--validation.num-documents", "-1"], "validation.num_documents = -1 must not be negative"),
        (["--model.hidden-size", "130"], "model.hidden_size = 130 is not divisible by model.num_heads = 4"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_values_are_refused_with_their_name(
    data: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        small(data, *arguments)
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
    assert said.count("\n") == 1


def test_a_plan_says_what_will_happen(data: Path) -> None:
    text = make_plan(small(data, "--temperature.loss", "tempnet", "--temperature.rho", "3")).describe()
    for part in ("1 × tempnet, ρ = 3 + 1 × MLM", "2 anchors of 8 to 32 tokens", "each anchor against 126 others"):
        assert part in text


def test_what_does_not_fit_together_is_refused_before_ray(data: Path, tmp_path: Path) -> None:
    config = small(data)
    with pytest.raises(FileNotFoundError, match=r"data\.train"):
        make_plan(replace(config, data=replace(config.data, train=str(data / "nothing"))))
    with pytest.raises(
        ValueError, match=r"data\.tokenizer .* has no pad_token: use the tokenizer of a masked language model"
    ):
        make_plan(replace(config, data=replace(config.data, tokenizer=str(data / "bpe"))))
    settings = {
        "vocab_size": 500,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 8,
    }
    model = AutoConfig.for_model("roberta", **settings, max_position_embeddings=30, pad_token_id=0)
    AutoModelForMaskedLM.from_config(model).save_pretrained(tmp_path / "short")
    with pytest.raises(ValueError, match=r"32 with 2 special tokens is more than the 29 positions .* at most 27"):
        make_plan(replace(config, model=replace(config.model, path=str(tmp_path / "short"))))
    with pytest.raises(ValueError, match=r"model\.path = .*nothing' is missing"):
        make_plan(replace(config, model=replace(config.model, path=str(tmp_path / "nothing"))))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"model\.path = .*empty' holds no encoder with an MLM head"):
        make_plan(replace(config, model=replace(config.model, path=str(tmp_path / "empty"))))


STREAMING = ["--data.prepare", "streaming"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--temperature.loss", loss],
            rf"temperature\.loss = '{loss}' keeps state of every document, .* data\.prepare = 'streaming' .*: "
            r"choose one of clip, clip_fixed, temperature_free, tempnet_in_batch, or data\.prepare ahead",
        )
        for loss in ("sogclr", "isogclr", "tempnet")
    ]
    + [
        (
            ["--temperature.loss", "tempnet_in_batch"],
            r"temperature\.projection = True .* data\.prepare = 'streaming' .*: choose temperature\.projection False, or",
        ),
        (
            ["--optimizer.batch-size", "1", "--workers.num-workers", "1", "--data.num-anchors", "1"],
            r"optimizer\.batch_size = 1: the loss clip_fixed needs a global batch of at least 2 pairs, not 1",
        ),
    ],
)
def test_what_needs_all_documents_first_is_refused_with_streaming(
    data: Path, arguments: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(small(data, *STREAMING, *arguments))


def test_what_needs_no_documents_first_can_be_streamed(data: Path) -> None:
    without_projection = ["--temperature.loss", "tempnet_in_batch", "--temperature.no-projection"]
    only_mlm = ["--temperature.loss", "sogclr", "--objective.contrastive-weight", "0"]
    for arguments in ([], ["--temperature.loss", "clip"], without_projection, only_mlm):
        ahead, streaming = (make_plan(small(data, *more, *arguments)) for more in ([], STREAMING))
        assert streaming.data_cpus == ahead.data_cpus + 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data.num-parts-ahead", "0"], "data.num_parts_ahead = 0 must be positive"),
        (["--data.prepare-cpus", "-1"], "data.prepare_cpus = -1.0 must be positive"),
        (["--data.reader-resources", "reader"], "data.reader_resources"),
    ],
)
def test_wrong_values_of_streaming_are_refused(
    data: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        small(data, *STREAMING, *arguments)
    assert message in capsys.readouterr().err


def test_paths_are_made_absolute_for_the_workers(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(data)
    config, _ = parse_preset(
        PRESETS,
        [
            "declutr-small-small",
            "--data.train",
            "train",
            "--data.validation",
            "validation",
            "--data.tokenizer",
            "tokenizer",
        ],
        job="train_sentences",
        purpose="",
    )
    found = resolve_paths(config)
    assert (found.data.train, found.data.tokenizer) == (str(data / "train"), str(data / "tokenizer"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--optimizer.batch-size", "302"],
            r"optimizer\.batch_size = 302 is more than the 300 documents of data\.train",
        ),
        (["--temperature.rho", "5.8"], r"temperature\.rho = 5\.8 is not below log\(N − 1\)"),
        (
            ["--temperature.num-prototypes", "301"],
            r"temperature\.num_prototypes = 301 is more than the 300 training doc",
        ),
    ],
)
def test_what_the_documents_are_too_few_for_is_refused(data: Path, arguments: list[str], message: str) -> None:
    config = small(data, "--temperature.loss", "tempnet", "--temperature.rho", "3", *arguments)
    batch = {"num_pairs_per_batch": config.num_pairs_per_batch, "noun": "documents"}
    with pytest.raises(ValueError, match=message):
        check_sizes(config, config.temperature, num_samples=300, **batch)
    check_sizes(config, config.temperature, num_samples=400, **batch)
