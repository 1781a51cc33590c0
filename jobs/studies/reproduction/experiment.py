"""The data types of experiments: runs derived from presets, the paper's figures, measures, and claims."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jobs.studies.reproduction.scoring import Scoring

Scale = Literal["small", "full"]
SCALES: tuple[Scale, Scale] = ("small", "full")

Scores = Mapping[str, float]
"""Figures of one run: those of its outcome, such as `validation/<score>`, and those that its export was scored with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A row of the table: a preset with some fields changed, run once for every seed."""

    name: str
    preset: str = ""
    """Name of the preset in `jobs.tasks.presets`, without `-small`. Empty: nothing is trained."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """`section.field` → value that replaces the preset's."""
    paper: tuple[float, ...] = ()
    """The paper's figures, NaN where it has none. Empty: it has no such row."""
    row: str = ""
    """Name of the row in the paper's table. Empty: the same as the name of this arm."""
    after: str = ""
    """Name of the arm from whose export of the same seed this arm starts. Empty: it starts from no other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A column of our table, computed from the scores of a run."""

    name: str
    title: str
    value: Callable[[Scores], float]
    digits: int = 2
    is_exact: bool = False
    """Whether the measure is not random, so that one seed is enough."""
    place: float = math.nan
    """Place on the horizontal axis, if the measures of a study are points of a curve."""


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


def below(a: str, b: str, measure: str) -> Statement:
    """Returns the statement b − a > 0."""
    return Statement(text=f"{measure}: {a} < {b}", weights={(b, measure): 1.0, (a, measure): -1.0}, low=0.0)


def equal(a: str, b: str, measure: str, *, within: float) -> Statement:
    """Returns the statement |a − b| < within."""
    weights = {(a, measure): 1.0, (b, measure): -1.0}
    return Statement(text=f"{measure}: {a} = {b} ± {within:g}", weights=weights, low=-within, high=within)


def between(arm: str, measure: str, low: float, high: float) -> Statement:
    """Returns the statement low < value < high."""
    return Statement(text=f"{measure}: {low:g} < {arm} < {high:g}", weights={(arm, measure): 1.0}, low=low, high=high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """One table of an experiment at one scale."""

    title: str
    arms: tuple[Arm, ...]
    measures: tuple[Measure, ...]
    statements: tuple[Statement, ...] = ()
    """Statements that must all hold for the claim to hold. Empty: nothing is claimed, or nothing can be measured."""
    columns: tuple[str, ...] = ()
    """Titles of the paper's figures (`Arm.paper`)."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """`section.field` → value, for all arms; an arm's own changes take precedence."""
    scoring: Scoring | None = None
    """How exports are scored, in addition to the validation of their training; None: they are not."""
    direct: Callable[[Scale, int], Mapping[str, Scores]] | None = None
    """Measures figures without training: (scale, number of a seed) → arm → figures. None: the arms are trained."""
    axis: str = ""
    """Title of the horizontal axis of a curve that the measures are points of. Empty: they are no curve."""
    notes: tuple[str, ...] = ()
    """Notes for the reader of the table, including commands for what is not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One of the papers' tables or figures, with its claim."""

    id: str
    title: str
    source: str
    """The paper, and the table or figure in it."""
    claim: str
    """The paper's claim, in one line."""
    studies: Mapping[Scale, list[Study]]
