"""What the experiments on language models share (TempNet, arXiv 2404.04575 §6, Appendix D).

At full scale the figures are those of the paper: accuracies of the harness, LAMBADA and WikiText-2, each model at its
own temperature. At small scale the models are those of `gpt2-scratch-small` with half of its steps, and the figure is
the perplexity of the validation text at the model's own temperature (τ = 1 without one; the exact optimum for
`dro_newton`). TempNets that the paper trains on a frozen LLaMA are trained here on a frozen model that was first
trained with plain cross-entropy.
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
    """Returns the measure of the mean accuracy over tasks, in %."""

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
    """Returns a study whose arms are language models.

    Args:
        scale: small or full.
        title: title of the study.
        arms: the rows of the table.
        table: the paper's figures.
        small: statements at small scale.
        full: statements at full scale.
        small_measures: measures at small scale.
        full_measures: measures at full scale.
        scoring: the scoring at full scale, if it differs from that of Table 2.
        notes: notes for the reader of the table.
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
    """Returns an arm that trains GPT-2 from scratch with a loss and changed fields of `temperature`."""
    fields = {f"temperature.{field}": value for field, value in temperature.items()}
    return Arm(name=name, preset="gpt2-scratch", changes={"temperature.loss": loss, **fields})


BASE = scratch("base", "ce")


def frozen(scale: Scale, name: str, preset: str, *, row: str = "", changes: Mapping[str, Any] | None = None) -> Arm:
    """Returns an arm that trains a TempNet on a frozen base.

    At full scale the base is the preset's own; at small scale it is the model that the arm :data:`BASE` has trained.
    """
    after = BASE.name if scale == "small" else ""
    return Arm(name=name, preset=preset, after=after, row=row, changes=changes or {})


def with_base(scale: Scale, *arms: Arm) -> tuple[Arm, ...]:
    """Returns the arms, preceded at small scale by the arm that they start from."""
    return (BASE, *arms) if scale == "small" else arms


def distinct(scale: Scale, presets: Iterable[str]) -> list[str]:
    """Returns the presets; at small scale only the first, since the small versions of the others are the same run."""
    return list(presets)[: 1 if scale == "small" else None]


def rho(value: float) -> dict[str, Any]:
    """Returns the changes that set ρ to a number, even if the preset sets a target entropy."""
    return {"temperature.rho": value, "temperature.target_entropy": None}


def own_against_one(arm: str, measure: str, at: str, *, is_lower: bool) -> Statement:
    """Returns the statement that a TempNet's own temperatures are better than τ = 1 for the same model.

    Args:
        arm: name of the arm.
        measure: name of the measure at the TempNet's own temperatures.
        at: suffix of the measure's name at τ = 1.
        is_lower: whether the TempNet's figure is claimed to be the lower one, else the higher one.
    """
    sign = -1.0 if is_lower else 1.0
    return Statement(
        text=f"{measure} of {arm}: at its temperatures {'<' if is_lower else '>'} at τ = 1",
        weights={(arm, measure): sign, (arm, f"{measure}{at}"): -sign},
        low=0.0,
    )


def full_pair(better: str, worse: str) -> tuple[Statement, ...]:
    """Returns the statements that one arm is better than another in all figures of Table 2."""
    return (
        above(better, worse, "average"),
        below(better, worse, "LAMBADA"),
        below(better, worse, "WikiText"),
    )


CE, TEMPNET = scratch("τ = 1", "ce"), scratch("TempNet", "dro")


def experiment(
    id: str, title: str, source: str, claim: str, studies: Callable[[Scale], tuple[Study, ...]]
) -> Experiment:
    """Returns an experiment of the TempNet paper."""
    return Experiment(id=id, title=title, source=f"TempNet {source}", claim=claim, studies=studies)
