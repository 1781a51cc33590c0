"""Tests of tempnet.weights: everything that loads a model refuses truncated weights with one clear line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tempnet.loading import load_causal_lm, load_tempnet
from tempnet.models.towers import load_tower
from tempnet.network import TempNet
from tempnet.network_config import TempNetConfig
from tempnet.weights import check_weight_files

LOADERS: dict[str, Callable[[Path], object]] = {
    "check": check_weight_files,
    "causal language model": load_causal_lm,
    "text encoder": lambda path: load_tower(path, "text"),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = AutoConfig.for_model("gpt2", vocab_size=40, n_embd=8, n_layer=1, n_head=2, n_positions=16)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    TempNet(TempNetConfig.released(40, hidden_size=8, num_prototypes=4)).save_pretrained(tmp_path / "tempnet")
    return tmp_path


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("num_bytes", [0, 5, 100, -1])
def test_weights_that_are_cut_are_refused_in_one_line(model: Path, name: str, num_bytes: int) -> None:
    load_causal_lm(model)
    check_weight_files(model)
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:num_bytes])
    with pytest.raises(
        ValueError, match=r"model\.safetensors \(\d+ bytes\) is cut or corrupt: .*; copy or export it"
    ) as e:
        LOADERS[name](model)
    assert "\n" not in str(e.value)


def test_a_tempnet_that_is_cut_is_refused(model: Path) -> None:
    file = model / "tempnet" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"tempnet/model\.safetensors \(\d+ bytes\) is cut"):
        load_tempnet(model)


def test_a_hub_name_is_passed_over() -> None:
    check_weight_files("owner/name")
