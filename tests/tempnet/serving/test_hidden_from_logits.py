"""Hidden states from logits: τ is that of the true hidden state, and a head that would be wrong is refused with figures."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tempnet import TempNet
from tempnet.inference import TemperatureLogitsProcessor, generate
from tempnet.models.output_head import OutputHead, StoredBase
from tempnet.serving.batch import BatchTemperatures
from tempnet.serving.hidden_from_logits import HiddenFromLogits, load_output_layer
from tests.tempnet.tiny_language_models import PROMPTS, left_padded, make_base, make_tempnet

VOCABULARY, NUM_LOGITS = 1000, 1024
MODELS = {
    "tied": ("gpt2", {}),
    "untied": ("llama", {}),
    "soft-cap": ("gemma2", {"final_logit_softcapping": 5.0}),
    "scale": ("cohere", {"logit_scale": 0.25}),
    "bias": ("phi", {"partial_rotary_factor": 0.5}),
}


def make_head(kind: str, **changes: Any) -> TempNet:
    return make_tempnet(VOCABULARY, kind=kind, noise=0.7, **changes)


def model(name: str, dtype: torch.dtype) -> PreTrainedModel:
    architecture, changes = MODELS[name]
    base = make_base(architecture, vocab_size=NUM_LOGITS, initializer_range=0.15, **changes)
    if name == "bias":
        torch.nn.init.normal_(base.get_output_embeddings().bias)
    return base.to(dtype)


@torch.no_grad()
def true_and_logits(base: PreTrainedModel, network: TempNet) -> tuple[Tensor, Tensor]:
    """Return τ (N,) of true hidden states, which a listener at the output layer sees, and the logits (N, V).

    Like `generate`, it takes logits without their rounding where they are products.
    """
    seen: list[Tensor] = []
    scale = getattr(base.config, "logit_scale", 1.0)
    handle = base.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    logits = base(torch.arange(1, 61).unsqueeze(0)).logits[0].float()
    handle.remove()
    state, layer = scale * seen[0][0], base.get_output_embeddings()
    is_product = layer.bias is None and getattr(base.config, "final_logit_softcapping", None) is None
    exact = state.float() @ layer.weight[:VOCABULARY].float().T if is_product else logits[:, :VOCABULARY]
    return network(exact, state), logits


@pytest.mark.parametrize("kind", ["logits", "hidden", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_tau_is_that_of_the_true_hidden_state(tmp_path: Path, name: str, dtype: torch.dtype, kind: str) -> None:
    base = model(name, dtype)
    base.save_pretrained(tmp_path)
    layer = load_output_layer(tmp_path)
    if kind == "logits" and name in ("soft-cap", "bias"):
        with pytest.raises(ValueError, match="a TempNet on logits alone reads all of them"):
            HiddenFromLogits(make_head(kind), layer)
        return
    shift = {} if kind == "hidden" else {"input_shift": "mean"}
    for changes in ({}, {"normalize_input": False, **shift}):
        network = make_head(kind, **changes)
        expected, logits = true_and_logits(base, network)
        assert expected.std() > 3e-3
        hidden = HiddenFromLogits(network, layer)
        error = (hidden.temperatures(logits) / expected - 1.0).abs().max()
        assert error < (1e-5 if dtype == torch.float32 else 1e-3)
        assert hidden.tau_error < (1e-5 if dtype == torch.float32 else 1e-2)
        if name != "soft-cap" and kind == "hidden":  # a constant that was added to all logits
            torch.testing.assert_close(hidden.temperatures(logits + 7.0), expected, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("kind", ["hidden", "both"])
def test_generate_needs_no_listener(kind: str) -> None:
    base, network = model("untied", torch.float32), make_head(kind)
    options = {**left_padded(PROMPTS), "max_new_tokens": 6, "do_sample": True, "top_k": 0, "pad_token_id": 0}
    processor = TemperatureLogitsProcessor(network, predict=HiddenFromLogits(network, base).temperatures)
    torch.manual_seed(3)
    sequences = base.generate(**options, logits_processor=[processor])
    torch.manual_seed(3)
    listened = generate(base, network, **options)
    assert listened.sequences.tolist() == sequences.tolist()
    torch.testing.assert_close(processor.temperatures, listened.temperatures, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("reads_all", [False, True])
def test_rows_have_a_tau_max_of_their_own_and_masked_ones_are_counted(reads_all: bool) -> None:
    base, network = model("tied", torch.float32), make_head("logits")
    expected, logits = true_and_logits(base, network)
    hidden = HiddenFromLogits(network, base)
    unread = set(range(VOCABULARY)) - set(hidden.index.tolist())
    logits[3, hidden.index[5]] = logits[4, min(unread)] = -math.inf  # by the server
    rows = BatchTemperatures(network, "cpu", None if reads_all else hidden)
    tau = rows.predict(logits, torch.where(torch.arange(60) % 2 == 0, 2.0, 1.1))
    expected[1::2] = (expected[1::2] - 0.001) * (1.1 - 0.001) / (2.0 - 0.001) + 0.001
    expected[3 : 4 + reads_all] = 1.0
    torch.testing.assert_close(tau, expected, rtol=1e-5, atol=0.0)
    assert int(rows.num_masked) == 1 + reads_all


@pytest.mark.parametrize(
    ("spread", "dtype", "message"),
    [
        (
            0.0,
            torch.float32,
            r"1000 logits do not determine the hidden state of 32 numbers: .* is (inf|\d\.\de\+\d\d)$",
        ),
        (
            1e-4,
            torch.bfloat16,
            r"error of τ .*, condition number .*e\+0[45].*bfloat16; at most 0\.01 is served.*float32",
        ),
    ],
    ids=["no rank", "ill-conditioned"],
)
def test_logits_that_do_not_determine_the_state_are_refused(spread: float, dtype: torch.dtype, message: str) -> None:
    weight = torch.randn(NUM_LOGITS, 32, generator=torch.Generator().manual_seed(0))
    weight[:, 20:] *= spread
    layer = StoredBase(weight.to(dtype), None, OutputHead(scale=1.0, soft_cap=None))
    with pytest.raises(ValueError, match=message):
        HiddenFromLogits(make_head("hidden"), layer)


def test_what_is_no_output_layer_is_named(tmp_path: Path) -> None:
    base = model("untied", torch.float32)
    with pytest.raises(ValueError, match="reads hidden states of 16 numbers, those of the base model have 32"):
        HiddenFromLogits(make_head("hidden", state_size=16), base)
    base.config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"holds no safetensors file with lm_head\.weight"):
        load_output_layer(tmp_path)
