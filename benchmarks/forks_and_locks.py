"""Does a TempNet that learns from rewards keep variety where it is safe? Beside swept decoders, from the same seeds.

    .venv/bin/python -m benchmarks.forks_and_locks --output forks --seeds 0 1 2 3 4

For every seed a small GPT-2 learns the corrupted texts of `benchmarks.sorted_copy`. Then `jobs.train_reward`'s trainer, in
one process, trains a TempNet on the verifier's reward, of distinct right answers or (`--reward each`) of right ones; the
controller finds λ, and nothing about the task is told to it. The rivals are swept on draws of their own: of each the
setting with the most distinct right answers, among those with at least 97 % right ones. All are then judged on the same
prompts and random streams, by groups of 64 texts of one prompt, over which the intervals are taken:

    correct             share of the texts that are right
    distinct correct    number of different right texts of a group, over the number of texts

The models of the seeds stay in `output`, and are not trained again.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch import Tensor
from transformers import (
    GPT2LMHeadModel,
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
)

from benchmarks.small_bases import make_base, train_on_rewards
from benchmarks.sorted_copy import LETTERS, NUM_NEW_TOKENS, WORDS, draw_texts, verify
from jobs.engine.tables import markdown_table
from jobs.scoring.generation.processors import SeededDraw
from jobs.scoring.reward.config import RewardConfig, VerifierSection
from jobs.scoring.reward.trainer import RewardTrainer
from pipelines.text.tokenization import load_tokenizer
from tempnet.inference import attach
from tempnet.network import TempNet
from tempnet.rivals import half_width

_GROUP_SIZE = 64
_LEAST_CORRECT = 0.97
CONSTANTS = (0.05, 0.07, 0.1, 0.12, 0.15, 0.2, 0.25, 0.3, 0.5, 1.0)
MIN_PS, MIN_P_TAUS = tuple(step / 20 for step in range(1, 20)), (1.0, 1.5, 2.0)
EDT_TAUS, EDT_THETAS, EDT_BASE = (0.1, 0.2, 0.4, 0.7, 1.0, 1.5), (0.1, 0.5, 1.0, 2.0, 5.0, 10.0), 0.8

Decoder = Callable[[], list[LogitsProcessor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Seeds and sizes."""

    output: str
    """Directory of the models and runs."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Seeds of base model, TempNet and texts."""
    reward: Literal["each", "distinct"] = "distinct"
    """Whether a right text earns its reward however often it comes, or once."""
    num_base_steps: int = 1200
    """Number of training steps of the base model."""
    num_steps: int = 200
    """Number of steps of the TempNet."""
    num_groups_per_prompt: int = 4
    """Number of groups of 64 texts that each of the eight prompts is judged by."""


