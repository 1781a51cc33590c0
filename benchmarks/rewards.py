"""Does headroom say what training on rewards then gains, and is its verdict true? Two verifiers, three seeds, in minutes.

    .venv/bin/python -m benchmarks.rewards --seeds 0 1 2 --output rewards

The task is that of `benchmarks.product_paths`. Every seed has a base of its own, which learns demonstrations of 45 targets;
30 others train temperatures, and the last 15 are held out. The verifiers:

    paths      distinct right paths: a temperature that tells free choices from forced ones gains
    signs      paths of a plus sign, right or wrong: how often a text has one is a matter of the first product

For every cell: what `jobs.calibrate headroom --verifier.name …` says of the training prompts, the verdict of
`jobs.train_reward` on the held-out ones, and the same difference in an independent draw of 2 000 texts for each temperature.
A verdict of "better" must be one there, too.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from benchmarks.product_paths import END, NUM_NEW_TOKENS, WORDS, draw_texts, prompt_of, split_targets
from benchmarks.small_models import minimise
from jobs.engine.report import markdown_table
from jobs.scoring.headroom.config import RewardHeadroom
from jobs.scoring.headroom.rewards import conclude, measure, plan_of
from jobs.scoring.reward.config import RewardConfig, RewardTemperatureSection
from jobs.scoring.reward.job import RewardTrainer, compare_temperatures, points, train
from jobs.scoring.reward.plan import make_plan
from jobs.scoring.reward.rollouts import gain, work_here
from jobs.scoring.units import UnitStore
from jobs.scoring.verifiers.verifier import VerifierSection

VERIFIERS: dict[str, tuple[str, Literal["each", "distinct"]]] = {
    "paths": ("benchmarks.product_paths:verify", "distinct"),
    "signs": ("benchmarks.rewards:has_plus", "each"),
}
_INDEPENDENT_STEP = -9001
_NUM_INDEPENDENT = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Seeds and sizes."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of bases, networks and texts."""
    verifiers: tuple[Literal["paths", "signs"], ...] = ("paths", "signs")
    num_steps_base: int = 700
    """Number of training steps of the base model."""
    num_steps: int = 100
    """Number of training steps on rewards."""
    output: str = "rewards"
    """Directory of models, runs and results; cells that are there are not made again."""


def train_base(directory: Path, seed: int, num_steps: int, targets: Sequence[int]) -> None:
    """Train the base of a seed on demonstrations of some targets, and save it, unless it is there."""
    if (directory / "tokenizer.json").exists():
        return
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    sizes: dict[str, Any] = {"vocab_size": len(WORDS), "n_positions": 16, "n_embd": 64, "n_layer": 2, "n_head": 4}
    none: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    base = GPT2LMHeadModel(GPT2Config(**sizes, **none, bos_token_id=0, eos_token_id=0))

    def loss_of_texts() -> Tensor:
        texts = torch.from_numpy(draw_texts(128, targets, rng))
        followers = texts[:, 1:]
        is_end = (followers == 0).long()
        is_padding = is_end.cumsum(1) != is_end  # after the first end
        logits = base(input_ids=texts[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), followers.masked_fill(is_padding, -100).flatten())

    cycle = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=4e-3, total_steps=num_steps, pct_start=0.1)
    loss = minimise(loss_of_texts, base, cycle, num_steps=num_steps, rate=4e-3, beta2=0.98)
    print(f"seed {seed}: base model, loss {loss:.3f}", flush=True)
    base.save_pretrained(directory)
    words = Tokenizer(WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token=END))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token=END, eos_token=END, unk_token=END).save_pretrained(
        directory
    )


def has_plus(sample: Mapping[str, Any]) -> float:
    """Return 1 if a text has a plus sign, else 0."""
    return float("+" in str(sample["text"]))


