"""The headroom test from start to end, in a few passes over measured tokens, and the fit of a temperature to features.

The score test is a cross-fitted ridge regression, from sums over tokens. A step from it towards the minimum of the
cross-entropy itself is one pass over the tokens. The objective of fold k is the cross-entropy at u = u_c + φᵀθ, summed over
the tokens of the other folds, plus the ridge penalty of the score test. A step moves θ by H⁻¹ times the gradient, with the
matrix H of the score test, and is halved twice if the objective has risen. So a pass costs O(N·K·p), and only the score test
itself costs O(N·p²).

Shapes: N tokens, D documents, K folds, p features of a set.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tempnet.headroom.features import FEATURE_SETS, Moments, Tokens, best_constant
from tempnet.headroom.gains import DocumentSums
from tempnet.headroom.profile import clamp_log_beta

Batches = Callable[[], Iterable[tuple[Tokens, Tensor]]]
"""Function that is called once per pass over the data; it returns tokens in parts, with the document of each (N,)."""

ONE, CONSTANT = "one", "constant"
"""Names of the temperature 1 and of the best constant.

The constant is fitted to the tokens that it is judged on, as in the validation of a run. For one number among many tokens
this is an advantage of about half a nat in total."""
_NUM_STEPS = 5
"""Number of steps from the score test towards the minimum of the cross-entropy."""
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 1e3)
"""Candidates for the ridge penalty, in units of the mean curvature of a feature."""


@dataclass(slots=True)
class NormalEquations:
    """Sums of the regression of one fold: Σ v·φφᵀ and Σ g·φ for features φ."""

    matrix: Tensor
    vector: Tensor

    @classmethod
    def zeros(cls, size: int) -> NormalEquations:
        """Return the sums over no token, for a number of features."""
        return cls(torch.zeros(size, size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64))

    def add(self, features: Tensor, g: Tensor, v: Tensor) -> None:
        """Add tokens with features (N, p), g (N,) and v (N,)."""
        self.matrix.addmm_((features * v.unsqueeze(-1)).T, features)
        self.vector.addmv_(features.T, g)

    @classmethod
    def sum(cls, parts: Sequence[NormalEquations]) -> NormalEquations:
        """Return the sum of the equations of several folds."""
        return cls(
            sum((part.matrix for part in parts[1:]), parts[0].matrix),
            sum((part.vector for part in parts[1:]), parts[0].vector),
        )

    def of(self, columns: Tensor) -> NormalEquations:
        """Return the equations of some of the features."""
        return NormalEquations(self.matrix[columns][:, columns], self.vector[columns])

    def ridge(self, penalty: float) -> Tensor:
        """Return the penalties (p,) of the squared coefficients: `penalty` times the mean curvature of a feature.

        The constant feature 0 is penalised only so much that the matrix is regular where all predictions are certain.
        """
        scale = self.matrix.diagonal()[1:].mean().clamp(min=1e-12)
        ridge = torch.full_like(self.vector, penalty) * scale
        ridge[0] = 1e-9 * scale
        return ridge

    def solve(self, penalty: float) -> Tensor:
        """Return the coefficients θ (p,) that maximise Σ g·δ − ½·v·δ² − ½·Σ ridge·θ², δ = φᵀθ."""
        return torch.linalg.solve(self.matrix + torch.diag(self.ridge(penalty)), self.vector)

    def gain(self, theta: Tensor) -> float:
        """Return Σ g·δ − ½·v·δ² of the tokens in these sums for coefficients θ."""
        return (self.vector @ theta - 0.5 * theta @ self.matrix @ theta).item()


@dataclass(frozen=True, slots=True)
class Fit:
    """Solution of the regression for one feature set; row k was fitted without fold k."""

    columns: Tensor
    """Indices of the p features of the set."""
    theta: Tensor
    """Coefficients: (K, p)."""
    penalties: list[float]
    """Penalty of each fold, one of `PENALTIES`."""
    ridge: Tensor
    """Penalties of the squared coefficients: (K, p)."""
    matrices: list[Tensor]
    """Matrix of each fold's equations, with the ridge: (p, p)."""


