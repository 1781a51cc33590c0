"""Rivals and controls on one bench, over three or more seeds: the table of `jobs.analyse decoders` with intervals over seeds.

    .venv/bin/python -m benchmarks.decoders digits --seeds 0 1 2
    .venv/bin/python -m benchmarks.decoders arithmetic --seeds 0 1 2
    .venv/bin/python -m benchmarks.decoders text --worlds worlds-0/shift worlds-1/shift worlds-2/shift

`digits` has a verifier. A text is six free digits ("forks": any is valid), a mark, and the same digits in order ("locks": one
is valid). In the training texts a fork is d with a probability that falls as 1/(d + 1), so that a low temperature repeats
itself, and each lock is replaced by a random digit with probability `noise`, so that entropy hardly tells a fork from a lock.
An answer is correct if the locks are right; different forks are different answers. `arithmetic` has
a verifier too, nothing wrong in its training texts, and TempNets that learned from rewards (`benchmarks.arithmetic`).
`text` takes worlds of `benchmarks.miscalibrated`, one for each seed.

Every seed has a base model, training, texts and choices of its own, and all its figures come from documents and prompts that
chose nothing. The figures of the table are means over seeds, ± 95 % over seeds by Student's t; half-widths over documents
are in the JSON of each seed.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.arithmetic import Arithmetic, compare_arithmetic, show_differences
from jobs.scoring.decoders.config import Decoders
from jobs.scoring.decoders.job import resolve_settings
from jobs.scoring.decoders.model import SampledText
from jobs.scoring.decoders.report import conclusion, figures, pair, plot, table
from jobs.scoring.decoders.worker import BenchSettings, BenchWorker, run_bench
from tempnet.decoders.texts import mean_interval

NUM_FORKS, MARK, START, END, VOCAB_SIZE = 6, 10, 11, 12, 13
_NUM_TEXTS, _NUM_HELD_OUT = 20_000, 200
_BATCH_SIZE, _RATE = 64, 2e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Digits:
    """The task with a verifier."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds, three or more."""
    noise: float = 0.6
    """Probability with which a lock of a training text is replaced by a random digit."""
    num_steps_base: int = 800
    """Number of training steps of the base model."""
    num_steps: int = 300
    """Number of training steps of each learned decoder."""
    num_samples: int = 32
    """Number of texts for every prompt."""
    num_prompts: int = 16
    """Number of prompts; half of them choose."""
    k: int = 8
    """k of pass@k and maj@k."""
    output: str = "decoders-digits"
    """Directory of the results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Worlds of `benchmarks.miscalibrated`."""

    worlds: tuple[str, ...]
    """A directory with `model` and `text.jsonl` for each seed, three or more."""
    num_steps: int = 300
    """Number of training steps of each learned decoder."""
    max_documents: int = 200
    """Maximum number of documents."""
    max_prompts: int = 64
    """Maximum number of prompts; half of them choose."""
    num_samples: int = 4
    """Number of texts for every prompt."""
    max_new_tokens: int = 32
    """Number of tokens of a text."""
    output: str = "decoders-text"
    """Directory of the results."""


def make_texts(number: int, noise: float, seed: int) -> np.ndarray:
    """Return texts of digits (number, 14): forks, mark, locks of which some are wrong, end."""
    rng = np.random.default_rng(seed)
    weights = 1.0 / np.arange(1, 11)
    forks = rng.choice(10, size=(number, NUM_FORKS), p=weights / weights.sum())
    locks = np.where(rng.random(forks.shape) < noise, rng.integers(0, 10, size=forks.shape), np.sort(forks, axis=1))
    return np.concatenate([forks, np.full((number, 1), MARK), locks, np.full((number, 1), END)], axis=1)


def check_digits(tokens: Sequence[int]) -> tuple[tuple[int, ...] | None, bool]:
    """Return the forks of a text, None if it has no such form, and whether its locks are right."""
    forks, rest = tuple(tokens[:NUM_FORKS]), list(tokens[NUM_FORKS:])
    if len(forks) < NUM_FORKS or max(forks) > 9:
        return None, False
    return forks, rest == [MARK, *sorted(forks)]


