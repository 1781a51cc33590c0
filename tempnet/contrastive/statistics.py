"""Statistics of the temperatures and per-sample estimates of a contrastive step, as sums that are additive over ranks.

Shapes: b pairs on a rank. Values of both members of a pair (image and text, or anchor and positive) are (2, b).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tempnet.contrastive.config import ContrastiveLossConfig
from tempnet.contrastive.losses import ContrastiveOutput
from tempnet.statistics import histogram_of, standard_deviation, sum_tau, summarise_tau

_SCALARS = (
    "num_pairs",
    "tau",
    "tau_squared",
    "num_at_lower_bound",
    "num_at_upper_bound",
    "tau_first",
    "tau_second",
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
        sums = dict.fromkeys(_SCALARS, tau.new_zeros(())) | sum_tau(tau, tau_min, tau_max)
        sums["num_pairs"] = tau.new_tensor(tau.shape[1])
        sums["tau_first"], sums["tau_second"] = tau.sum(1)
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
        summary: dict[str, float] = {}
        if self.config.kind.temperature != "free":  # A loss without a temperature reports τ = 1, which has no meaning.
            histogram, range_ = self.sums[len(_SCALARS) :], (self.config.tau_min, self.config.tau_max)
            summary = summarise_tau(raw, 2 * raw["num_pairs"], histogram, *range_)
            for member, name in zip(self.members, ("tau_first", "tau_second"), strict=True):
                summary[f"tau_mean_{member}"] = raw[name] / raw["num_pairs"]
        if num_estimates := raw["num_estimates"]:
            mean = raw["log_u"] / num_estimates
            summary |= {
                "log_u_mean": mean,
                "log_u_std": standard_deviation(raw["log_u_squared"] / num_estimates, mean),
            }
        if num_gradients := raw["num_gradients"]:
            summary |= {
                "dual_gradient_mean": raw["dual_gradient"] / num_gradients,
                "dual_gradient_absolute": raw["dual_gradient_absolute"] / num_gradients,
            }
        return summary