def fit(folds: Sequence[NormalEquations], columns: Tensor) -> Fit:
    """Solve the equations of some of the features for every fold without that fold.

    The penalty of fold k is the one with the largest gain on the other folds, each judged by a fit on the rest.
    """
    count = len(folds)
    parts = [part.of(columns) for part in folds]

    def sum_without(*left_out: int) -> NormalEquations:
        return NormalEquations.sum([part for number, part in enumerate(parts) if number not in left_out])

    gains = torch.zeros(count, count, len(PENALTIES), dtype=torch.float64)
    for fold, judge in itertools.combinations(range(count), 2):
        rest = sum_without(fold, judge)
        for number, penalty in enumerate(PENALTIES):
            theta = rest.solve(penalty)
            gains[fold, judge, number] = parts[judge].gain(theta)
            gains[judge, fold, number] = parts[fold].gain(theta)
    penalties = [PENALTIES[number] for number in gains.sum(1).argmax(-1).tolist()]
    others = [(sum_without(fold), penalty) for fold, penalty in enumerate(penalties)]
    ridge = torch.stack([part.ridge(penalty) for part, penalty in others])
    return Fit(
        columns,
        torch.stack([part.solve(penalty) for part, penalty in others]),
        penalties,
        ridge,
        [part.matrix + torch.diag(row) for (part, _), row in zip(others, ridge, strict=True)],
    )


class Refinement:
    """The search for the coefficients of one feature set, for all folds at once, from a score test at u_c."""

    def __init__(self, fit: Fit, log_beta: float) -> None:
        self.columns = fit.columns
        self.log_beta = log_beta
        self._ridge = fit.ridge
        self._factors = [torch.linalg.cholesky(matrix) for matrix in fit.matrices]
        count, size = fit.theta.shape
        # Without a temperature per token (θ = 0) nothing is known yet, so the first pass accepts what it sees.
        self.theta = torch.zeros(count, size, dtype=torch.float64)
        self._objective = torch.full((count,), torch.inf, dtype=torch.float64)
        self._direction = fit.theta.clone()
        self._step = torch.ones(count, 1, dtype=torch.float64)
        self._candidate = fit.theta.clone()
        self._start_pass()

    def _start_pass(self) -> None:
        count, size = self.theta.shape
        # Sums at the candidate and, in the first pass, at θ = 0 too.
        self._losses = torch.zeros(2, count, dtype=torch.float64)
        self._gradient = torch.zeros(size, count, dtype=torch.float64)

    def add(self, tokens: Tokens, features: Tensor, folds: Tensor) -> None:
        """Add tokens with features (N, all) and folds (N,) to the sums of this pass."""
        features = features[:, self.columns]
        count = len(self.theta)
        is_used = folds.unsqueeze(-1) != torch.arange(count)
        u = clamp_log_beta(self.log_beta + features @ self._candidate.T)
        columns = [(tokens.profiles.cross_entropy(v), tokens.profiles.score(v)[0]) for v in u.unbind(-1)]
        loss, g = (torch.stack(parts, dim=-1) for parts in zip(*columns, strict=True))  # (N, K) each
        constant = tokens.profiles.cross_entropy(self.log_beta).unsqueeze(-1)
        self._losses += torch.stack([(loss * is_used).sum(0), (constant * is_used).sum(0)])
        self._gradient += features.T @ (g * is_used)

    def finish_pass(self) -> None:
        """Accept or reject the candidates, and choose those of the next pass."""
        if self._objective.isinf().all():
            self._objective = self._losses[1].clone()
        objective = self._losses[0] + 0.5 * (self._ridge * self._candidate.square()).sum(-1)
        gradient = self._gradient.T - self._ridge * self._candidate
        for fold, factor in enumerate(self._factors):
            if objective[fold] < self._objective[fold]:
                self.theta[fold], self._objective[fold] = self._candidate[fold], objective[fold]
                self._direction[fold] = torch.cholesky_solve(gradient[fold].unsqueeze(-1), factor).squeeze(-1)
                self._step[fold] = 1.0
            else:
                self._step[fold] *= 0.25
        self._candidate = self.theta + self._step * self._direction
        self._start_pass()


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadroomTest:
    """Result of the test."""

    sums: DocumentSums
    """Losses at τ = 1, at the best constant and at the fitted temperature of each feature set, with the controls of the
    latter: `SET/mean` is the constant that equals its mean (MeanShift), `SET/shuffled` the same temperatures in another
    order."""
    tau: float
    """The best constant temperature of all tokens."""
    penalties: dict[str, list[float]]
    """Feature set → ridge penalty of each fold."""

    @property
    def best_features(self) -> str:
        """The feature set that gains most."""
        return max(FEATURE_SETS, key=lambda name: self.sums.gain(name, CONSTANT).mean)

    @property
    def tau_quantiles(self) -> tuple[float, float]:
        """The .1 % and the 99.9 % quantile of the temperatures of the best feature set."""
        name = self.best_features
        return self.sums.tau_quantile(name, 0.001), self.sums.tau_quantile(name, 0.999)

    @property
    def wanted_tau_max(self) -> float:
        """Upper end τ_max of a TempNet's range that holds these temperatures, in two digits.

        A TempNet begins in the middle of its range and reaches the ends only in the limit. So the range reaches from 0 to
        twice the best constant, to 1.25 times the 99.9 % quantile and to 2, whichever is farthest.
        """
        wanted = max(2.0, 2.0 * self.tau, 1.25 * self.tau_quantiles[1])
        digit = 10.0 ** (math.floor(math.log10(wanted)) - 1)
        return round(math.ceil(wanted / digit - 1e-9) * digit, 6)


