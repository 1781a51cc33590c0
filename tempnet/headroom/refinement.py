"""Steps from the score test to the minimum of the cross-entropy itself, each of which is one pass over the tokens.

The objective of fold k is the cross-entropy at u = u_c + φᵀθ, summed over the tokens of the other folds, plus the ridge
penalty of the score test. A step moves θ by H⁻¹ times the gradient, with the matrix H of the score test, and is halved
twice if the objective has risen. So a pass costs O(N·K·p), and only the score test itself costs O(N·p²).

Shapes: N tokens, K folds, p features of a set.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tempnet.headroom.features import Tokens
from tempnet.headroom.profile import Profiles, clamp_log_beta
from tempnet.headroom.regression import Fit


class Refinement:
    """The search for the coefficients of one feature set, for all folds at once.

    Args:
        fit: the solution of the score test, at which the search starts.
        log_beta: u_c, the best constant.
    """

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
        loss, g = _losses_and_scores(tokens.profiles, u)
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


def _losses_and_scores(profiles: Profiles, log_beta: Tensor) -> tuple[Tensor, Tensor]:
    """Return cross-entropies and g, each (N, K), of N tokens at K temperatures each."""
    columns: Sequence[tuple[Tensor, Tensor]] = [
        (profiles.cross_entropy(u), profiles.score(u)[0]) for u in log_beta.unbind(-1)
    ]
    return torch.stack([loss for loss, _ in columns], dim=-1), torch.stack([g for _, g in columns], dim=-1)
