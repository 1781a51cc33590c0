"""Tests that an export which only refers to its base model loads as a whole one does, and refuses any other base."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tempnet import TempNet, TempNetConfig
from tempnet.base_model import BASE_FILE, BaseReference, base_digest, find_base, load_base
from tempnet.loading import load_causal_lm


def save_base(directory: Path, seed: int = 0) -> None:
    torch.manual_seed(seed)
    GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=16, n_embd=8, n_layer=1, n_head=2)).save_pretrained(directory)


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """Write a base model and, beside it, an export that refers to it."""
    save_base(tmp_path / "base")
    export = tmp_path / "export"
    TempNet(TempNetConfig.for_logits(40, rho=1.0, hidden_size=4, num_prototypes=3)).save_pretrained(export / "tempnet")
    reference = BaseReference(path=str(tmp_path / "base"), digest=base_digest(str(tmp_path / "base")))
    reference.save(export)
    return export


def test_the_base_is_loaded_from_where_the_export_says(export: Path, tmp_path: Path) -> None:
    base, network = load_causal_lm(export)
    whole = GPT2LMHeadModel.from_pretrained(tmp_path / "base")
    assert all(torch.equal(base.state_dict()[name], value) for name, value in whole.state_dict().items())
    assert network.config.input_size == 40
    assert find_base(tmp_path / "base") == (str(tmp_path / "base"), None)
    assert sum(file.stat().st_size for file in export.rglob("*")) < 20_000


def test_a_tokenizer_that_is_added_does_not_change_the_base(export: Path, tmp_path: Path) -> None:
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    assert load_base(export).config.vocab_size == 40


def test_another_base_of_the_same_name_is_refused(export: Path, tmp_path: Path) -> None:
    save_base(tmp_path / "base", seed=1)
    with pytest.raises(ValueError, match="is not the one that its TempNet was trained on"):
        load_causal_lm(export)


def test_a_missing_base_and_a_damaged_reference_are_refused(export: Path, tmp_path: Path) -> None:
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match=f"write its new place into .*{BASE_FILE}"):
        load_base(export)
    # A caller may know where it is.
    assert load_base(export, fetch=lambda path: path.replace("/base", "/elsewhere")).config.vocab_size == 40
    for content in ("", "[]", '{"path": "a"}'):
        (export / BASE_FILE).write_text(content)
        with pytest.raises(ValueError, match="is damaged: it must hold path and digest"):
            load_base(export)
