"""The data types of experiments: runs derived from presets, the paper's figures, measures, and claims."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jobs.studies.reproduction.scoring import Scoring

Scale = Literal["small", "full"]

Scores = Mapping[str, float]
"""Figures of one run: those of its outcome, such as `validation/<score>`, and those that its export was scored with."""

DirectFigures = Callable[[int], Mapping[str, Scores]]
"""Measures figures without training: number of a seed → arm → figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A row of the table: a preset with some fields changed, run once for every seed."""

    name: str
    preset: str = ""
    """Name of the preset in `jobs.tasks.presets`, without `-small`. Empty: nothing is trained."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """`section.field` → value that replaces the preset's."""
    after: str = ""
    """Name of the arm from whose export of the same seed this arm starts. Empty: it starts from no other."""
    row: str = ""
    """Name of the row in the paper's table. Empty: the same as the name of this arm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperTable:
    """A table of the paper's figures."""

    columns: tuple[str, ...]
    rows: Mapping[str, tuple[float, ...]]
    """Name of a row → its figures, NaN where the paper has none."""


NO_TABLE = PaperTable(columns=(), rows={})


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A column of our table, computed from the scores of a run."""

    name: str
    title: str
    value: Callable[[Scores], float]
    digits: int = 2
    is_exact: bool = False
    """Whether the measure is not random, so that one seed is enough."""


def score(name: str, title: str, key: str, *, factor: float = 1.0, digits: int = 2) -> Measure:
    """Returns a measure that is one of the scores times a factor; NaN if the run lacks the score."""
    return Measure(name=name, title=title, value=lambda scores: factor * scores.get(key, math.nan), digits=digits)


def perplexity(name: str, title: str, key: str) -> Measure:
    """Returns a measure that is exp of a score in nats."""
    return Measure(name=name, title=title, value=lambda scores: math.exp(min(scores.get(key, math.nan), 700.0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """A statement of a claim: low < Σ weight·value < high, where the values are of one seed."""

    text: str
    weights: Mapping[tuple[str, str], float]
    """(arm, measure) → weight."""
    low: float = -math.inf
    high: float = math.inf


def above(a: str, b: str, measure: str, *, by: float = 0.0) -> Statement:
    """Returns the statement a − b > by."""
    margin = f" + {by:g}" if by > 0 else f" − {-by:g}" if by < 0 else ""
    return Statement(text=f"{measure}: {a} > {b}{margin}", weights={(a, measure): 1.0, (b, measure): -1.0}, low=by)


def below(a: str, b: str, measure: str, *, by: float = 0.0) -> Statement:
    """Returns the statement b − a > by."""
    margin = f" − {by:g}" if by > 0 else f" + {-by:g}" if by < 0 else ""
    return Statement(text=f"{measure}: {a} < {b}{margin}", weights={(b, measure): 1.0, (a, measure): -1.0}, low=by)


def equal(a: str, b: str, measure: str, *, within: float) -> Statement:
    """Returns the statement |a − b| < within."""
    return Statement(
        text=f"{measure}: {a} = {b} ± {within:g}",
        weights={(a, measure): 1.0, (b, measure): -1.0},
        low=-within,
        high=within,
    )


def between(arm: str, measure: str, low: float, high: float) -> Statement:
    """Returns the statement low < value < high."""
    return Statement(text=f"{measure}: {low:g} < {arm} < {high:g}", weights={(arm, measure): 1.0}, low=low, high=high)


def falling(arms: Sequence[str], measure: str) -> tuple[Statement, ...]:
    """Returns the statements that every arm is below the previous one."""
    return tuple(below(after, before, measure) for before, after in itertools.pairwise(arms))


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """One table of an experiment at one scale."""

    title: str
    arms: tuple[Arm, ...]
    measures: tuple[Measure, ...]
    statements: tuple[Statement, ...] = ()
    """Statements that must all hold for the claim to hold. Empty: nothing is claimed, or nothing can be measured."""
    table: PaperTable = NO_TABLE
    changes: Mapping[str, Any] = field(default_factory=dict)
    """`section.field` → value, for all arms; an arm's own changes take precedence."""
    scoring: Scoring | None = None
    """How exports are scored, in addition to the validation of their training; None: they are not."""
    direct: DirectFigures | None = None
    """Measures figures without training; None: the arms are trained."""
    notes: tuple[str, ...] = ()
    """Notes for the reader of the table, including commands for what is not measured."""

    def arm(self, name: str) -> Arm:
        """Returns the arm with a name."""
        return next(arm for arm in self.arms if arm.name == name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One of the papers' tables or figures, with its claim."""

    id: str
    title: str
    source: str
    """The paper, and the table or figure in it."""
    claim: str
    """The paper's claim, in one line."""
    studies: Callable[[Scale], tuple[Study, ...]]
