"""Provide what tests of predicted temperatures share: a tiny exported model and texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pipelines.text.tokenization import train_bpe
from tempnet.network import PAIRED_DIRECTORY, TempNet
from tempnet.network_config import TempNetConfig

CONTEXT_LENGTH = 16
VOCAB_SIZE = 300
NUM_LOGITS = 304
"""Number of logits, which is larger than the vocabulary because output weights are often padded."""


def some_texts(num_texts: int, *, seed: int = 0, longest: int = 60) -> list[str]:
    """Return texts of very different lengths, from one word to several contexts."""
    rng = np.random.default_rng(seed)
    words = ["".join(rng.choice(list("abcdefgh"), size=rng.integers(2, 6))) for _ in range(40)]
    return [" ".join(rng.choice(words, size=rng.integers(1, longest))) for _ in range(num_texts)]


def save_tiny_model(directory: Path, *, with_bias: bool = False) -> Path:
    """Save a random model of two layers, its tokenizer, and a TempNet whose τ differ from token to token.

    With an output bias, the TempNet cannot be folded into the output layer.
    """
    torch.manual_seed(0)
    name, options = ("gptj", {"rotary_dim": 4}) if with_bias else ("gpt2", {})
    # The initial weights are large, because otherwise every prediction would be about uniform.
    config = AutoConfig.for_model(
        name, vocab_size=NUM_LOGITS, n_positions=CONTEXT_LENGTH, n_embd=16, n_layer=2, n_head=2, bos_token_id=0,
        eos_token_id=0, initializer_range=0.5, **options,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    if with_bias:
        torch.nn.init.normal_(model.lm_head.bias)
    model.save_pretrained(directory)
    network = TempNet(TempNetConfig.for_logits(VOCAB_SIZE, rho=2.0, hidden_size=16, num_prototypes=8))
    with torch.no_grad():
        network.first_layer.weight.mul_(20.0)
        network.pool_weight.normal_(std=4.0)
    network.save_pretrained(directory / PAIRED_DIRECTORY)
    train_bpe(some_texts(200), VOCAB_SIZE).save_pretrained(directory)
    return directory
