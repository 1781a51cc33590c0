"""TempNet's experiments on language models (arXiv 2404.04575 §6, Appendix D).

At full scale figures are those of the paper: accuracies of the harness, LAMBADA and WikiText-2, each model at its own
temperature. At small scale the models are those of `gpt2-scratch-small` with half of its steps, and the figure is the
perplexity of the validation text at the model's own temperature (τ = 1 without one; the exact optimum for `dro_newton`). What
the papers learn on a frozen LLaMA is learned on a frozen model that was trained with plain cross-entropy first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jobs.studies.reproduction.experiment import (
    Arm,
    Experiment,
    Measure,
    PaperTable,
    Scale,
    Scores,
    Statement,
    Study,
    above,
    below,
    perplexity,
    score,
)
from jobs.studies.reproduction.scoring import Language, Scoring

SMALL_CHANGES: Mapping[str, Any] = {"run.num_steps": 300, "validation.every": 75}

TASKS = ("piqa", "hellaswag", "arc_easy", "arc_challenge", "openbookqa")
ELEVEN_TASKS = (*TASKS, "mathqa", "winogrande", "sciq", "boolq", "swag", "logiqa")
TABLE_2_COLUMNS = ("average, %", "LAMBADA ppl", "WikiText ppl")
AVERAGE_COLUMN = ("average, %",)

TAU = score("tau_mean", "mean τ", "validation/tau_mean", digits=3)
PERPLEXITY = perplexity("perplexity", "perplexity", "validation/cross_entropy_tau")
PERPLEXITY_ONE = perplexity("perplexity at 1", "perplexity at τ = 1", "validation/cross_entropy")
NATS = score("cross-entropy", "cross-entropy, nats", "validation/cross_entropy_tau", digits=4)
WIKITEXT = score("WikiText", "WikiText ppl", "wikitext/word_perplexity")
LAMBADA = score("LAMBADA", "LAMBADA ppl", "lambada/perplexity")


def average(*, at: str = "", tasks: Sequence[str] = TASKS) -> Measure:
    """Mean accuracy over tasks, %."""

    def value(scores: Scores) -> float:
        return 100 * math.fsum(scores.get(f"{task}/acc{at}", math.nan) for task in tasks) / len(tasks)

    return Measure(name=f"average{at}", title=f"average{at}, %", value=value)


AVERAGE = average()
FULL_MEASURES = (AVERAGE, LAMBADA, WIKITEXT, TAU)


def study(
    scale: Scale,
    title: str,
    arms: Sequence[Arm],
    table: PaperTable,
    *,
    small: Sequence[Statement],
    full: Sequence[Statement],
    small_measures: Sequence[Measure] = (PERPLEXITY, TAU),
    full_measures: Sequence[Measure] = FULL_MEASURES,
    scoring: Scoring | None = None,
    notes: Sequence[str] = (),
) -> Study:
    """A table whose arms are language models.

    Args:
        scoring: at full scale, where it is another than that of Table 2.
    """
    is_small = scale == "small"
    return Study(
        title=title,
        arms=tuple(arms),
        table=table,
        changes=SMALL_CHANGES if is_small else {},
        measures=tuple(small_measures if is_small else full_measures),
        statements=tuple(small if is_small else full),
        scoring=None if is_small else scoring or Language(),
        notes=tuple(notes),
    )


def scratch(name: str, loss: str, **temperature: Any) -> Arm:
    """GPT-2 from scratch with a loss, and fields of `temperature` changed."""
    fields = {f"temperature.{field}": value for field, value in temperature.items()}
    return Arm(name=name, preset="gpt2-scratch", changes={"temperature.loss": loss, **fields})


BASE = scratch("base", "ce")


def frozen(scale: Scale, name: str, preset: str, *, row: str = "", changes: Mapping[str, Any] | None = None) -> Arm:
    """A TempNet on a frozen base: the preset's own at full scale, the one that :data:`BASE` has become at small."""
    after = BASE.name if scale == "small" else ""
    return Arm(name=name, preset=preset, after=after, row=row, changes=changes or {})


def with_base(scale: Scale, *arms: Arm) -> tuple[Arm, ...]:
    """The arms, and at small scale what they start from."""
    return (BASE, *arms) if scale == "small" else arms


def distinct(scale: Scale, presets: Iterable[str]) -> list[str]:
    """The presets; at small scale the first, as the twins of others are the same run under another name."""
    return list(presets)[: 1 if scale == "small" else None]


def rho(value: float) -> dict[str, Any]:
    """ρ as a number, also where the preset gives a target entropy."""
    return {"temperature.rho": value, "temperature.target_entropy": None}


def own_against_one(arm: str, measure: str, at: str, *, is_lower: bool) -> Statement:
    """A TempNet's own temperatures against τ = 1 of the same model."""
    sign = -1.0 if is_lower else 1.0
    return Statement(
        text=f"{measure} of {arm}: at its temperatures {'<' if is_lower else '>'} at τ = 1",
        weights={(arm, measure): sign, (arm, f"{measure}{at}"): -sign},
        low=0.0,
    )


def full_pair(better: str, worse: str) -> tuple[Statement, ...]:
    """One arm better than another in all figures of Table 2."""
    return (
        above(better, worse, "average"),
        below(better, worse, "LAMBADA"),
        below(better, worse, "WikiText"),
    )


CE, TEMPNET = scratch("τ = 1", "ce"), scratch("TempNet", "dro")


def experiment(
    id: str, title: str, source: str, claim: str, studies: Callable[[Scale], tuple[Study, ...]]
) -> Experiment:
    """One of TempNet's."""
    return Experiment(id=id, title=title, source=f"TempNet {source}", claim=claim, studies=studies)