def run_headroom_test(batches: Batches, num_documents: int, *, num_folds: int) -> HeadroomTest:
    """Run the test in a few passes over measured tokens: the best constant, moments, normal equations, steps, gains.

    The documents of the tokens are numbered 0 … D − 1, where `num_documents` is D, and document i is in fold i mod K, where
    `num_folds` is K, at least 3.
    """
    log_beta = best_constant(tokens for tokens, _ in batches())
    moments = Moments(log_beta)
    for tokens, _ in batches():
        moments.add(tokens)
    design = moments.design()
    num_features = len(design.columns("both"))
    equations = [NormalEquations.zeros(num_features) for _ in range(num_folds)]
    for tokens, documents in batches():
        features, (g, v) = design.features(tokens), tokens.profiles.score(log_beta)
        for fold, part in enumerate(equations):
            inside = documents % num_folds == fold
            part.add(features[inside], g[inside].double(), v[inside].double())
    fits = {name: fit(equations, design.columns(name)) for name in FEATURE_SETS}
    searches = {name: Refinement(found, log_beta) for name, found in fits.items()}
    for _ in range(_NUM_STEPS):
        for tokens, documents in batches():
            features = design.features(tokens)
            for search in searches.values():
                search.add(tokens, features, documents % num_folds)
        for search in searches.values():
            search.finish_pass()
    sums = DocumentSums(num_documents)
    generator = torch.Generator().manual_seed(0)  # of the order of the shuffled temperatures
    for tokens, documents in batches():
        profiles, folds, features = tokens.profiles, documents % num_folds, design.features(tokens)
        g, v = profiles.score(log_beta)
        sums.add_profiles(profiles, documents)
        sums.add(ONE, profiles, documents, torch.zeros_like(g))
        sums.add(CONSTANT, profiles, documents, torch.full_like(g, log_beta))
        order = torch.randperm(len(g), generator=generator)
        for name, found in fits.items():
            chosen = features[:, found.columns]
            first = (chosen * found.theta[folds]).sum(-1)
            sums.add_second_order(name, documents, g * first - 0.5 * v * first.square())
            u = log_beta + (chosen * searches[name].theta[folds]).sum(-1)
            sums.add(name, profiles, documents, u)
            sums.add(f"{name}/shuffled", profiles, documents, u[order])
    for name in FEATURE_SETS:
        sums.add_constant(f"{name}/mean", sums.mean_tau(name))
    return HeadroomTest(
        sums=sums, tau=math.exp(-log_beta), penalties={name: found.penalties for name, found in fits.items()}
    )
