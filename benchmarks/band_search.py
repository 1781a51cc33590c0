"""The band search on worlds whose outcome is known, whole and without each of its rules.

    .venv/bin/python -m benchmarks.band_search [--num-worlds 300] [--kinds far rising]

The search and its stopping rules are the product's own. A rule is taken out by an edit of the product's source text, so
that the product needs no switch for it; an edit whose text is gone fails. Every search meets the same worlds
(`benchmarks.band_worlds`), so that differences (Δ) are taken world by world. Intervals are bootstrapped over worlds, 95 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from benchmarks import band_worlds
from benchmarks.band_worlds import AXIS, EVERY, NUM_STEPS, World
from jobs.engine.tables import markdown_table
from jobs.engine.watch import Validation
from jobs.studies.sweeps import band_search, stopping, temperature_line
from jobs.studies.sweeps.search import Point, PointResult
from jobs.studies.sweeps.temperature_line import PRIOR_FALL, PRIOR_SLOPE

KINDS = ("recorded LM", "recorded CLIP", "falling", "rising", "far", "at the bound", "failing", "another axis")
_BUDGET = 4.0
Edit = tuple[Any, str, str]
"""Module, text, and the text in its place."""

RULES: dict[str, list[Edit]] = {
    "whole": [],
    "the aim at a neighbour": [
        (band_search, "self._next_value([(start, self._extrapolate_tau(near, combination))])", "None")
    ],
    "its power law": [(band_search, "self._extrapolate_tau(near, combination))]", "near.tau_mean)]")],
    "ties": [(band_search, "_TIE = 1e-3", "_TIE = 0.0")],
    "other axes from the nearest": [(band_search, "self._list_untried(nearest.point)\n", "[]\n")],
    "upwards after failures": [(temperature_line, "candidate = (candidate + high) / 2", "pass")],
    "a measured slope": [(temperature_line, "if others and abs(", "if False and abs(")],
    "its noise": [(temperature_line, "- distance) > _NOISE", "- distance) > 0.0")],
    "the swing": [(stopping, "_SWING = 0.2", "_SWING = 0.0")],
    "the bound of the range": [(stopping, "if not self.tau_min + margin < tau < self.tau_max - margin:", "if False:")],
    "the band rule": [(stopping, "or math.isnan(tau):", "or True:")],
    "halving": [(stopping, "return len(reached) > 1 or num_better", "return True or num_better")],
}
"""Rule → edits that take it out. benchmarks/README.md names the rules that were taken out of the product for good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Worlds to search."""

    num_worlds: int = 300
    """Number of worlds of each kind."""
    kinds: tuple[str, ...] = KINDS
    """Kinds of worlds; see `benchmarks.band_worlds`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a search went in one world."""

    found: bool
    num_trials: float
    """Number of trials until the first one in the band; NaN if there is none."""
    share: float
    """Share of the grid's steps."""
    excess: float
    """Chosen loss over the grid's best in the band, minus 1; NaN if either is missing."""
    kept: bool
    """Whether the promise was kept: a trial in the band, within .5 % of the grid's best there."""
    num_wronged: int
    """Number of trials that were stopped though they would have ended in the band below the chosen loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """The product's functions, after edits of their source."""

    search_band: Callable[..., Any]
    BandRule: Callable[..., Any]
    Halving: Callable[..., Any]
    slope_of: Callable[[Sequence[float]], float]


def choose_slope(values: Sequence[float]) -> float:
    """Returns the prior that a sweep chooses for an axis: that of ρ, or that of an axis with another name."""
    return PRIOR_SLOPE if max(values) < 20 else PRIOR_FALL / (max(values) - min(values))


def edit_product(edits: Sequence[Edit], slope_of: Callable[[Sequence[float]], float] = choose_slope) -> Product:
    """Returns the product's functions with edits of their source, and with a choice of the prior slope of an axis."""
    names: dict[str, dict[str, Any]] = {}
    for module in (temperature_line, band_search, stopping):
        source = Path(str(module.__file__)).read_text()
        for edited, old, new in edits:
            if edited is module:
                assert source.count(old) == 1, f"{old!r} is not once in {module.__name__}"
                source = source.replace(old, new)
        names[module.__name__] = space = {"__name__": module.__name__}
        exec(compile(source, str(module.__file__), "exec"), space)
    line, search, stops = names.values()
    search.update({name: value for name, value in line.items() if name in search and name in vars(temperature_line)})
    return Product(
        search_band=search["search_band"], BandRule=stops["BandRule"], Halving=stops["Halving"], slope_of=slope_of
    )


