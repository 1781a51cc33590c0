"""Tests what a run on a frozen base leaves: a checkpoint and an export without the base, which is named and recognised."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from jobs.engine.checkpoint import SafeCheckpointEngine, frozen_names
from jobs.engine.config import RunSection
from jobs.engine.worker_settings import WorkersSection
from jobs.tasks.language_model.base import refer_to_base
from jobs.tasks.language_model.config import DataSection, LanguageModelConfig, ModelSection, TemperatureSection
from jobs.tasks.language_model.export import export_model
from jobs.tasks.language_model.models import build_model
from pipelines.storage import write_json
from pipelines.text.tokenization import load_tokenizer, train_bpe
from tempnet.base_model import BASE_FILE, read_reference
from tempnet.loading import load_causal_lm

WORDS = "a user brings a model of their own and asks which temperature suits every token of it"


def save_base(directory: Path, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=300, n_positions=64, n_embd=32, n_layer=1, n_head=2, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_bpe([WORDS] * 20, 280)


@pytest.fixture
def config(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> LanguageModelConfig:
    save_base(tmp_path / "model", tokenizer, seed=0)
    return LanguageModelConfig(
        run=RunSection(name="own", storage=str(tmp_path)),
        data=DataSection(train="unused", validation="unused", context_length=32),
        model=ModelSection(path=str(tmp_path / "model")),
        temperature=TemperatureSection(rho=1.0, hidden_size=4, num_prototypes=3),
        workers=WorkersSection(precision="fp32"),
    )


def test_the_export_holds_the_tempnet_and_names_the_base(config: LanguageModelConfig, tmp_path: Path) -> None:
    module = build_model(config, load_tokenizer(config.tokenizer))
    export_model(module, config, is_first=True, base=refer_to_base(config))
    export = tmp_path / "own" / "export"
    assert not list(export.glob("*.safetensors"))
    base, network = load_causal_lm(export)
    whole = replace(config, run=replace(config.run, export=str(tmp_path / "whole")))
    export_model(module, whole, is_first=True, base=None)
    same, other = load_causal_lm(tmp_path / "whole")
    ids = torch.arange(8).unsqueeze(0)
    assert torch.equal(base(ids).logits, same(ids).logits)
    assert torch.equal(network(base(ids).logits[..., :280]), other(same(ids).logits[..., :280]))
    AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    # An export as the base of another run stands for its own base.
    again = replace(config, model=replace(config.model, path=str(export)), run=replace(config.run, name="again"))
    assert refer_to_base(again) == read_reference(export)
    build_model(again, load_tokenizer(again.tokenizer))


def test_a_run_does_not_continue_on_another_base(
    config: LanguageModelConfig, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    reference = refer_to_base(config)
    (tmp_path / "own").mkdir()
    write_json(str(tmp_path / "own" / BASE_FILE), {"path": reference.path, "digest": reference.digest})
    assert refer_to_base(config) == reference
    save_base(tmp_path / "model", tokenizer, seed=1)
    with pytest.raises(
        ValueError, match=r"model\.path = .*run\.name = 'own' cannot continue: the base model .* digest"
    ):
        refer_to_base(config)


def test_a_checkpoint_leaves_out_a_frozen_weight_under_all_of_its_names(
    config: LanguageModelConfig, tmp_path: Path
) -> None:
    """DeepSpeed would keep the output weight, which is tied to the input embedding."""
    module = build_model(config, load_tokenizer(config.tokenizer))
    state = {"module": dict(module.state_dict()), "step": 1}
    assert "base.lm_head.weight" in state["module"]
    SafeCheckpointEngine(frozen_names(module)).save(state, str(tmp_path / "state.pt"))
    kept = SafeCheckpointEngine().load(str(tmp_path / "state.pt"))
    names = {name for name, value in kept["module"].items() if value.ndim == 2}
    assert names == {"tempnet.transform.0.weight", "tempnet.projection"}


def test_activation_checkpointing_of_a_frozen_base_is_refused(config: LanguageModelConfig) -> None:
    with pytest.raises(
        ValueError, match=r"workers\.activation_checkpointing = True saves the memory of a base model's"
    ):
        replace(config, workers=replace(config.workers, activation_checkpointing=True))