def train_base(job: Digits, seed: int) -> GPT2LMHeadModel:
    """Train a GPT-2 of two layers on corrupted texts."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "n_positions": 16, "n_embd": 64, "n_layer": 2, "n_head": 4}
    none: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **none, bos_token_id=START, eos_token_id=END))
    texts = torch.from_numpy(make_texts(_NUM_TEXTS, job.noise, seed))
    texts = torch.cat([torch.full((len(texts), 1), START), texts], dim=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, job.num_steps_base, pct_start=0.1)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(job.num_steps_base):
        rows = texts[torch.randint(len(texts), (_BATCH_SIZE,), generator=generator)]
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def compare_digits(job: Digits, seed: int) -> dict[str, Any]:
    """Return the figures of one seed of the task with a verifier."""
    with tempfile.TemporaryDirectory(prefix="tempnet-digits-") as directory:
        train_base(job, seed).save_pretrained(directory)
        held_out = make_texts(_NUM_HELD_OUT, job.noise, seed + 1_000_000)
        settings = BenchSettings(
            model=directory,
            vocab_size=VOCAB_SIZE,
            bos_id=START,
            documents=tuple(map(tuple, held_out.tolist())),
            prompts=((START,),) * job.num_prompts,
            tempnets={},
            num_steps=job.num_steps,
            num_samples=job.num_samples,
            max_new_tokens=2 * NUM_FORKS + 2,
            k=job.k,
            seed=seed,
            batch_size=16,
        )

        def verify(place: int, text: SampledText) -> tuple[tuple[int, ...] | None, bool]:
            return check_digits(text.tokens)

        worker = BenchWorker(settings)
        comparison = run_bench(settings, lambda units: [worker(unit) for unit in units], verify)
    return figures(comparison, k=job.k)


def compare_text(job: Text, seed: int) -> dict[str, Any]:
    """Return the figures of one world."""
    world = Path(job.worlds[seed])
    config = Decoders(
        model=str(world / "model"),
        text=str(world / "text.jsonl"),
        output=str(world / "decoders"),
        num_steps=job.num_steps,
        max_documents=job.max_documents,
        max_prompts=job.max_prompts,
        num_samples=job.num_samples,
        max_new_tokens=job.max_new_tokens,
        seed=seed,
    )
    settings = resolve_settings(config)[0]
    worker = BenchWorker(settings)
    comparison = run_bench(settings, lambda units: [worker(unit) for unit in units])
    return figures(comparison, k=config.k)


def combine(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of several seeds as those of one: every mean is that over seeds, with its interval over seeds.

    A loss that is infinite for one seed is None. The rule of a decoder is the list of those that the seeds chose.
    """
    first = runs[0]
    decoders: dict[str, Any] = {}
    for name in first["decoders"]:
        decoders[name] = {
            part: {
                key: _combine_values([run["decoders"][name][part][key] for run in runs])
                for key in first["decoders"][name][part]
            }
            for part in ("text", "prompts")
        }
    return {
        **first,
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
        return pair(mean_interval(means)) if not any(map(math.isnan, means)) else {"mean": None, "half_width": None}
    return None if values[0] is None else sum(values) / len(values)


def compare(job: Digits | Text | Arithmetic, seed: int) -> dict[str, Any]:
    """Return the figures of one seed of a task."""
    if isinstance(job, Digits):
        return compare_digits(job, seed)
    return compare_text(job, seed) if isinstance(job, Text) else compare_arithmetic(job, seed)


def main(job: Digits | Text | Arithmetic) -> None:
    """Run all seeds, print a line for each, and at the end the table."""
    seeds = tuple(range(len(job.worlds))) if isinstance(job, Text) else job.seeds
    output = Path(job.output)
    output.mkdir(parents=True, exist_ok=True)
    runs = []
    for seed in seeds:
        runs.append(compare(job, seed))
        (output / f"seed-{seed}.json").write_text(json.dumps(runs[-1], indent=1, ensure_ascii=False) + "\n")
        print(f"seed {seed}: {runs[-1]['num_tokens']} tokens report", flush=True)
    values = combine(runs)
    shown = f"{table(values)}\n\n{len(runs)} seeds, ± 95 % over seeds. {conclusion(values)}"
    if isinstance(job, Arithmetic):
        shown += f"\n\n{show_differences(runs)}"
    (output / "decoders.md").write_text(shown + "\n")
    plot(values, output / "frontier.png")
    print(f"\n{shown}\n{output}/decoders.md and frontier.png")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(
        tyro.extras.subcommand_cli_from_dict(
            {"digits": Digits, "arithmetic": Arithmetic, "text": Text}, description=__doc__
        )
    )
