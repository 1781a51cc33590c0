"""Test that a base model whose weights lie on a disk between calls is used as the same model in memory is."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tempnet import TempNet
from tempnet.devices import input_device, is_spread, move_base, offloaded_weights
from tempnet.inference import CachedFold, attach, can_fold, generate
from tempnet.loading import load_causal_lm
from tempnet.models.causal_lm import TemperatureCausalLM
from tempnet.models.output_head import find_output_head, output_weight
from tempnet.softmax.reference import TemperatureLossConfig
from tests.tempnet.tiny_language_models import PROMPTS, VOCABULARY, left_padded, make_base, make_tempnet

PARTS = {
    "gpt2": [*(f"transformer.{name}" for name in ("wte", "wpe", "h.0", "h.1", "ln_f")), "lm_head"],
    "llama": [*(f"model.{name}" for name in ("embed_tokens", "layers.0", "layers.1", "norm", "rotary_emb")), "lm_head"],
}
# architecture, and the parts that are on the disk
CASES = [
    pytest.param(("gpt2", ["h.1"]), id="one layer"),
    pytest.param(("gpt2", ["wte", "wpe", "h.0", "h.1", "ln_f", "lm_head"]), id="all, with a tied output weight"),
    pytest.param(("llama", ["embed_tokens", "layers.0"]), id="the input embeddings"),
    pytest.param(("llama", ["layers.1", "lm_head"]), id="the output layer"),
]


def device_map(architecture: str, on_disk: list[str]) -> dict[str, str | int]:
    return {part: "disk" if part.split(".", 1)[-1] in on_disk else "cpu" for part in PARTS[architecture]}


@pytest.fixture(params=CASES)
def models(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[PreTrainedModel, PreTrainedModel, TempNet]:
    """Return a model in memory, the same one with parts on the disk, and its TempNet."""
    architecture, on_disk = request.param
    make_base(architecture).save_pretrained(tmp_path)
    make_tempnet().save_pretrained(tmp_path / "tempnet")
    spread, network = load_causal_lm(tmp_path, device_map=device_map(architecture, on_disk))
    assert is_spread(spread)
    assert any(parameter.is_meta for parameter in spread.parameters()), "nothing is on the disk"
    return AutoModelForCausalLM.from_pretrained(tmp_path).eval(), spread, network


def test_logits_and_greedy_texts_are_those_of_the_whole_model(
    models: tuple[PreTrainedModel, PreTrainedModel, TempNet],
) -> None:
    whole, spread, _ = models
    assert move_base(spread, "cuda") is spread, "a spread model stays where it is"
    assert input_device(spread) == torch.device("cpu")
    inputs = left_padded(PROMPTS)
    with torch.no_grad():
        torch.testing.assert_close(spread(**inputs).logits, whole(**inputs).logits, atol=0, rtol=0)
    greedy = {"do_sample": False, "max_new_tokens": 6}
    assert spread.generate(**inputs, **greedy).tolist() == whole.generate(**inputs, **greedy).tolist()
    assert torch.equal(output_weight(spread)[0], whole.get_output_embeddings().weight)
    assert find_output_head(spread) == find_output_head(whole)
    offloaded = dict(offloaded_weights(spread))
    assert offloaded
    for name, parameter in spread.named_parameters(remove_duplicate=False):
        assert parameter.is_meta == (name in offloaded), "weights leave the memory again"


@pytest.mark.parametrize("shift", ["mean", "max"])
def test_temperatures_are_those_of_the_whole_model(
    models: tuple[PreTrainedModel, PreTrainedModel, TempNet], shift: str
) -> None:
    """A TempNet with the shift `max` cannot be folded, so that a hook reads the logits instead of the hidden state."""
    whole, spread, _ = models
    network = make_tempnet(input_shift=shift)
    assert can_fold(spread, network) == can_fold(whole, network) == (shift == "mean")
    drawn = []
    for base in (whole, spread):
        torch.manual_seed(0)
        drawn.append(generate(base, network, **left_padded(PROMPTS), max_new_tokens=6))
    assert torch.equal(drawn[0].sequences, drawn[1].sequences)
    torch.testing.assert_close(drawn[0].temperatures, drawn[1].temperatures, atol=1e-6, rtol=0)
    with torch.inference_mode(), attach(spread, network) as attached:
        spread(torch.tensor(PROMPTS[:1]))
    with torch.no_grad():
        expected = network(whole(torch.tensor(PROMPTS[:1])).logits[:, -1, :VOCABULARY])
    assert attached.last is not None
    torch.testing.assert_close(attached.last, expected, atol=1e-5, rtol=0)


def test_the_fold_and_the_loss_read_the_offloaded_output_weight(
    models: tuple[PreTrainedModel, PreTrainedModel, TempNet],
) -> None:
    whole, spread, network = models
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    ours, theirs = (CachedFold.of(base, network).temperatures(hidden) for base in (spread, whole))
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    inputs, config = torch.tensor(PROMPTS[:1]), TemperatureLossConfig(name="dro", rho=1.5)
    positions = torch.arange(inputs.shape[1]).unsqueeze(0)
    outputs = [
        TemperatureCausalLM(base, network, config, vocab_size=VOCABULARY, freeze_base=True)(
            inputs, positions, inputs.roll(-1, 1), with_statistics=True
        )
        for base in (spread, whole)
    ]
    for name in ("loss", "tau", "entropy", "logits"):
        torch.testing.assert_close(outputs[0][name], outputs[1][name], atol=1e-6, rtol=1e-6)


def test_weights_on_the_disk_that_hold_nan_are_said_to(tmp_path: Path) -> None:
    make_base("llama").save_pretrained(tmp_path)
    make_tempnet().save_pretrained(tmp_path / "tempnet")
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, :2] = math.nan
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"hold NaN: 2 of the 2048 numbers of model\.layers\.1\.mlp\.up_proj\.weight"):
        load_causal_lm(tmp_path, device_map=device_map("llama", ["layers.1", "lm_head"]))
