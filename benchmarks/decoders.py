"""TempNets that learned from rewards beside rivals and controls: the table of `jobs.analyse decoders` over several seeds.

    .venv/bin/python -m benchmarks.decoders --seeds 0 1 2 3 4

The task is arithmetic with a verifier (`benchmarks.product_paths`). Every seed has a base, which learns demonstrations of
the training targets and is often wrong at τ = 1, and two TempNets that the trainer of `jobs.train_reward` trains on the
training targets, for the reward of right texts (`each`) and of distinct right ones (`distinct`). Texts and prompts of the
development targets choose the parameters of every decoder and train those that learn from text; those of the test targets
report.

The figures of the table are means over seeds, ± 95 % over seeds by Student's t; half-widths over documents are in the JSON
of each seed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from torch import Tensor

from benchmarks.product_paths import NUM_NEW_TOKENS, WORDS, check, draw_texts, prompt_of, split_targets, tokens_of
from benchmarks.small_models import make_model, train, word_tokenizer
from jobs.engine.report import markdown_table
from jobs.scoring.analyses.config import Decoders
from jobs.scoring.decoders.bench import BenchSettings, BenchWorker, run_bench
from jobs.scoring.decoders.job import conclusion, figures, plot, table
from jobs.scoring.decoders.model import SampledText
from jobs.scoring.reward.config import RewardConfig, RewardTemperatureSection
from jobs.scoring.reward.job import train as train_by_reward
from jobs.scoring.reward.plan import make_plan
from jobs.scoring.reward.rollouts import work_here
from jobs.scoring.reward.trainer import RewardTrainer
from jobs.scoring.verifiers.verifier import VerifierSection
from tempnet.decoders.measures import mean_interval

Reward = Literal["each", "distinct"]
REWARDS: tuple[Reward, ...] = ("each", "distinct")
_NUM_HELD_OUT = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Seeds and sizes."""

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
    """Directory of models, runs and results; models that are there are not trained again."""


def train_base(directory: Path, seed: int, num_steps: int, targets: Sequence[int]) -> None:
    """Train the base of a seed on demonstrations of some targets, and save it, unless it is there."""
    if (directory / "tokenizer.json").exists():
        return
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    base = make_model(len(WORDS), 16, 0, 0)

    def draw() -> tuple[Tensor, Tensor]:
        texts = torch.from_numpy(draw_texts(128, targets, rng))
        followers = texts[:, 1:]
        is_end = (followers == 0).long()
        is_padding = is_end.cumsum(1) != is_end  # after the first end
        return texts[:, :-1], followers.masked_fill(is_padding, -100)

    loss = train(base, draw, num_steps=num_steps, rate=4e-3, warmup_share=0.1, beta2=0.98, weight_decay=0.01)
    print(f"seed {seed}: base model, loss {loss:.3f}", flush=True)
    base.save_pretrained(directory)
    word_tokenizer(WORDS, unknown=WORDS[0]).save_pretrained(directory)


