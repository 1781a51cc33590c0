"""The cross-fitted ridge regression of the headroom test, from sums over tokens.

Shapes: N tokens, K folds, p features.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 1e3)
"""Candidates for the ridge penalty, in units of the mean curvature of a feature."""


@dataclass(slots=True)
class NormalEquations:
    """Sums of the regression of one fold: Σ v·φφᵀ and Σ g·φ for features φ."""

    matrix: Tensor
    vector: Tensor

    @classmethod
    def zeros(cls, num_features: int) -> NormalEquations:
        """Return the sums over no token."""
        return cls(
            torch.zeros(num_features, num_features, dtype=torch.float64),
            torch.zeros(num_features, dtype=torch.float64),
        )

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
    gains = torch.zeros(count, count, len(PENALTIES), dtype=torch.float64)
    for fold, judge in itertools.combinations(range(count), 2):
        rest = NormalEquations.sum([part for number, part in enumerate(parts) if number not in (fold, judge)])
        for number, penalty in enumerate(PENALTIES):
            theta = rest.solve(penalty)
            gains[fold, judge, number] = parts[judge].gain(theta)
            gains[judge, fold, number] = parts[fold].gain(theta)
    penalties = [PENALTIES[number] for number in gains.sum(1).argmax(-1).tolist()]
    others = [
        NormalEquations.sum([part for number, part in enumerate(parts) if number != fold]) for fold in range(count)
    ]
    ridge = torch.stack([part.ridge(penalty) for part, penalty in zip(others, penalties, strict=True)])
    return Fit(
        columns,
        torch.stack([part.solve(penalty) for part, penalty in zip(others, penalties, strict=True)]),
        penalties,
        ridge,
        [part.matrix + torch.diag(row) for part, row in zip(others, ridge, strict=True)],
    )
