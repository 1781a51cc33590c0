"""Validation of language models: what is said of all tokens does not depend on how they are divided."""

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

from jobs.language_models.validation import ValidationPart, validate
from pipelines.packing import IGNORE_INDEX
from tempnet import TempNet, TempNetConfig
from tempnet.models.causal_lm import TemperatureCausalLM
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
def spearman_of(arrays: dict[str, np.ndarray], micro_batch_size: int) -> float:
    module = make_module()

    class Engine(SimpleNamespace):
        device = torch.device("cpu")

        def __call__(self, **batch: Any) -> Any:
            return module(**batch)

    part, options = (
        ValidationPart(arrays=arrays, num_blocks=NUM_BLOCKS),
        {"num_oracle_tokens": 8, "with_details": False},
    )
    engine: Any = Engine()
    scores, _ = validate(engine, part, loss_config=LOSS, micro_batch_size=micro_batch_size, **options)
    return scores["tau_entropy_spearman"]


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
    assert spearman_of(blocks(), micro_batch_size) == pytest.approx(expected_spearman(), abs=1e-4)
