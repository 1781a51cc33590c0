"""The headroom test from start to end, in a few passes over measured tokens.

Shapes: N tokens, D documents, K folds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from tempnet.headroom.features import FEATURE_SETS, Moments, Tokens, best_constant
from tempnet.headroom.fit import NormalEquations, Refinement, fit
from tempnet.headroom.gains import DocumentSums

Batches = Callable[[], Iterable[tuple[Tokens, Tensor]]]
"""Function that is called once per pass over the data; it returns tokens in parts, with the document of each (N,)."""

ONE, CONSTANT = "one", "constant"
"""Names of the temperature 1 and of the best constant.

The constant is fitted to the tokens that it is judged on, as in the validation of a run. For one number among many tokens
this is an advantage of about half a nat in total."""


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


def run_headroom_test(
    batches: Batches, num_documents: int, *, num_folds: int, num_steps: int = 5, seed: int = 0
) -> HeadroomTest:
    """Run the test in a few passes over measured tokens: the best constant, moments, normal equations, steps, gains.

    Args:
        batches: the tokens; their documents are numbered 0 … num_documents − 1. Document i is in fold i mod K.
        num_documents: D.
        num_folds: K, at least 3.
        num_steps: number of steps from the score test towards the minimum of the cross-entropy.
        seed: seed of the order of the shuffled temperatures.
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
    for _ in range(num_steps):
        for tokens, documents in batches():
            features = design.features(tokens)
            for search in searches.values():
                search.add(tokens, features, documents % num_folds)
        for search in searches.values():
            search.finish_pass()
    sums = DocumentSums(num_documents)
    generator = torch.Generator().manual_seed(seed)
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
