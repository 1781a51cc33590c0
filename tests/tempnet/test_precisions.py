"""Test that a model whose weights are in eight bits predicts what its rounded weights predict, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tempnet.devices import bytes_saved, constant_weights, hold_constant, loading_options
from tempnet.inference import attach, can_fold
from tempnet.loading import load_causal_lm
from tests.tempnet.tiny_language_models import PROMPTS, VOCABULARY, make_base, make_tempnet


def largest_errors(weight: torch.Tensor, precision: str) -> torch.Tensor:
    """Return how far eight bits with a scale for each row, and a product in bfloat16, may be from a weight (out, in)."""
    step = weight.abs().amax(-1, keepdim=True)
    step = step / 127 / 2 if precision == "int8" else (weight.abs() * 2.0**-4).maximum(step / 448 * 2.0**-10)
    return 1.02 * step + weight.abs() * 2.0**-7


def bytes_of(weight: torch.Tensor) -> int:
    parts = [weight] if type(weight) is torch.nn.Parameter else [weight.qdata, weight.scale]
    return sum(part.nbytes for part in parts)


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_logits_and_temperatures_are_those_of_the_rounded_weights(precision: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="torchao, the extra `quantised`, is not installed")
    make_base("llama", initializer_range=0.1).save_pretrained(tmp_path)
    make_tempnet().save_pretrained(tmp_path / "tempnet")
    base, network = load_causal_lm(tmp_path, dtype=precision)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    held = 0
    inputs = torch.tensor(PROMPTS[:1])
    with torch.no_grad():
        for name, part in expected.named_modules():
            if isinstance(part, torch.nn.Linear) and name != "lm_head":
                ours = base.get_submodule(name).weight
                held += ours.qdata.nbytes
                found, exact = ours.dequantize().float(), part.weight.float()
                assert ((found - exact).abs() <= largest_errors(exact, precision)).all(), name
                part.weight.copy_(found)
        logits, reference = (model(inputs).logits.float() for model in (base, expected))
    whole, ours = (sum(map(bytes_of, model.parameters())) for model in (expected, base))
    assert ours == whole - bytes_saved(expected)
    assert held == 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64), "a byte for each weight of the linear layers"
    assert (logits - reference).norm() < 0.03 * reference.norm()
    assert torch.equal(base.get_output_embeddings().weight, expected.get_output_embeddings().weight)
    assert can_fold(base, network)
    num_weights = sum(weight.numel() for weight in base.parameters())
    hold_constant(base)
    constant = list(constant_weights(base))
    assert num_weights == sum(weight.numel() for weight in [*base.parameters(), *constant])
    assert sum(weight.numel() for weight in constant) == held
    with torch.no_grad(), attach(base, network) as attached:
        assert torch.equal(base(inputs).logits.float(), logits)
    assert attached.last is not None
    torch.testing.assert_close(attached.last, network(reference[:, -1, :VOCABULARY]), atol=0.02, rtol=0.02)


def test_nan_is_found_in_eight_bits_too_and_a_model_without_linear_layers_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="torchao, the extra `quantised`, is not installed")
    make_base("llama").save_pretrained(tmp_path)
    make_tempnet().save_pretrained(tmp_path / "tempnet")
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 2] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for precision in ("int8", "fp8"):
        with pytest.raises(ValueError, match=r"hold NaN: .* of the 2048 numbers of model\.layers\.1\.mlp\.up_proj"):
            load_causal_lm(tmp_path, dtype=precision)
    make_base("gpt2").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a GPT2LMHeadModel, which has no linear layers that could be held in"):
        load_causal_lm(tmp_path, dtype="int8")


def test_other_precisions_are_those_of_pytorch_and_torchao_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, dtype in {"fp32": torch.float32, "bf16": torch.bfloat16, "float16": torch.float16}.items():
        assert loading_options(name) == loading_options(dtype) == {"dtype": dtype}
    for name in ("int4", "nn"):
        with pytest.raises(
            ValueError, match=f"precision = '{name}' is neither a floating-point dtype of PyTorch nor one of int8"
        ):
            loading_options(name)
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ValueError, match="precision = int8 needs torchao, which is not installed: pip install"):
        loading_options("int8")