def run_search(world: World, product: Product) -> Outcome:
    """Runs one search to its end, two trials at a time, by the rules of `jobs.studies.sweeps.rounds`."""
    best_in_grid, band = world.best_in_grid(), world.band
    rule = product.BandRule(band=band, tau_min=world.tau_range[0], tau_max=world.tau_range[1], num_steps=NUM_STEPS)
    values = world.axes[AXIS]
    whole = {AXIS} if max(values) > 20 else set()
    search = product.search_band(world.axes, band=band, budget=_BUDGET, slope=product.slope_of(values), whole=whole)
    race: Any = None
    results: list[PointResult] = []
    stopped: list[list[Validation]] = []
    points = next(search)
    while True:
        courses = {str(point): world.train(point) for point in points}
        lengths = _run_round(courses, rule, race if len(points) > 1 else None)
        round_results = [_read(point, courses[str(point)], lengths[str(point)]) for point in points]
        stopped += [course for name, course in courses.items() if lengths[name] < len(course)]
        results += round_results
        if race is None and any(result.is_in(band) for result in round_results):
            race = product.Halving(NUM_STEPS, band)
            for result in round_results:
                if result.is_in(band):
                    race.goes_on(str(result.point), courses[str(result.point)])
        try:
            points = search.send(round_results)
        except StopIteration:
            break
    inside = [number for number, result in enumerate(results) if result.is_in(band)]
    loss = min((results[number].loss for number in inside), default=math.nan)
    excess = loss / best_in_grid - 1
    ends = [course[-1].scores for course in stopped]
    good = [end for end in ends if band[0] <= end["tau_mean"] <= band[1] and not end["cross_entropy_tau"] >= loss]
    return Outcome(
        found=bool(inside),
        num_trials=inside[0] + 1 if inside else math.nan,
        share=sum(result.share for result in results) / 16,
        excess=excess,
        kept=bool(inside) and not excess > 0.005,
        num_wronged=len(good),
    )


def _run_round(courses: Mapping[str, list[Validation]], rule: Any, race: Any) -> dict[str, int]:
    """Returns the number of validations that each trial of a round makes."""
    lengths = dict.fromkeys(courses, 0)
    waiting, running = list(courses), list[str]()
    while waiting or running:
        while waiting and len(running) < 2:
            running.append(waiting.pop(0))
        for name in list(running):
            lengths[name] = min(lengths[name] + 1, len(courses[name]))
            seen = courses[name][: lengths[name]]
            ends = not seen or rule.reason_to_stop(seen) or (race and not race.goes_on(name, seen))
            if ends or seen == courses[name]:
                running.remove(name)
    return lengths


def _read(point: Point, course: Sequence[Validation], length: int) -> PointResult:
    if not course:
        return PointResult(point=point, tau_mean=math.nan, loss=math.nan, share=1.0)
    scores = course[length - 1].scores
    share = length * EVERY / NUM_STEPS
    return PointResult(point=point, tau_mean=scores["tau_mean"], loss=scores["cross_entropy_tau"], share=share)


def make_worlds(kind: str, num_worlds: int) -> list[World]:
    """Returns the worlds of a kind."""
    if kind == "recorded LM":
        return band_worlds.recorded_language_models(num_worlds)
    return (
        band_worlds.recorded_dual_encoders(num_worlds)
        if kind == "recorded CLIP"
        else band_worlds.draw(kind, num_worlds)
    )


def interval(values: Sequence[float], num_digits: int = 1) -> tuple[str, bool]:
    """Returns the mean of shares in % with its bootstrapped 95 % interval, and whether the interval leaves out 0."""
    known = np.array([value for value in values if not math.isnan(value)]) * 100
    if not len(known):
        return "–", False
    draws = np.random.default_rng(0).integers(len(known), size=(1000, len(known)))
    low, high = np.percentile(known[draws].mean(axis=1), (2.5, 97.5))
    return f"{known.mean():.{num_digits}f} ({low:.{num_digits}f} to {high:.{num_digits}f})", bool(low > 0 or high < 0)


def describe(outcomes: Sequence[Outcome], whole: Sequence[Outcome]) -> list[str]:
    """Returns the cells of one search: its own figures, and its differences from the whole search world by world."""
    trials = sorted(math.inf if math.isnan(outcome.num_trials) else outcome.num_trials for outcome in outcomes)
    pairs = list(zip(outcomes, whole, strict=True))
    differences = [
        interval([float(a.kept) - float(b.kept) for a, b in pairs]),
        interval([float(a.found) - float(b.found) for a, b in pairs]),
        interval([a.excess - b.excess for a, b in pairs], 2),
    ]
    return [
        interval([float(outcome.found) for outcome in outcomes])[0],
        f"{trials[len(trials) // 2]:g}, {trials[len(trials) * 9 // 10]:g}",
        interval([outcome.share for outcome in outcomes])[0],
        interval([outcome.excess for outcome in outcomes], 2)[0],
        interval([float(outcome.kept) for outcome in outcomes])[0],
        f"{np.mean([outcome.num_wronged for outcome in outcomes]):.2f}",
        *(f"**{text}**" if is_sure else text for text, is_sure in differences),
    ]


def main() -> None:
    """Print a table for each kind of world."""
    arguments = tyro.cli(Arguments, description=__doc__)
    titles = [
        "without", "in the band, %", "trials until then: median, 90 %", "steps of the grid, %", "above the grid's best, %",
        "within .5 % of it, %", "good trials stopped", "Δ within .5 %", "Δ in the band", "Δ above",
    ]  # fmt: skip
    products = {name: edit_product(edits) for name, edits in RULES.items()}
    products["the fall of axes other than ρ"] = edit_product([], lambda values: PRIOR_SLOPE)
    products["ρ's own slope"] = edit_product([], lambda values: PRIOR_FALL / (max(values) - min(values)))
    for kind in arguments.kinds:
        worlds = make_worlds(kind, arguments.num_worlds)
        outcomes = {name: [run_search(world, product) for world in worlds] for name, product in products.items()}
        rows = [[name, *describe(ended, outcomes["whole"])] for name, ended in outcomes.items()]
        print(f"\n{kind}, {len(worlds)} worlds\n\n{markdown_table([titles, *rows])}", flush=True)


if __name__ == "__main__":
    main()