def run_cell(job: Arguments, seed: int, name: str) -> dict[str, Any]:
    """Return the figures of one seed and verifier."""
    directory = Path(job.output) / f"seed-{seed}"
    targets = split_targets()
    train_base(directory / "base", seed, job.num_steps_base, targets["base"])
    files = {part: directory / f"{part}.jsonl" for part in ("train", "held_out")}
    for part, file in files.items():
        lines = [{"id": target, "prompt": prompt_of(target), "target": target} for target in targets[part]]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    verifier, reward = VERIFIERS[name]
    common: dict[str, Any] = {
        "model": str(directory / "base"),
        "prompts": str(files["train"]),
        "verifier": VerifierSection(name=verifier),
        "reward": reward,
        "max_new_tokens": NUM_NEW_TOKENS,
        "seed": seed,
        "storage": str(directory / name),
        "prompts_at_a_time": 8,
    }
    headroom = plan_of(RewardHeadroom(**common, texts_per_prompt=32))
    store = UnitStore(str(directory / name / "headroom"))
    store.claim({})
    with work_here(headroom) as run_orders:
        measured = measure(headroom, run_orders, store)
    promised = conclude(measured["rewards"], measured, least_gain=0.01)
    plan = make_plan(
        RewardConfig(
            **common,
            held_out_prompts=str(files["held_out"]),
            temperature=RewardTemperatureSection(hidden_size=64, num_prototypes=32),
            num_steps=job.num_steps,
            group_size=32,
            checkpoint_every=50,
        )
    )
    with work_here(plan) as run_orders:
        trainer = RewardTrainer(plan, run_orders)
        train(trainer, str(directory / name / "run"), say=lambda line: None)
        found = compare_temperatures(trainer)
        places = plan.places_of_verdict()[: len(plan.held_out)]
        num_groups = -(-_NUM_INDEPENDENT // (len(places) * plan.config.group_size))
        places = [(place, 32 * number) for number in range(num_groups) for place, _ in places]
        own = trainer.ask(trainer.weights(), places, _INDEPENDENT_STEP)
        other = trainer.ask(trainer.best_constant, places, _INDEPENDENT_STEP)
    return {
        "headroom": promised["rows"]["token"]["gain"],
        "headroom_verdict": promised["verdict"],
        "rule": promised["rows"]["token"]["chosen"],
        "best_constant": trainer.best_constant,
        "constant_reward": found["temperatures"]["constant"][trainer.measure],
        "kl": found["temperatures"]["learned"]["kl"],
        "gain": found["gains"]["constant"],
        "mean_shift": found["gains"]["mean_shift"],
        "shuffled": found["gains"]["shuffled"],
        "verdict": found["verdict"],
        "independent": gain(own, other, trainer.measure)._asdict(),
    }


def table(cells: Mapping[tuple[str, int], dict[str, Any]]) -> str:
    """Return the figures of all cells, in points of reward."""
    heading = [
        "verifier, seed", "best constant, its reward", "headroom", "it says", "learned", "it says", "independent draw",
        "over MeanShift", "over shuffled",
    ]  # fmt: skip
    rows = [heading]
    for (name, seed), cell in cells.items():
        promised, gained = points(cell["headroom"]), points(cell["gain"])
        constant = f"{cell['best_constant']:g}, {100 * cell['constant_reward']:.1f} %"
        others = [points(cell[key]) for key in ("independent", "mean_shift", "shuffled")]
        says, found = cell["headroom_verdict"], cell["verdict"]
        rows.append([f"{name}, {seed}", constant, promised, says, gained, found, *others])
    return markdown_table(rows)


def main(job: Arguments) -> None:
    """Make all cells that are not there, and print the table and whether every verdict of "better" is true."""
    output = Path(job.output)
    cells: dict[tuple[str, int], dict[str, Any]] = {}
    for name, seed in itertools.product(job.verifiers, job.seeds):
        file = output / f"{name}-{seed}.json"
        if not file.exists():
            cell = run_cell(job, seed, name)
            file.write_text(json.dumps(cell, indent=1) + "\n")
            print(f"{name}, seed {seed}: {cell['verdict']}", flush=True)
        cells[name, seed] = json.loads(file.read_text())
    better = [cell for cell in cells.values() if cell["verdict"] == "better"]
    num_true = sum(cell["independent"]["mean"] > 0.0 for cell in better)
    print(f"\n{table(cells)}\n\n{num_true} of {len(better)} verdicts of better hold in an independent draw")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(tyro.cli(Arguments, description=__doc__))
