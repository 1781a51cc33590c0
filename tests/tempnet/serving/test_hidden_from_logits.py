"""Hidden states from logits: τ is that of the true hidden state, and a head that would be wrong is refused with figures."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tempnet import TempNet, TempNetConfig
from tempnet.inference import TemperatureLogitsProcessor, generate
from tempnet.models.output_head import OutputHead, StoredBase
from tempnet.serving.batch import BatchTemperatures
from tempnet.serving.hidden_from_logits import HiddenFromLogits, load_output_layer
from tests.tempnet.tiny_language_models import PROMPTS, left_padded, make_base

VOCABULARY, NUM_LOGITS = 1000, 1024
MODELS = {
    "tied": ("gpt2", {}),
    "untied": ("llama", {}),
    "soft-cap": ("gemma2", {"final_logit_softcapping": 5.0}),
    "scale": ("cohere", {"logit_scale": 0.25}),
    "bias": ("phi", {"partial_rotary_factor": 0.5}),
}


def make_head(with_logits: bool, state_size: int = 32, **changes: object) -> TempNet:
    torch.manual_seed(1)
    config = TempNetConfig.for_hidden(
        VOCABULARY, state_size, with_logits=with_logits, rho=1.5, hidden_size=16, num_prototypes=8, **changes
    )
    network = TempNet(config)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.7 * torch.randn_like(parameter))
    return network.eval()


def model(name: str, dtype: torch.dtype) -> PreTrainedModel:
    architecture, changes = MODELS[name]
    base = make_base(architecture, vocab_size=NUM_LOGITS, initializer_range=0.15, **changes)
    if name == "bias":
        torch.nn.init.normal_(base.get_output_embeddings().bias)
    return base.to(dtype)


@torch.no_grad()
def true_and_logits(base: PreTrainedModel, network: TempNet) -> tuple[Tensor, Tensor]:
    """Return τ (N,) of true hidden states, which a listener at the output layer sees, and the logits (N, V)."""
    seen: list[Tensor] = []
    scale = getattr(base.config, "logit_scale", 1.0)
    handle = base.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    logits = base(torch.arange(1, 61).unsqueeze(0)).logits[0].float()
    handle.remove()
    return network(logits[:, :VOCABULARY], scale * seen[0][0]), logits


@pytest.mark.parametrize("with_logits", [False, True], ids=["hidden", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_tau_is_that_of_the_true_hidden_state(tmp_path: Path, name: str, dtype: torch.dtype, with_logits: bool) -> None:
    base = model(name, dtype)
    base.save_pretrained(tmp_path)
    layer = load_output_layer(tmp_path)
    for changes in (
        {},
        {"normalize_input": False, "input_shift": "mean"} if with_logits else {"normalize_input": False},
    ):
        network = make_head(with_logits, **changes)
        expected, logits = true_and_logits(base, network)
        assert expected.std() > 3e-3
        hidden = HiddenFromLogits(network, layer)
        error = (hidden.temperatures(logits) / expected - 1.0).abs().max()
        assert error < (1e-5 if dtype == torch.float32 else 1e-3)
        assert hidden.tau_error < (1e-5 if dtype == torch.float32 else 1e-2)
        if name != "soft-cap":  # a constant that was added to all logits
            product = hidden.product(logits)
            torch.testing.assert_close(hidden.product(logits + 7.0), product, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("with_logits", [False, True], ids=["hidden", "both"])
def test_generate_needs_no_listener(with_logits: bool) -> None:
    base, network = model("untied", torch.float32), make_head(with_logits)
    options = {**left_padded(PROMPTS), "max_new_tokens": 6, "do_sample": True, "top_k": 0, "pad_token_id": 0}
    processor = TemperatureLogitsProcessor(network, predict=HiddenFromLogits(network, base).temperatures)
    torch.manual_seed(3)
    sequences = base.generate(**options, logits_processor=[processor])
    torch.manual_seed(3)
    listened = generate(base, network, **options)
    assert listened.sequences.tolist() == sequences.tolist()
    torch.testing.assert_close(processor.temperatures, listened.temperatures, rtol=1e-5, atol=0.0)


def test_rows_of_a_server_have_a_tau_max_of_their_own() -> None:
    base, network = model("tied", torch.float32), make_head(True)
    head = OutputHead(scale=1.0, soft_cap=None)
    expected, logits = true_and_logits(base, network)
    logits[3, 40] = -math.inf  # masked by the server
    rows = BatchTemperatures(network, "cpu", StoredBase(base.get_output_embeddings().weight, None, head))
    tau = rows.predict(logits, torch.where(torch.arange(60) % 2 == 0, 2.0, 1.1))
    expected[1::2] = (expected[1::2] - 0.001) * (1.1 - 0.001) / (2.0 - 0.001) + 0.001
    expected[3] = 1.0
    torch.testing.assert_close(tau, expected, rtol=1e-5, atol=0.0)
    assert int(rows.num_masked) == 1


@pytest.mark.parametrize(
    ("spread", "dtype", "message"),
    [
        (
            0.0,
            torch.float32,
            r"1000 logits do not determine the hidden state of 32 numbers: the condition number .* is (inf|\d\.\de\+\d\d)$",
        ),
        (
            1e-4,
            torch.bfloat16,
            r"relative error of τ .*, condition number .*e\+0[45].*bfloat16; at most 0\.01 is served.*float32",
        ),
    ],
    ids=["no rank", "ill-conditioned"],
)
def test_logits_that_do_not_determine_the_state_are_refused(spread: float, dtype: torch.dtype, message: str) -> None:
    weight = torch.randn(NUM_LOGITS, 32, generator=torch.Generator().manual_seed(0))
    weight[:, 20:] *= spread
    layer = StoredBase(weight.to(dtype), None, OutputHead(scale=1.0, soft_cap=None))
    with pytest.raises(ValueError, match=message):
        HiddenFromLogits(make_head(False), layer)


def test_what_is_no_output_layer_is_named(tmp_path: Path) -> None:
    base = model("untied", torch.float32)
    with pytest.raises(ValueError, match="reads hidden states of 16 numbers, those of the base model have 32"):
        HiddenFromLogits(make_head(False, state_size=16), base)
    base.config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"holds no safetensors file with lm_head\.weight"):
        load_output_layer(tmp_path)
