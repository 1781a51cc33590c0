"""Test what a run makes of a user's saved model: how it is held and frozen, and what checkpoints and exports hold of it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from clip_support import make_dual_encoder, make_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from jobs.engine.checkpoint import SafeCheckpointEngine, frozen_names
from jobs.engine.config import RunSection, WorkersSection
from jobs.engine.fields import configuration_hash, with_fields
from jobs.tasks.dual_encoder.task import export_encoder
from jobs.tasks.language_model.config import DataSection, LanguageModelConfig, ModelSection, TemperatureSection
from jobs.tasks.language_model.data import refer_to_base
from jobs.tasks.language_model.models import attention_of, base_shapes, build_model
from jobs.tasks.language_model.task import export_model
from pipelines.text.tokenization import load_tokenizer, train_bpe
from tempnet.base_model import read_reference
from tempnet.contrastive.config import ContrastiveLossConfig
from tempnet.contrastive.losses import ContrastiveLoss
from tempnet.loading import load_causal_lm
from tempnet.models.dual_encoder import DualEncoder, TemperatureDualEncoder, load_training_temperature
from tempnet.models.packing import FLEX

WORDS = "a user brings a model of their own and asks which temperature suits every token of it"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_bpe([WORDS] * 20, 280)


def save_model(directory: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}
    config = AutoConfig.for_model("gpt2", vocab_size=len(tokenizer) + 24, bos_token_id=0, eos_token_id=0, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@pytest.fixture
def config(tmp_path: Path) -> LanguageModelConfig:
    return LanguageModelConfig(
        run=RunSection(name="own", storage=str(tmp_path)),
        data=DataSection(train="unused", validation="unused", context_length=32),
        model=ModelSection(path=str(tmp_path / "model")),
        temperature=TemperatureSection(rho=1.0, hidden_size=4, num_prototypes=3),
        workers=WorkersSection(precision="fp32"),
    )


def test_a_model_that_cannot_keep_documents_apart_is_refused_before_it_is_loaded(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, config: LanguageModelConfig
) -> None:
    bloom = AutoConfig.for_model("bloom", vocab_size=512, hidden_size=32, n_layer=2, n_head=4)
    bloom.save_pretrained(tmp_path / "model")  # There are no weights.
    tokenizer.save_pretrained(tmp_path / "model")
    config = with_fields(config, {"model.attention": "eager"})
    with pytest.raises(ValueError, match=r"'bloom': set attend_across_documents = True"):
        base_shapes(config, tokenizer)
    shapes = base_shapes(with_fields(config, {"data.attend_across_documents": True}), tokenizer)
    assert all(parameter.is_meta for parameter in shapes.parameters())


@pytest.mark.parametrize(
    ("architecture", "extra", "reason"),
    [
        ("gpt2", {"attn_pdrop": 0.0}, None),
        ("llama", {"num_key_value_heads": 1}, None),
        ("gpt2", {}, "attn_pdrop = 0.1"),
        ("llama", {"num_attention_heads": 4, "num_key_value_heads": 4}, "heads of 16 or more dimensions"),
        ("bloom", {"n_head": 2, "attention_dropout": 0.0}, "'bloom'"),
    ],
    ids=str,
)
def test_flex_attention_is_taken_where_the_base_supports_it_and_else_refused_by_name(
    config: LanguageModelConfig, architecture: str, extra: dict[str, object], reason: str | None
) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, **extra}
    settings = AutoConfig.for_model(architecture, bos_token_id=0, eos_token_id=0, pad_token_id=0, **sizes)
    assert attention_of(config, settings) == "sdpa"
    asked = with_fields(config, {"model.attention": "flex"})
    if reason is None:
        assert attention_of(asked, settings) == FLEX
        return
    with pytest.raises(ValueError, match=f"model.attention = .flex.: .*{reason}.*; choose auto, sdpa or eager"):
        attention_of(asked, settings)


def test_attention_that_cannot_be_had_is_refused_by_its_field_and_auto_is_the_run_that_sdpa_was(
    config: LanguageModelConfig,
) -> None:
    for changes, message in (
        (
            {"model.attention": "fast"},
            "model.attention = 'fast' must be 'auto' or 'sdpa' or 'flex' or 'flash' or 'eager'",
        ),
        ({"model.attention": "flex", "model.freeze": False}, "model.attention = 'flex' has no backward pass on CPUs"),
        ({"model.attention": "flash"}, "model.attention = 'flash' does not run on CPUs"),
        (
            {"model.attention": "flash", "workers.use_gpu": True, "workers.precision": "fp32"},
            "model.attention = 'flash' computes in half precision",
        ),
        ({"model.attention": "flex", "data.attend_across_documents": True}, "data.attend_across_documents = True"),
        ({"model.attention": "flex", "model.device_map": "auto"}, "model.device_map"),
    ):
        with pytest.raises(ValueError, match=message):
            with_fields(config, changes)
    hashes = [
        configuration_hash(with_fields(config, {"model.attention": value})) for value in ("auto", "sdpa", "eager")
    ]
    assert hashes[0] == hashes[1] != hashes[2]


def test_the_export_of_a_frozen_base_holds_the_tempnet_and_names_the_base(
    config: LanguageModelConfig, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    save_model(tmp_path / "model", tokenizer)
    module = build_model(config, load_tokenizer(config.tokenizer))
    export_model(module, config, is_first=True, base=refer_to_base(config))
    export = tmp_path / "own" / "export"
    assert not list(export.glob("*.safetensors"))
    base, network = load_causal_lm(export)
    whole = with_fields(config, {"run.export": str(tmp_path / "whole")})
    export_model(module, whole, is_first=True, base=None)
    same, other = load_causal_lm(tmp_path / "whole")
    assert network is not None
    assert other is not None
    ids = torch.arange(8).unsqueeze(0)
    assert torch.equal(base(ids).logits, same(ids).logits)
    assert torch.equal(network(base(ids).logits[..., :280]), other(same(ids).logits[..., :280]))
    AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    # An export as the base of another run stands for its own base.
    again = with_fields(config, {"model.path": str(export), "run.name": "again"})
    assert refer_to_base(again) == read_reference(export)
    build_model(again, load_tokenizer(again.tokenizer))


def test_a_checkpoint_leaves_out_a_frozen_weight_under_all_of_its_names(
    config: LanguageModelConfig, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """DeepSpeed would keep the output weight, which is tied to the input embedding."""
    save_model(tmp_path / "model", tokenizer)
    module = build_model(config, load_tokenizer(config.tokenizer))
    state = {"module": dict(module.state_dict()), "step": 1}
    assert "base.lm_head.weight" in state["module"]
    SafeCheckpointEngine(frozen_names(module)).save(state, str(tmp_path / "state.pt"))
    kept = SafeCheckpointEngine().load(str(tmp_path / "state.pt"))
    names = {name for name, value in kept["module"].items() if value.ndim == 2}
    assert names == {"tempnet.transform.0.weight", "tempnet.projection"}


@pytest.mark.parametrize(("loss", "expected"), [("clip", 0.05), ("clip_fixed", 0.07), ("temperature_free", None)])
def test_an_export_of_a_dual_encoder_holds_the_constant_temperature_of_its_loss(
    loss: str, expected: float | None, tmp_path: Path
) -> None:
    encoder = DualEncoder.from_pretrained(make_dual_encoder(tmp_path / "start"))
    module = TemperatureDualEncoder(encoder, ContrastiveLoss(ContrastiveLossConfig.for_name(loss)))
    if module.loss.learned is not None:
        module.loss.learned.log_tau.data.fill_(math.log(0.05))
    export_encoder(encoder, module.loss, make_tokenizer(), str(tmp_path / "export"))
    DualEncoder.from_pretrained(tmp_path / "export")
    found = load_training_temperature(tmp_path / "export")
    assert found is None if expected is None else found == pytest.approx(expected)
