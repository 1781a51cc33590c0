"""Worlds for the benchmark of the band search: two recorded grids, and drawn ones like them.

A world says how a trial at a point would go: mean temperature and loss at every validation. It is a pure function of its
seed and of the point, so that two searches in the same world meet the same trials.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from jobs.engine.watch import Validation
from jobs.studies.sweeps.search import Axes, Point

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
    loss: Callable[[float, float, float], float]
    """(log τ̄, value, log rate) → loss at the end, in nats, without noise."""
    noise: float
    """Standard deviation of log τ̄ between points."""
    loss_noise: float
    """Relative standard deviation of the loss between points."""
    band: tuple[float, float] = _LANGUAGE_MODEL_BAND
    tau_range: tuple[float, float] = _LANGUAGE_MODEL_RANGE
    share_failing: float = 0.0
    """Share of the points whose trial fails."""

    def train(self, point: Point) -> list[Validation]:
        """Returns all validations of a trial at a point; none if it fails."""
        rng = np.random.default_rng([self.seed, zlib.crc32(repr(sorted(point.items())).encode())])
        of_world = np.random.default_rng(self.seed)
        gain, lag, early_noise = of_world.uniform((0, 0, 0), (2, 0.004, 0.003))
        if rng.random() < self.share_failing:
            return []
        value, log_rate = point[AXIS], math.log(point[RATE])
        log_rates = np.log(self.axes[RATE])
        low, high = (math.log(tau) for tau in self.tau_range)
        end = self.log_tau(value, log_rate) + rng.normal(0, self.noise)
        loss = self.loss(end, value, log_rate) * (1 + rng.normal(0, self.loss_noise))
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

    def grid(self) -> list[tuple[float, float]]:
        """Returns (mean temperature, loss) at the end of every trial of the grid that does not fail."""
        points = itertools.product(*self.axes.values())
        courses = [self.train({AXIS: value, RATE: rate}) for value, rate in points]
        return [(course[-1].scores["tau_mean"], course[-1].scores["cross_entropy_tau"]) for course in courses if course]

    def best_in_grid(self) -> float:
        """Returns the lowest loss of the grid in the band; NaN if no trial of the grid lies in it."""
        return min((loss for tau, loss in self.grid() if self.band[0] <= tau <= self.band[1]), default=math.nan)


def recorded_language_models(num_worlds: int) -> list[World]:
    """Returns the 4 × 4 grid of `jobs.sweep gpt2-rho-lr-small` (seed 0), with other noise in each world.

    Its losses outside the band are not recorded; they are set by the line through the others, as loss follows τ there.
    """
    values, rates = [2.0, 2.5, 3.0, 3.5], [3e-3, 6e-3, 1e-2, 2e-2]
    taus = np.array(
        [[1.42, 1.33, 1.29, 1.20], [1.06, 0.98, 0.94, 0.75], [1.04, 0.98, 0.87, 0.57], [0.98, 0.92, 0.80, 0.61]]
    )
    known = {
        (1, 1): 5.033,
        (1, 2): 5.029,
        (1, 3): 4.999,
        (2, 1): 5.048,
        (2, 2): 5.018,
        (3, 0): 5.040,
        (3, 1): 5.026,
        (3, 2): 4.986,
    }
    line = np.polyfit([math.log(taus[place]) for place in known], list(known.values()), 1)
    losses = np.polyval(line, np.log(taus))
    for place, loss in known.items():
        losses[place] = loss
    log_tau, loss_at = _interpolate(values, rates, np.log(taus)), _interpolate(values, rates, losses)
    axes = {AXIS: values, RATE: rates}
    return [
        World(
            seed=seed, axes=axes, log_tau=log_tau, loss=lambda _, *place: loss_at(*place), noise=0.02, loss_noise=0.002
        )
        for seed in range(num_worlds)
    ]


def recorded_dual_encoders(num_worlds: int) -> list[World]:
    """Returns CLIP's losses at rate 1e-3 over ρ, seeds 0 to 4 of `jobs.sweep clip-rho-lr-small`, with other noise.

    Mean τ over ρ is that of seed 2; 3e-4 and 3e-3 shift it by what was seen at ρ = 4 and 5.5, and 1e-2 by twice that.
    """
    values, rates = [4.0, 5.0, 5.5, 6.0, 7.0], [3e-4, 1e-3, 3e-3, 1e-2]
    shift = np.log([0.0235 / 0.0136, 1.0, 0.0062 / 0.0161, (0.0062 / 0.0161) ** 2])
    log_tau = _interpolate(values, rates, np.log([[0.0136], [0.0154], [0.0161], [0.0168], [0.0179]]) + shift)
    seeds = [
        (5.5571, 5.5281, 5.5084, 5.5332, 5.5207), (5.4974, 5.5530, 5.5302, 5.5755, 5.5423),
        (5.7342, 5.6810, 5.7404, 5.7645, 5.7136), (5.4317, 5.3890, 5.4736, 5.4605, 5.4713),
        (5.4776, 5.5056, 5.4482, 5.4963, 5.4763),
    ]  # fmt: skip
    worlds = []
    for seed in range(num_worlds):
        loss = _interpolate(values, rates, np.tile(np.array(seeds[seed % 5])[:, None], 4))
        worlds.append(
            World(
                seed=seed, axes={AXIS: [4.0, 5.0, 6.0, 7.0], RATE: rates}, log_tau=log_tau, noise=0.02, loss_noise=0.003,
                loss=lambda _, *place, loss=loss: loss(*place), band=(0.01, 0.02), tau_range=(0.001, 0.05),
            )
        )  # fmt: skip
    return worlds


def draw(kind: str, num_worlds: int) -> list[World]:
    """Returns drawn worlds of a kind in which some point lies in the band.

    log τ̄ = a + b·x + q·x² + c·y + d·x·y + noise, with x the value minus that of the middle and y the log rate minus that
    of the second rate. The loss is 5·(1 + k·log τ̄ + m·(y − y*)²) with relative noise. Recorded figures are b −.45
    to −.15 (language models) and .08 (CLIP), c −.09 to −.9, k .025 and 0.

    Args:
        kind: "falling" or "rising": the first trial lies near the band. "far": it lies outside by a factor of 1.5 to 3,
            and the axis is wide. "at the bound": it lies below a band of 1.5 to 1.95 by a factor of 1.5 to 2, and τ falls
            steeply from τ_max = 2. "failing": falling, and a quarter of the points fail. "another axis": falling or far,
            with values from 32 to 256.
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
    far = kind == "far" or is_bound or (kind == "another axis" and rng.random() < 0.5)
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

    world = World(
        seed=seed, axes={AXIS: list(np.linspace(low, high, 4)), RATE: rates}, log_tau=log_tau, noise=noise,
        loss=lambda log_tau, _, log_rate: float(5 * (1 + k * log_tau + m * (log_rate - best) ** 2)),
        loss_noise=loss_noise, share_failing=0.25 if kind == "failing" else 0.0,
        band=(1.5, 1.95) if is_bound else _LANGUAGE_MODEL_BAND,
    )  # fmt: skip
    if kind != "another axis":
        return world
    scale = (high - low) / 224
    return replace(
        world,
        axes={AXIS: [32.0, 107.0, 181.0, 256.0], RATE: rates},
        log_tau=lambda value, log_rate: log_tau(low + (value - 32) * scale, log_rate),
    )


def _interpolate(values: list[float], rates: list[float], table: np.ndarray) -> Callable[[float, float], float]:
    """Returns the bilinear function of (value, log rate) through a table."""

    def at(value: float, log_rate: float) -> float:
        over_rates = [float(np.interp(value, values, column)) for column in table.T]
        return float(np.interp(log_rate, np.log(rates), over_rates))

    return at