class EntropyTemperature(LogitsProcessor):
    """Divides logits by T₀·N^(θ/H), H the entropy of the prediction at τ = 1 (EDT, arXiv 2403.14541 eq. 4), N = 0.8."""

    def __init__(self, tau: float, theta: float) -> None:
        self._tau, self._theta = tau, theta

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, V) logits → logits of the same shape."""
        log_probs = scores.log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1, keepdim=True).clamp(max=-1e-6)
        return scores / (self._tau * EDT_BASE ** (self._theta / entropy)).clamp(min=1e-3)


def train_head(base: Path, run: Path, seed: int, job: Arguments) -> RewardTrainer:
    """Train the TempNet of a seed, or go on from its checkpoint."""
    run.mkdir(parents=True, exist_ok=True)
    prompts = run / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": letter, "prompt": letter}) + "\n" for letter in LETTERS))
    config = RewardConfig(
        model=str(base),
        prompts=str(prompts),
        verifier=VerifierSection(name="benchmarks.sorted_copy:verify"),
        storage=str(run),
        reward=job.reward,
        num_steps=job.num_steps,
        prompts_per_step=len(LETTERS),
        group_size=32,
        prompts_at_a_time=len(LETTERS),
        max_new_tokens=NUM_NEW_TOKENS,
        seed=seed,
        checkpoint_every=50,
    )
    return train_on_rewards(config, say=lambda line: print(f"seed {seed}: {line}", flush=True))


class Judge:
    """Generates groups of texts with a decoder and counts right answers, from random streams that no training sees."""

    def __init__(self, base: Path, seed: int) -> None:
        self.model = GPT2LMHeadModel.from_pretrained(base).eval()
        self._tokenizer, self._seed = load_tokenizer(str(base)), seed

    @torch.no_grad()
    def judge(self, decoder: Decoder, part: str, num_groups: int) -> tuple[Tensor, Tensor]:
        """Return the shares of distinct right and of right texts of every group, (8·groups,) each.

        Args:
            decoder: makes the logits processors, which run before the draw.
            part: which random streams: `sweep` or `test`.
            num_groups: number of groups of every prompt.
        """
        distinct, correct, generate = [], [], self.model.generate
        for group in range(num_groups):
            names = [letter for letter in LETTERS for _ in range(_GROUP_SIZE)]
            keys = [f"{part}/{self._seed}/{group}/{number}/{name}" for number, name in enumerate(names)]
            ids = torch.tensor([[WORDS.index(name)] for name in names])
            sequences = generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NUM_NEW_TOKENS,
                do_sample=True,
                top_k=0,
                pad_token_id=0,
                logits_processor=[*decoder(), SeededDraw(keys)],
            )
            texts = self._tokenizer.batch_decode(sequences[:, 1:], skip_special_tokens=True)
            for start in range(0, len(texts), _GROUP_SIZE):
                right = [text for text in texts[start : start + _GROUP_SIZE] if verify({"text": text})]
                distinct.append(len(set(right)) / _GROUP_SIZE)
                correct.append(len(right) / _GROUP_SIZE)
        return torch.tensor(distinct, dtype=torch.float64), torch.tensor(correct, dtype=torch.float64)

    def sweep(self, decoders: Mapping[str, Decoder]) -> str:
        """Return the name of the best decoder, on draws that are not those of the test."""
        scores = {}
        for name, decoder in decoders.items():
            distinct, correct = (values.mean().item() for values in self.judge(decoder, "sweep", 1))
            is_allowed = correct >= _LEAST_CORRECT
            scores[name] = (is_allowed, distinct if is_allowed else correct)
        return max(scores, key=lambda name: scores[name])


def rivals() -> dict[str, dict[str, Decoder]]:
    """Return the settings of every rival that is swept, by the name of the rival and of the setting."""

    def constant(tau: float) -> Decoder:
        return lambda: [TemperatureLogitsWarper(tau)]

    def min_p(share: float, tau: float) -> Decoder:
        return lambda: [TemperatureLogitsWarper(tau), MinPLogitsWarper(share)]

    def edt(tau: float, theta: float) -> Decoder:
        return lambda: [EntropyTemperature(tau, theta)]

    return {
        "best constant τ": {f"τ {tau:g}": constant(tau) for tau in CONSTANTS},
        "min-p": {f"{p:g}, τ {tau:g}": min_p(p, tau) for p, tau in itertools.product(MIN_PS, MIN_P_TAUS)},
        "EDT": {f"T₀ {tau:g}, θ {theta:g}": edt(tau, theta) for tau, theta in itertools.product(EDT_TAUS, EDT_THETAS)},
    }


def judge_seed(judge: Judge, network: TempNet, num_groups: int) -> dict[str, tuple[str, Tensor, Tensor]]:
    """Return setting, distinct right and right shares of the TempNet, of its MeanShift and of every rival."""
    found: dict[str, tuple[str, Tensor, Tensor]] = {}
    with attach(judge.model, network) as attached:
        processors = []

        def learned() -> list[LogitsProcessor]:
            processors.append(attached.processor())
            return [processors[-1]]

        found["learned τ"] = ("", *judge.judge(learned, "test", num_groups))
    mean = torch.cat([processor.temperatures.flatten() for processor in processors]).mean().item()
    constant: Decoder = lambda: [TemperatureLogitsWarper(mean)]  # noqa: E731
    found["MeanShift"] = (f"τ {mean:.3f}", *judge.judge(constant, "test", num_groups))
    for name, decoders in rivals().items():
        best = judge.sweep(decoders)
        found[name] = (best, *judge.judge(decoders[best], "test", num_groups))
    return found


def percent(values: Tensor) -> str:
    """Return mean and half-width of the interval over groups, in per cent."""
    return f"{100 * values.mean():.1f} ± {100 * half_width(values, torch.arange(len(values))):.1f}"


def show(results: Mapping[int, Mapping[str, tuple[str, Tensor, Tensor]]], weights: Sequence[str]) -> str:
    """Return the table of all seeds: distinct right and right shares of every decoder, in per cent, and what was claimed."""
    rows: list[list[Any]] = [["decoder", *(f"seed {seed}: distinct correct / correct" for seed in results)]]
    for name in next(iter(results.values())):
        cells = [
            f"{percent(found[name][1])} / {percent(found[name][2])}"
            + (f" ({found[name][0]})" if found[name][0] else "")
            for found in results.values()
        ]
        rows.append([name, *cells])
    rows.append(["λ at the end, target KL, KL", *weights])
    holds = [
        found["learned τ"][1].mean() >= 0.6
        and found["learned τ"][2].mean() >= 0.99
        and found["learned τ"][1].mean() > found["min-p"][1].mean()
        for found in results.values()
    ]
    claim = "at least 60 % distinct correct at 99 % correct, and more than swept min-p"
    return f"{markdown_table(rows)}\n\n{claim}: {sum(map(bool, holds))} of {len(holds)} seeds"


def main(job: Arguments) -> None:
    """Print the progress of every seed, and the table after each."""
    results, weights = {}, []
    for seed in job.seeds:
        directory = Path(job.output) / f"seed-{seed}"
        make_base(directory / "base", seed, job.num_base_steps, words=WORDS, draw=draw_texts)
        trainer = train_head(directory / "base", directory / job.reward, seed, job)
        result = trainer.result()
        kl = result["last_steps"].get("kl", math.nan)
        weights.append(f"{result['kl_weight']:.3g}, {result['target_kl']:.2f}, {kl:.2f}")
        results[seed] = judge_seed(Judge(directory / "base", seed), trainer.network, job.num_groups_per_prompt)
        print(show(results, weights), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(tyro.cli(Arguments, description=__doc__))
