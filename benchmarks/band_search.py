"""The band search on worlds whose outcome is known: how often it reaches the band, and at what cost.

    .venv/bin/python -m benchmarks.band_search [--num-worlds 300] [--kinds far rising]

The search and its stopping rules are the product's own. A world says how a trial at a point would go, mean temperature and
loss at every validation, as a pure function of its seed and of the point. Slopes, curvature, noise and turns lie in the
ranges that were measured. The budget is four whole trials, a quarter of a 4 × 4 grid.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tyro

from benchmarks.measure import print_setting, print_table
from jobs.engine.worker import Validation
from jobs.studies.sweeps.band_search import PRIOR_SLOPE, Axes, Point, PointResult, search_band
from jobs.studies.sweeps.tuning import BandRule, Halving

KINDS = ("falling", "rising", "far", "at the bound", "failing")
_BUDGET = 4.0
AXIS, RATE = "axis", "rate"
NUM_STEPS, EVERY = 300, 30
_LANGUAGE_MODEL_BAND, _LANGUAGE_MODEL_RANGE = (0.7, 1.0), (0.001, 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Two axes, and what a trial would do at each point."""

    seed: int
    axes: Axes
    log_tau: Callable[[float, float], float]
    """(value of the first axis, log rate) → log τ̄ at the end, without noise."""
    loss: Callable[[float, float], float]
    """(log τ̄, log rate) → loss at the end, in nats, without noise."""
    noise: float
    """Standard deviation of log τ̄ between points."""
    loss_noise: float
    """Relative standard deviation of the loss between points."""
    band: tuple[float, float] = _LANGUAGE_MODEL_BAND
    tau_range: tuple[float, float] = _LANGUAGE_MODEL_RANGE
    share_failing: float = 0.0
    """Share of the points whose trial fails."""

    def train(self, point: Point) -> list[Validation]:
        """Return all validations of a trial at a point; none if it fails."""
        rng = np.random.default_rng([self.seed, zlib.crc32(repr(sorted(point.items())).encode())])
        of_world = np.random.default_rng(self.seed)
        gain, lag, early_noise = of_world.uniform((0, 0, 0), (2, 0.004, 0.003))
        if rng.random() < self.share_failing:
            return []
        value, log_rate = point[AXIS], math.log(point[RATE])
        log_rates = np.log(self.axes[RATE])
        low, high = (math.log(tau) for tau in self.tau_range)
        end = self.log_tau(value, log_rate) + rng.normal(0, self.noise)
        loss = self.loss(end, log_rate) * (1 + rng.normal(0, self.loss_noise))
        # From half to the end log τ̄ moves by −.22 to .20 (78 whole trials); it partly goes on as before, partly turns.
        move = float(np.clip(rng.normal(0, 0.09), -0.22, 0.20))
        third = end - move - gain * move / 3 - rng.normal(0, 0.05)
        jitter = rng.normal(0, (0.005, early_noise), (NUM_STEPS // EVERY, 2))
        validations = []
        for number, step in enumerate(range(EVERY, NUM_STEPS + 1, EVERY)):
            share = step / NUM_STEPS
            late = end - move * (2 * (1 - share)) ** 2
            log_tau = late if share >= 0.5 else float(np.interp(share, (0, 1 / 3, 0.5), (0.0, third, end - move)))
            # A higher rate may be behind at first.
            behind = 2 * (1 - share) * (0.05 + lag * (log_rate - log_rates.mean()) + jitter[number, 1])
            log_tau += jitter[number, 0] if share < 1 else 0.0
            tau = math.exp(min(max(log_tau, low + 0.003), high - 0.003))
            validations.append(
                Validation(step=step, scores={"tau_mean": tau, "cross_entropy_tau": loss * (1 + behind)})
            )
        return validations

    def best_in_grid(self) -> float:
        """Return the lowest loss of the grid in the band; NaN if no trial of the grid lies in it."""
        courses = [self.train({AXIS: value, RATE: rate}) for value, rate in itertools.product(*self.axes.values())]
        ends = [course[-1].scores for course in courses if course]
        inside = [scores for scores in ends if self.band[0] <= scores["tau_mean"] <= self.band[1]]
        return min((scores["cross_entropy_tau"] for scores in inside), default=math.nan)


def draw_worlds(kind: str, num_worlds: int) -> list[World]:
    """Return drawn worlds of a kind in which some point lies in the band.

    log τ̄ = a + b·x + q·x² + c·y + d·x·y + noise, with x the value minus that of the middle and y the log rate minus that
    of the second rate. The loss is 5·(1 + k·log τ̄ + m·(y − y*)²) with relative noise. Recorded figures are b −.45
    to −.15 (language models) and .08 (CLIP), c −.09 to −.9, k .025 and 0.

    Args:
        kind: "falling" or "rising": the first trial lies near the band. "far": it lies outside by a factor of 1.5 to 3,
            and the axis is wide. "at the bound": it lies below a band of 1.5 to 1.95 by a factor of 1.5 to 2, and τ falls
            steeply from τ_max = 2. "failing": falling, and a quarter of the points fail.
        num_worlds: number of worlds.
    """
    worlds: list[World] = []
    for seed in itertools.count():
        if len(worlds) == num_worlds:
            return worlds
        world = _draw_one(kind, np.random.default_rng([zlib.crc32(kind.encode()), seed]), seed)
        first, rates = world.axes[AXIS], world.axes[RATE]
        taus = [
            math.exp(world.log_tau(value, math.log(rate)))
            for value in np.linspace(min(first), max(first), 50)
            for rate in rates
        ]
        if any(world.band[0] * 1.05 <= tau <= world.band[1] / 1.05 for tau in taus):
            worlds.append(world)
    raise AssertionError


def _draw_one(kind: str, rng: np.random.Generator, seed: int) -> World:
    is_bound = kind == "at the bound"
    far = kind == "far" or is_bound
    low, high = (0.3, 4.5) if far else (2.0, 3.5)
    middle, rates = (low + high) / 2, [3e-3, 6e-3, 1e-2, 2e-2]
    b = rng.uniform(0.03, 0.2) if kind == "rising" else -rng.uniform(0.1, 0.6)
    q, c, d = rng.uniform((-0.1, -0.9, -0.15), (0.1, -0.05, 0.0))
    centre = math.log(0.7) / 2
    a = centre + (rng.choice((-1, 1)) * math.log(rng.uniform(1.5, 3.0) * 0.7**-0.5) if far else rng.normal(0, 0.2))
    if is_bound:
        a, b, q = math.log(1.5 / rng.uniform(1.5, 2.0)), 2 * b, rng.uniform(0.0, 0.2)
    k, m, best = rng.uniform((-0.01, 0.0, math.log(rates[0])), (0.03, 0.01, math.log(rates[-1])))
    noise, loss_noise = rng.uniform((0.01, 0.0005), (0.05, 0.005))

    def log_tau(value: float, log_rate: float) -> float:
        x, y = value - middle, log_rate - math.log(rates[1])
        return float(a + b * x + q * x * x + c * y + d * x * y)

    return World(
        seed=seed, axes={AXIS: list(np.linspace(low, high, 4)), RATE: rates}, log_tau=log_tau, noise=noise,
        loss=lambda log_tau, log_rate: float(5 * (1 + k * log_tau + m * (log_rate - best) ** 2)),
        loss_noise=loss_noise, share_failing=0.25 if kind == "failing" else 0.0,
        band=(1.5, 1.95) if is_bound else _LANGUAGE_MODEL_BAND,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Worlds to search."""

    num_worlds: int = 300
    """Number of worlds of each kind."""
    kinds: tuple[str, ...] = KINDS


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


def run_search(world: World) -> Outcome:
    """Run one search to its end, two trials at a time, by the rules of `jobs.studies.sweeps.tuning`."""
    best_in_grid, band = world.best_in_grid(), world.band
    rule = BandRule(band=band, tau_min=world.tau_range[0], tau_max=world.tau_range[1], num_steps=NUM_STEPS)
    search = search_band(world.axes, band=band, budget=_BUDGET, slope=PRIOR_SLOPE)
    race: Halving | None = None
    results: list[PointResult] = []
    points = next(search)
    while True:
        courses = {str(point): world.train(point) for point in points}
        lengths = _run_round(courses, rule, race if len(points) > 1 else None)
        round_results = [_read(point, courses[str(point)], lengths[str(point)]) for point in points]
        results += round_results
        if race is None and any(result.is_in(band) for result in round_results):
            race = Halving(NUM_STEPS, band)
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
    return Outcome(
        found=bool(inside),
        num_trials=inside[0] + 1 if inside else math.nan,
        share=sum(result.share for result in results) / 16,
        excess=excess,
        kept=bool(inside) and not excess > 0.005,
    )


def _run_round(courses: Mapping[str, list[Validation]], rule: BandRule, race: Halving | None) -> dict[str, int]:
    """Return the number of validations that each trial of a round makes."""
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


def interval(values: Sequence[float], num_digits: int = 1) -> str:
    """Return the mean of shares in % with its bootstrapped 95 % interval."""
    known = np.array([value for value in values if not math.isnan(value)]) * 100
    if not len(known):
        return "–"
    draws = np.random.default_rng(0).integers(len(known), size=(1000, len(known)))
    low, high = np.percentile(known[draws].mean(axis=1), (2.5, 97.5))
    return f"{known.mean():.{num_digits}f} ({low:.{num_digits}f} to {high:.{num_digits}f})"


def describe(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the cells of one kind of worlds."""
    trials = sorted(math.inf if math.isnan(outcome.num_trials) else outcome.num_trials for outcome in outcomes)
    return [
        interval([float(outcome.found) for outcome in outcomes]),
        f"{trials[len(trials) // 2]:g}, {trials[len(trials) * 9 // 10]:g}",
        interval([outcome.share for outcome in outcomes]),
        interval([outcome.excess for outcome in outcomes], 2),
        interval([float(outcome.kept) for outcome in outcomes]),
    ]


def main(arguments: Arguments) -> None:
    """Print a row for each kind of world."""
    print_setting(arguments, "numpy")
    titles = [
        "worlds", "in the band, %", "trials until then: median, 90 %", "steps of the grid, %",
        "above the grid's best in the band, %", "within .5 % of it, %",
    ]  # fmt: skip
    rows = []
    for kind in arguments.kinds:
        rows.append([kind, *describe([run_search(world) for world in draw_worlds(kind, arguments.num_worlds)])])
    print_table(titles, rows)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
