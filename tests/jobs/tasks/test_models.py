"""Tests that a user's saved model of any family is frozen, held in bfloat16 and folded, and that its TempNet trains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from jobs.engine.config import RunSection
from jobs.engine.worker_settings import WorkersSection
from jobs.tasks.language_model.config import (
    DataSection,
    LanguageModelConfig,
    ModelSection,
    TemperatureSection,
    with_rho,
)
from jobs.tasks.language_model.models import base_shapes, build_model
from pipelines.text.tokenization import load_tokenizer, train_bpe

WORDS = "a user brings a model of their own and asks which temperature suits every token of it"
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_bpe([WORDS] * 20, 280)


def save_model(directory: Path, architecture: str, tokenizer: PreTrainedTokenizerFast, *, tied: bool) -> None:
    torch.manual_seed(0)
    extra = {} if architecture == "gpt2" else {"intermediate_size": 64, "num_key_value_heads": 2}
    config = AutoConfig.for_model(
        architecture, vocab_size=len(tokenizer) + 24, tie_word_embeddings=tied, bos_token_id=0, eos_token_id=0,
        **SIZES, **extra,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@pytest.mark.parametrize(
    ("architecture", "tied"), [("gpt2", True), ("gpt_neox", False), ("llama", False), ("qwen2", True)]
)
@pytest.mark.parametrize(
    ("precision", "input_shift"),
    [("fp32", "none"), ("bf16", "none"), ("fp32", "mean"), ("bf16", "mean"), ("fp32", "max")],
)
def test_a_saved_model_is_frozen_and_its_tempnet_trains(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, architecture: str, tied: bool, precision: str, input_shift: str
) -> None:
    save_model(tmp_path / "model", architecture, tokenizer, tied=tied)
    config = LanguageModelConfig(
        run=RunSection(name="own", storage=str(tmp_path)),
        data=DataSection(train="unused", validation="unused", context_length=32),
        model=ModelSection(path=str(tmp_path / "model")),
        temperature=TemperatureSection(rho=None, hidden_size=16, num_prototypes=8, input_shift=input_shift),
    )
    assert config.tokenizer == config.model.path
    assert config.temperature.needs_calibration
    settings = replace(with_rho(config, 1.5), workers=WorkersSection(precision=precision))
    module = build_model(settings, load_tokenizer(config.tokenizer))
    assert module.freeze_base
    assert module.tempnet.config.input_shift == input_shift
    assert module.head is not None
    assert module.base.dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)
    ids = torch.tensor([tokenizer.encode(WORDS)])
    positions = torch.arange(ids.shape[1]).unsqueeze(0)
    optimizer = torch.optim.AdamW(module.tempnet.parameters(), lr=1e-2)
    losses = []
    for _ in range(10):
        output = module(ids, positions, ids.roll(-1, 1))
        output["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output["loss"].item())
    assert losses[-1] < losses[0]
    assert all(parameter.grad is None for parameter in module.base.parameters())


def test_a_model_that_cannot_keep_documents_apart_is_refused_before_it_is_loaded(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    AutoConfig.for_model("bloom", vocab_size=512, hidden_size=32, n_layer=2, n_head=4).save_pretrained(
        tmp_path
    )  # No weights are saved.
    tokenizer.save_pretrained(tmp_path)
    config = LanguageModelConfig(
        run=RunSection(name="own", storage=str(tmp_path)),
        data=DataSection(train="unused", validation="unused", context_length=32),
        model=ModelSection(path=str(tmp_path), attention="eager"),
        temperature=TemperatureSection(rho=1.5),
    )
    with pytest.raises(ValueError, match=r"'bloom': set attend_across_documents = True"):
        base_shapes(config, tokenizer)
    shapes = base_shapes(replace(config, data=replace(config.data, attend_across_documents=True)), tokenizer)
    assert all(parameter.is_meta for parameter in shapes.parameters())