def train_tempnet(job: Arguments, seed: int, directory: Path, reward: Reward) -> str:
    """Train a TempNet on the training targets, with the trainer's defaults, and return the directory that it is saved in."""
    run = directory / reward
    run.mkdir(parents=True, exist_ok=True)
    lines = [{"id": target, "prompt": prompt_of(target), "target": target} for target in split_targets()["train"]]
    (run / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = RewardConfig(
        model=str(directory / "base"),
        prompts=str(run / "prompts.jsonl"),
        verifier=VerifierSection(name="benchmarks.product_paths:verify"),
        temperature=RewardTemperatureSection(hidden_size=64, num_prototypes=32),
        storage=str(run),
        reward=reward,
        num_steps=job.num_steps_reward,
        held_out_share=0.0,
        prompts_per_step=8,
        group_size=32,
        prompts_at_a_time=8,
        max_new_tokens=NUM_NEW_TOKENS,
        seed=seed,
        checkpoint_every=50,
    )
    plan = make_plan(config)
    with work_here(plan) as run_orders:
        trainer = RewardTrainer(plan, run_orders)
        train_by_reward(trainer, config.storage, say=lambda line: None)
        trainer.finish()
    result = trainer.result()
    last = " ".join(f"{name} {result['last_steps'][name]:.3f}" for name in ("reward", "distinct", "kl", "tau_mean"))
    print(f"seed {seed}, {reward}: reward at τ = 1 {result['base']['reward']:.3f}; at the end {last}", flush=True)
    trainer.network.save_pretrained(run / "tempnet")
    return str(run / "tempnet")


def held_out_texts(seed: int) -> list[tuple[int, ...]]:
    """Return demonstrations without the token that opens them, of development and test targets in turn."""
    rng, targets = np.random.default_rng(seed + 1_000_000), split_targets()
    parts = (draw_texts(_NUM_HELD_OUT, targets[part], rng).tolist() for part in ("development", "test"))
    texts = [text[1:] for both in zip(*parts, strict=True) for text in both]
    return [tuple(text[: text.index(0) + 1]) for text in texts]


def compare(job: Arguments, seed: int) -> dict[str, Any]:
    """Return the figures of one seed."""
    directory, targets = Path(job.output) / f"seed-{seed}", split_targets()
    train_base(directory / "base", seed, job.num_steps_base, targets["train"])
    # The bench lets even places choose and odd ones report.
    pairs = zip(targets["development"], targets["test"], strict=True)
    asked = [target for pair in pairs for target in pair]
    settings = BenchSettings(
        config=Decoders(
            model=str(directory / "base"),
            text="drawn",
            output=str(directory),
            num_steps=job.num_steps,
            num_samples=job.num_samples,
            max_new_tokens=NUM_NEW_TOKENS,
            k=job.k,
            seed=seed,
            batch_size=16,
        ),
        vocab_size=len(WORDS),
        bos_id=0,
        documents=tuple(held_out_texts(seed)),
        prompts=tuple(tuple(tokens_of(prompt_of(target))) for target in asked),
        tempnets={f"TempNet, reward {reward}": train_tempnet(job, seed, directory, reward) for reward in REWARDS},
    )

    def verify(place: int, text: SampledText) -> tuple[tuple[int, int] | None, bool]:
        return check(asked[place], " ".join(WORDS[token] for token in text.tokens))

    worker = BenchWorker(settings)
    return figures(run_bench(settings, lambda units: [worker(unit).value for unit in units], verify), k=job.k)


def combine(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of several seeds as those of one: every mean is that over seeds, with its interval over seeds.

    A loss that is infinite for one seed is None. The rule of a decoder is the list of those that the seeds chose.
    """
    decoders = {
        name: {
            part: {key: _combine_values([run["decoders"][name][part][key] for run in runs]) for key in found[part]}
            for part in ("text", "prompts")
        }
        for name, found in runs[0]["decoders"].items()
    }
    return {
        **runs[0],
        "num_tokens": sum(run["num_tokens"] for run in runs),
        "human_loss": sum(run["human_loss"] for run in runs) / len(runs),
        "decoders": decoders,
        "tried": [found for run in runs for found in run["tried"]],
    }


def _combine_values(values: Sequence[Any]) -> Any:
    if isinstance(values[0], str):
        return "; ".join(dict.fromkeys(values))
    if isinstance(values[0], dict):
        means = [math.nan if value["mean"] is None else value["mean"] for value in values]
        return mean_interval(means).as_json() if not any(map(math.isnan, means)) else {"mean": None, "half_width": None}
    return None if values[0] is None else sum(values) / len(values)


def show_differences(runs: Sequence[dict[str, Any]]) -> str:
    """Return by how much each TempNet that learned from rewards exceeds every decoder, in points, paired over seeds."""
    names = [f"TempNet, reward {reward}" for reward in REWARDS]
    measures = ("correct", "distinct_correct", "pass_at_k", "maj_at_k")
    rows = [["less than it", *(f"{name}: {measure}" for name in names for measure in measures)]]
    for rival in runs[0]["decoders"]:
        row = [rival]
        for name in names:
            for measure in measures:
                own, other = (
                    [run["decoders"][one]["prompts"][measure]["mean"] for run in runs] for one in (name, rival)
                )
                gap = mean_interval([100.0 * (a - b) for a, b in zip(own, other, strict=True)])
                row.append(f"{gap.mean:.1f} ± {gap.half_width:.1f}" if rival != name else "")
        rows.append(row)
    return markdown_table(rows)


def main(job: Arguments) -> None:
    """Run all seeds, print a line for each, and at the end the tables."""
    output = Path(job.output)
    output.mkdir(parents=True, exist_ok=True)
    runs = []
    for seed in job.seeds:
        runs.append(compare(job, seed))
        (output / f"seed-{seed}.json").write_text(json.dumps(runs[-1], indent=1, ensure_ascii=False) + "\n")
        print(f"seed {seed}: {runs[-1]['num_tokens']} tokens report", flush=True)
    values = combine(runs)
    summary = f"{len(runs)} seeds, ± 95 % over seeds. {conclusion(values)}"
    shown = f"{table(values)}\n\n{summary}\n\n{show_differences(runs)}"
    (output / "decoders.md").write_text(shown + "\n")
    plot(values, output / "frontier.png")
    print(f"\n{shown}\n{output}/decoders.md and frontier.png")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(tyro.cli(Arguments, description=__doc__))
