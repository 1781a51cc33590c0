"""What an experiment is, as data: runs derived from presets, the paper's figures, what is measured, what is claimed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jobs.studies.reproduction.scoring import Scoring

Scale = Literal["small", "full"]

Scores = Mapping[str, float]
"""Figures of one run: `validation/<score>` and the like of its outcome, and what its export was scored on."""

DirectFigures = Callable[[int], Mapping[str, Scores]]
"""Number of a seed → arm → figures, where nothing is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A row of the table: a preset with some fields changed, run once for every seed."""

    name: str
    preset: str = ""
    """Of `jobs.tasks.presets`, without `-small`. Empty: nothing is trained."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """`section.field` → value."""
    after: str = ""
    """The arm whose export of the same seed this one starts from."""
    row: str = ""
    """Of the paper's table. Empty: the one of this arm's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperTable:
    """The paper's figures."""

    columns: tuple[str, ...]
    rows: Mapping[str, tuple[float, ...]]
    """NaN where the paper has none."""


NO_TABLE = PaperTable(columns=(), rows={})


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A column of our table."""

    name: str
    title: str
    value: Callable[[Scores], float]
    digits: int = 2
    is_exact: bool = False
    """Chance has no part in it: one seed is enough."""


def score(name: str, title: str, key: str, *, factor: float = 1.0, digits: int = 2) -> Measure:
    """A measure that is one of the scores; NaN for a run that has it not."""
    return Measure(name=name, title=title, value=lambda scores: factor * scores.get(key, math.nan), digits=digits)


def perplexity(name: str, title: str, key: str) -> Measure:
    """exp of a score in nats."""
    return Measure(name=name, title=title, value=lambda scores: math.exp(min(scores.get(key, math.nan), 700.0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """low < Σ weight·value < high, the values taken seed by seed."""

    text: str
    weights: Mapping[tuple[str, str], float]
    """(arm, measure) → weight."""
    low: float = -math.inf
    high: float = math.inf


def above(a: str, b: str, measure: str, *, by: float = 0.0) -> Statement:
    """a − b > by."""
    margin = f" + {by:g}" if by > 0 else f" − {-by:g}" if by < 0 else ""
    return Statement(text=f"{measure}: {a} > {b}{margin}", weights={(a, measure): 1.0, (b, measure): -1.0}, low=by)


def below(a: str, b: str, measure: str, *, by: float = 0.0) -> Statement:
    """b − a > by."""
    margin = f" − {by:g}" if by > 0 else f" + {-by:g}" if by < 0 else ""
    return Statement(text=f"{measure}: {a} < {b}{margin}", weights={(b, measure): 1.0, (a, measure): -1.0}, low=by)


def equal(a: str, b: str, measure: str, *, within: float) -> Statement:
    """|a − b| < within."""
    return Statement(
        text=f"{measure}: {a} = {b} ± {within:g}",
        weights={(a, measure): 1.0, (b, measure): -1.0},
        low=-within,
        high=within,
    )


def between(arm: str, measure: str, low: float, high: float) -> Statement:
    """low < value < high."""
    return Statement(text=f"{measure}: {low:g} < {arm} < {high:g}", weights={(arm, measure): 1.0}, low=low, high=high)


def falling(arms: Sequence[str], measure: str) -> tuple[Statement, ...]:
    """Every arm below the one before it."""
    return tuple(below(after, before, measure) for before, after in itertools.pairwise(arms))


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """One table at one scale."""

    title: str
    arms: tuple[Arm, ...]
    measures: tuple[Measure, ...]
    statements: tuple[Statement, ...] = ()
    """All must hold for the claim to hold. Empty: nothing is claimed, or nothing can be measured here."""
    table: PaperTable = NO_TABLE
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Of all arms, `section.field` → value; an arm's own come after them."""
    scoring: Scoring | None = None
    """What exports are scored on, beside the validation of their training."""
    direct: DirectFigures | None = None
    """In the place of training."""
    notes: tuple[str, ...] = ()
    """What a reader of the table must know; commands for what is not measured."""

    def arm(self, name: str) -> Arm:
        """By its name."""
        return next(arm for arm in self.arms if arm.name == name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A row of the papers' tables and figures."""

    id: str
    title: str
    source: str
    """Paper, and table or figure."""
    claim: str
    """In a line."""
    studies: Callable[[Scale], tuple[Study, ...]]
