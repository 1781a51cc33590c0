"""Statistics of the temperatures and per-sample estimates of a contrastive step, as sums that are additive over ranks.

Shapes: b pairs on a rank. Values of both members of a pair (image and text, or anchor and positive) are (2, b).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tempnet.contrastive.config import ContrastiveLossConfig
from tempnet.contrastive.losses import ContrastiveOutput
from tempnet.statistics import BOUND_SHARE, histogram_of, tau_quantiles

_SCALARS = (
    "num_pairs",
    "tau_first",
    "tau_second",
    "tau_squared",
    "num_at_lower_bound",
    "num_at_upper_bound",
    "num_estimates",
    "log_u",
    "log_u_squared",
    "num_gradients",
    "dual_gradient",
    "dual_gradient_absolute",
)


@dataclass(frozen=True, slots=True)
class PairStatistics:
    """Sums over pairs, and a histogram of the τ of both members over [τ₀, τ_max]."""

    sums: Tensor
    """Scalars in the order of _SCALARS, followed by the histogram, in one float64 vector."""
    config: ContrastiveLossConfig
    """Configuration of the loss; `tau_min` and `tau_max` are the ends of the histogram."""
    members: tuple[str, str] = ("image", "text")
    """Names of the two members of a pair, for the names of their mean temperatures in :meth:`summary`."""

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        output: ContrastiveOutput,
        config: ContrastiveLossConfig,
        members: tuple[str, str] = ("image", "text"),
    ) -> PairStatistics:
        """Compute the statistics of one rank's part of a batch."""
        tau, tau_min, tau_max = output["tau"].double(), config.tau_min, config.tau_max
        margin = BOUND_SHARE * (tau_max - tau_min)
        sums = dict.fromkeys(_SCALARS, tau.new_zeros(()))
        sums["num_pairs"] = tau.new_tensor(tau.shape[1])
        sums["tau_first"], sums["tau_second"] = tau.sum(1)
        sums["tau_squared"] = tau.square().sum()
        sums["num_at_lower_bound"] = (tau <= tau_min + margin).sum()
        sums["num_at_upper_bound"] = (tau >= tau_max - margin).sum()
        if (log_u := output["log_u"]) is not None:
            known = log_u[log_u.isfinite()].double()  # A pair that never had a negative has no estimate.
            sums["num_estimates"] = tau.new_tensor(known.numel())
            sums["log_u"], sums["log_u_squared"] = known.sum(), known.square().sum()
        if (gradient := output["dual_gradient"]) is not None:
            sums["num_gradients"] = tau.new_tensor(gradient.numel())
            sums["dual_gradient"] = gradient.double().sum()
            sums["dual_gradient_absolute"] = gradient.double().abs().sum()
        scalars = torch.stack([sums[name].double() for name in _SCALARS])
        return cls(torch.cat([scalars, histogram_of(tau, tau_min, tau_max).double()]), config, members)

    def summary(self) -> dict[str, float]:
        """Return means, standard deviations, quantiles and shares by name.

        Values that a loss does not have (temperatures, estimates or gradients) are omitted.
        """
        raw = dict(zip(_SCALARS, self.sums.tolist(), strict=False))
        # A loss without a temperature reports τ = 1, which has no meaning.
        summary = {} if self.config.kind.temperature == "free" else self._summarise_tau(raw)
        if num_estimates := raw["num_estimates"]:
            mean = raw["log_u"] / num_estimates
            summary |= {
                "log_u_mean": mean,
                "log_u_std": _standard_deviation(raw["log_u_squared"] / num_estimates, mean),
            }
        if num_gradients := raw["num_gradients"]:
            summary |= {
                "dual_gradient_mean": raw["dual_gradient"] / num_gradients,
                "dual_gradient_absolute": raw["dual_gradient_absolute"] / num_gradients,
            }
        return summary

    def _summarise_tau(self, raw: Mapping[str, float]) -> dict[str, float]:
        tau_min, tau_max, histogram = self.config.tau_min, self.config.tau_max, self.sums[len(_SCALARS) :]
        count = 2 * raw["num_pairs"]
        mean = (raw["tau_first"] + raw["tau_second"]) / count
        return {
            "tau_mean": mean,
            "tau_std": _standard_deviation(raw["tau_squared"] / count, mean),
            f"tau_mean_{self.members[0]}": raw["tau_first"] / raw["num_pairs"],
            f"tau_mean_{self.members[1]}": raw["tau_second"] / raw["num_pairs"],
            "tau_share_lower_bound": raw["num_at_lower_bound"] / count,
            "tau_share_upper_bound": raw["num_at_upper_bound"] / count,
            **tau_quantiles(histogram, tau_min, tau_max),
        }


def _standard_deviation(mean_square: float, mean: float) -> float:
    return math.sqrt(max(mean_square - mean**2, 0.0))
