"""Small language models that the benchmarks train in a minute: the model, its training, and tokenizers of words."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, PreTrainedTokenizerFast

CONTEXT_LENGTH = 64
_BATCH_SIZE = 16


def make_model(vocab_size: int, num_positions: int, start_id: int, end_id: int) -> GPT2LMHeadModel:
    """Return a new GPT-2 of two layers and width 64."""
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "n_positions": num_positions,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
    }
    none: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **none, bos_token_id=start_id, eos_token_id=end_id))


def train(
    model: PreTrainedModel, draw: Callable[[], tuple[Tensor, Tensor]], *, num_steps: int, rate: float, warmup_share: float,
    beta2: float, weight_decay: float,
) -> float:  # fmt: skip
    """Train a model with AdamW and one cycle of its rate, and return the mean loss of the last tenth of the steps.

    Args:
        model: the model.
        draw: returns a batch of tokens and of targets, −100 where there is none.
        num_steps: number of steps.
        rate: highest learning rate.
        warmup_share: share of the steps in which the rate rises.
        beta2: AdamW's second decay.
        weight_decay: of all weights.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=weight_decay, betas=(0.9, beta2))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, num_steps, pct_start=warmup_share)
    losses = []
    model.train()
    for _ in range(num_steps):
        tokens, targets = draw()
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    model.eval()
    return float(np.mean(losses[-max(1, num_steps // 10) :]))


def train_on_stream(model: PreTrainedModel, stream: Tensor, *, num_steps: int, rate: float, seed: int) -> float:
    """Train a model on blocks drawn from a stream of tokens, and return the mean loss of the last tenth of the steps."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(stream) - CONTEXT_LENGTH - 1, (_BATCH_SIZE, 1), generator=generator)
        block = stream[starts + torch.arange(CONTEXT_LENGTH + 1)]
        return block[:, :-1], block[:, 1:]

    return train(model, draw, num_steps=num_steps, rate=rate, warmup_share=0.05, beta2=0.95, weight_decay=0.1)


def split_words(text: str) -> str:
    """Return words and punctuation marks in lower case, separated by spaces."""
    return " ".join(re.findall(r"\w+|[^\w\s]", text.lower()))


def word_tokenizer(words: Sequence[str], *, unknown: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of words, the first of which opens and ends a text; every sequence of tokens survives decoding."""
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=words[0], eos_token=words[0], unk_token=unknown
    )
