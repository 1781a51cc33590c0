"""The bench of decoders on the task of products: TempNets that learned from rewards beside every rival.

Every seed has a base, which learns demonstrations of the training targets and is often wrong at τ = 1, and two TempNets that
the trainer of `jobs.train_reward` trains on the training targets, for the reward of right texts (`each`) and of distinct
right ones (`distinct`). Texts and prompts of the development targets choose the parameters of every decoder and train those
that learn from text; those of the test targets report.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.product_paths import (
    NUM_NEW_TOKENS,
    WORDS,
    check,
    draw_texts,
    prompt_of,
    split_targets,
    tokens_of,
)
from benchmarks.small_bases import make_base, train_on_rewards
from jobs.engine.tables import markdown_table
from jobs.scoring.decoders.model import SampledText
from jobs.scoring.decoders.report import figures
from jobs.scoring.decoders.worker import BenchSettings, BenchWorker, run_bench
from jobs.scoring.reward.config import RewardConfig, VerifierSection
from tempnet.decoders.texts import mean_interval

Reward = Literal["each", "distinct"]
REWARDS: tuple[Reward, ...] = ("each", "distinct")
_NUM_HELD_OUT = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """The task of products, with TempNets that learned from rewards."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds, three or more."""
    num_steps_base: int = 700
    """Number of training steps of the base model."""
    num_steps_reward: int = 200
    """Number of training steps of each TempNet that learns from rewards."""
    num_steps: int = 300
    """Number of training steps of each decoder that learns from text."""
    num_samples: int = 32
    """Number of texts for every prompt."""
    k: int = 8
    """k of pass@k and maj@k."""
    output: str = "decoders-arithmetic"
    """Directory of models, runs and results."""


def compare_arithmetic(job: Arithmetic, seed: int) -> dict[str, Any]:
    """Return the figures of one seed; its models stay in the directory, and are not trained again."""
    directory, targets = Path(job.output) / f"seed-{seed}", split_targets()
    base = directory / "base"
    make_base(
        base,
        seed,
        job.num_steps_base,
        words=WORDS,
        draw=lambda number, rng: draw_texts(number, targets["train"], rng),
    )
    # The bench lets even places choose and odd ones report.
    pairs = zip(targets["development"], targets["test"], strict=True)
    asked = [target for pair in pairs for target in pair]
    settings = BenchSettings(
        model=str(base),
        vocab_size=len(WORDS),
        bos_id=0,
        documents=tuple(held_out_texts(seed)),
        prompts=tuple(tuple(tokens_of(prompt_of(target))) for target in asked),
        tempnets={f"TempNet, reward {reward}": _train_tempnet(job, seed, directory, reward) for reward in REWARDS},
        num_steps=job.num_steps,
        num_samples=job.num_samples,
        max_new_tokens=NUM_NEW_TOKENS,
        k=job.k,
        seed=seed,
        batch_size=16,
    )

    def verify(place: int, text: SampledText) -> tuple[tuple[int, int] | None, bool]:
        return check(asked[place], " ".join(WORDS[token] for token in text.tokens))

    worker = BenchWorker(settings)
    return figures(run_bench(settings, lambda units: [worker(unit) for unit in units], verify), k=job.k)


def held_out_texts(seed: int) -> list[tuple[int, ...]]:
    """Return demonstrations without the token that opens them, of development and test targets in turn."""
    rng, targets = np.random.default_rng(seed + 1_000_000), split_targets()
    parts = (draw_texts(_NUM_HELD_OUT, targets[part], rng).tolist() for part in ("development", "test"))
    texts = [text[1:] for both in zip(*parts, strict=True) for text in both]
    return [tuple(text[: text.index(0) + 1]) for text in texts]


def _train_tempnet(job: Arithmetic, seed: int, directory: Path, reward: Reward) -> str:
    """Train a TempNet on the training targets, with the trainer's defaults, and return the directory that it is saved in."""
    run = directory / reward
    run.mkdir(parents=True, exist_ok=True)
    prompts = run / "prompts.jsonl"
    lines = [{"id": target, "prompt": prompt_of(target), "target": target} for target in split_targets()["train"]]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = RewardConfig(
        model=str(directory / "base"),
        prompts=str(prompts),
        verifier=VerifierSection(name="benchmarks.product_paths:verify"),
        storage=str(run),
        reward=reward,
        num_steps=job.num_steps_reward,
        prompts_per_step=8,
        group_size=32,
        prompts_at_a_time=8,
        max_new_tokens=NUM_NEW_TOKENS,
        seed=seed,
        checkpoint_every=50,
    )
    trainer = train_on_rewards(config, say=lambda line: None)
    result = trainer.result()
    last = " ".join(f"{name} {result['last_steps'][name]:.3f}" for name in ("reward", "distinct", "kl", "tau_mean"))
    print(
        f"seed {seed}, {reward}: at τ = 1 reward {result['base']['reward']:.3f}; at the end {last}, λ "
        f"{result['kl_weight']:.3g}, target KL {result['target_kl']:.3f}",
        flush=True,
    )
    trainer.network.save_pretrained(run / "tempnet")
    return str(run / "tempnet")


def show_differences(runs: Sequence[dict[str, Any]]) -> str:
    """Return by how much each TempNet that learned from rewards exceeds every decoder, in points, paired over seeds."""
    names = [f"TempNet, reward {reward}" for reward in REWARDS]
    measures = ("correct", "distinct_correct", "pass_at_k", "maj_at_k")
    rows = [["less than it", *(f"{name}: {measure}" for name in names for measure in measures)]]
    for rival in runs[0]["decoders"]:
        row = [rival]
        for name in names:
            for measure in measures:
                by_seed = [
                    {one: run["decoders"][one]["prompts"][measure]["mean"] for one in (name, rival)} for run in runs
                ]
                gap = mean_interval([100.0 * (values[name] - values[rival]) for values in by_seed])
                row.append(f"{gap.mean:.1f} ± {gap.half_width:.1f}" if rival != name else "")
        rows.append(row)
    return markdown_table(rows)
