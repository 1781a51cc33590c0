"""A small GPT-2 that learns a task of a few words, and the trainer of `jobs.train_reward` on it, both in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from jobs.scoring.reward.config import RewardConfig
from jobs.scoring.reward.job import train
from jobs.scoring.reward.plan import make_plan
from jobs.scoring.reward.rollouts import RolloutWorker
from jobs.scoring.reward.trainer import RewardTrainer

_NUM_POSITIONS = 16
_BATCH_SIZE, _RATE = 128, 4e-3

DrawTexts = Callable[[int, np.random.Generator], np.ndarray]
"""(B, random generator) → token IDs (B, T) of texts, each with its end, and padded with the end."""


def make_base(directory: Path, seed: int, num_steps: int, *, words: Sequence[str], draw: DrawTexts) -> None:
    """Train the base model of a seed, and save it with its tokenizer, unless it is there.

    Args:
        directory: where it is saved.
        seed: seed of weights and texts.
        num_steps: number of steps of 128 texts.
        words: the vocabulary, whose first word ends a text.
        draw: draws the texts, of at most 16 tokens.
    """
    if (directory / "tokenizer.json").exists():
        return
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    config = GPT2Config(
        vocab_size=len(words),
        n_positions=_NUM_POSITIONS,
        n_embd=64,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    base = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(base.parameters(), lr=_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, num_steps, pct_start=0.1)
    for _ in range(num_steps):
        texts = torch.from_numpy(draw(_BATCH_SIZE, rng))
        logits, targets = base(input_ids=texts[:, :-1], use_cache=False).logits, texts[:, 1:]
        is_end = (targets == 0).long()
        is_text = is_end.cumsum(1) == is_end  # up to the first end, with it
        loss = F.cross_entropy(logits[is_text], targets[is_text])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(base.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    print(f"seed {seed}: base model, loss {loss.item():.3f}", flush=True)
    base.save_pretrained(directory)
    end = words[0]
    by_word = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token=end))
    by_word.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=by_word, bos_token=end, eos_token=end, unk_token=end).save_pretrained(
        directory
    )


def train_on_rewards(config: RewardConfig, say: Callable[[str], None]) -> RewardTrainer:
    """Train a TempNet of 64 hidden units and 32 prototypes, or go on from its checkpoint in the run's storage.

    Args:
        config: the run, but for the size of the network.
        say: called with a line of progress for every step.
    """
    config = replace(config, temperature=replace(config.temperature, hidden_size=64, num_prototypes=32))
    plan = make_plan(config)
    worker = RolloutWorker(plan)
    try:
        trainer = RewardTrainer(plan, lambda orders: [worker.run(order) for order in orders])
        train(trainer, config.storage, say=say)
    finally:
        worker.close()
    return trainer
