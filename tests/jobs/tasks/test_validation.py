"""Tests that validation figures of language models over all tokens do not depend on how the tokens are divided."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from scipy.stats import spearmanr
from transformers import AutoConfig, AutoModelForCausalLM

from jobs.tasks.language_model.validation import ValidationDetails, ValidationPart, validate
from pipelines.text.packing import IGNORE_INDEX
from tempnet import TempNet, TempNetConfig
from tempnet.dro import robust_loss
from tempnet.models.causal_lm import TemperatureCausalLM
from tempnet.rivals import half_width
from tempnet.softmax.reference import TemperatureLossConfig

LOSS = TemperatureLossConfig(name="dro", rho=1.5)
VOCABULARY, NUM_BLOCKS, LENGTH = 61, 8, 12


def make_module() -> TemperatureCausalLM:
    torch.manual_seed(0)
    settings = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": LENGTH}
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **settings, initializer_range=0.5))
    network = TempNet(TempNetConfig.for_logits(VOCABULARY, rho=LOSS.rho, hidden_size=16, num_prototypes=8))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter))
    return TemperatureCausalLM(base, network, LOSS, vocab_size=VOCABULARY).eval()


def blocks() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    tokens = generator.integers(VOCABULARY, size=(2, NUM_BLOCKS, LENGTH))
    tokens[1][generator.random((NUM_BLOCKS, LENGTH)) < 0.3] = IGNORE_INDEX
    positions = np.tile(np.arange(LENGTH), (NUM_BLOCKS, 1))
    return {"input_ids": tokens[0], "position_ids": positions, "targets": tokens[1]}


@torch.no_grad()
def validated(
    arrays: dict[str, np.ndarray], micro_batch_size: int, *, num_oracle_tokens: int = 8, with_details: bool = False
) -> tuple[dict[str, float], ValidationDetails | None]:
    module = make_module()

    class Engine(SimpleNamespace):
        device = torch.device("cpu")

        def __call__(self, **batch: Any) -> Any:
            return module(**batch)

    part = ValidationPart(arrays=arrays, num_blocks=NUM_BLOCKS)
    engine: Any = Engine()
    return validate(
        engine, part, loss_config=LOSS, micro_batch_size=micro_batch_size, num_oracle_tokens=num_oracle_tokens,
        with_details=with_details,
    )  # fmt: skip


@torch.no_grad()
def expected_spearman() -> float:
    module, arrays = make_module(), blocks()
    logits = module.logits(torch.from_numpy(arrays["input_ids"]), torch.from_numpy(arrays["position_ids"]))
    logits = logits[torch.from_numpy(arrays["targets"] != IGNORE_INDEX)]
    assert module.tempnet is not None
    entropy = torch.distributions.Categorical(logits=logits.double()).entropy()
    return float(spearmanr(module.tempnet(logits), entropy).statistic)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("micro_batch_size", [1, 3, NUM_BLOCKS])
def test_the_rank_correlation_is_that_of_all_tokens(micro_batch_size: int) -> None:
    scores, _ = validated(blocks(), micro_batch_size)
    assert scores["tau_entropy_spearman"] == pytest.approx(expected_spearman(), abs=1e-4)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_rivals_are_those_of_all_tokens_by_block(micro_batch_size: int) -> None:
    """If every token has an oracle temperature, the rivals' figures do not depend on the micro-batches either."""
    arrays = blocks()
    scores, details = validated(
        arrays, micro_batch_size, num_oracle_tokens=micro_batch_size * NUM_BLOCKS * LENGTH, with_details=True
    )
    assert details is not None
    assert details.judged_by == "robust"
    found, is_valid = details.rivals, arrays["targets"] != IGNORE_INDEX
    assert found["num_tokens"] == is_valid.sum()
    assert found["robust/loss"] == pytest.approx(scores["robust_loss"], abs=1e-5)
    assert found["cross_entropy/loss"] == pytest.approx(scores["cross_entropy_tau"], abs=1e-5)
    assert found["robust/mean_shift_tau"] == pytest.approx(scores["tau_mean"], abs=1e-6)
    module = make_module()
    with torch.no_grad():
        logits = module.logits(torch.from_numpy(arrays["input_ids"]), torch.from_numpy(arrays["position_ids"]))
        logits, targets = logits[torch.from_numpy(is_valid)], torch.from_numpy(arrays["targets"][is_valid])
        assert module.tempnet is not None
        tau = module.tempnet(logits)
        constant = robust_loss(logits, targets, float(tau.mean()), LOSS.rho)
        gain = (constant - robust_loss(logits, targets, tau, LOSS.rho)).double()
    assert found["robust/mean_shift_gain"] == pytest.approx(gain.mean().item(), abs=1e-6)
    block_of = torch.from_numpy(is_valid.nonzero()[0])
    assert found["robust/mean_shift_gain_half_width"] == pytest.approx(half_width(gain, block_of), rel=1e-3)
