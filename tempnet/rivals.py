"""What predicted temperatures are worth: their mean held-out loss beside that of two constants, on the same rows.

    best constant   argmin over [τ₀, τ_max] of the mean loss. It is fitted to the rows that it is scored on, so that its one
                    parameter has an advantage that the prediction has not.
    MeanShift       the mean of the predicted temperatures themselves: it shares their level and lacks only their spread.

A prediction that beats the second and not the first has the wrong level; one that beats neither has learned nothing that
a number could not say.

Shapes: (...) rows of any layout: tokens (N,), or both members of B pairs (2, B).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from scipy.optimize import minimize_scalar
from scipy.stats import t as student
from torch import Tensor

CONSTANTS = ("best_constant", "mean_shift")
# In log τ; near its minimum a loss is quadratic, so that this decides only its sixth digit.
_TOLERANCE = 1e-3


@torch.no_grad()
def compare_with_constants(
    losses: Callable[[Tensor], Tensor], tau: Tensor, groups: Tensor, *, tau_min: float, tau_max: float
) -> dict[str, float]:
    """The mean loss at the predicted τ and at both constants, and how much the prediction gains over each.

    With d_i = loss_i(constant) − loss_i(τ_i), the gain is the mean of d over all rows, positive where the prediction is the
    better one. Its half-width is that of a 95 % interval, t_{G−1}·s, in which the rows of a group may depend on one another
    and the G groups may not: s² = G/(G−1)·Σ_g (Σ_{i∈g} (d_i − d̄))² / N².

    Args:
        losses: temperatures (...) → the losses of the same rows (...), whose mean over the rows has one minimum in a τ that
            is the same for all of them. The robust loss is convex in τ, a cross-entropy in 1/τ.
        tau: (...) the predicted temperatures.
        groups: (...) integers: the document, block or image that each row belongs to.
        tau_min, tau_max: where the best constant is looked for.

    Returns:
        `loss`, `best_constant_loss`, `best_constant_tau`, `best_constant_gain`, `best_constant_gain_half_width` (NaN for a
        single group), and the same four of `mean_shift`.
    """
    own = losses(tau).double()
    constants = {
        "best_constant": _best_constant(losses, tau, tau_min, tau_max),
        "mean_shift": tau.double().mean().item(),
    }
    figures = {"loss": own.mean().item()}
    for name, constant in constants.items():
        found = losses(torch.full_like(tau, constant)).double()
        gain = found - own
        figures |= {
            f"{name}_loss": found.mean().item(),
            f"{name}_tau": constant,
            f"{name}_gain": gain.mean().item(),
            f"{name}_gain_half_width": half_width(gain, groups),
        }
    return figures


def half_width(values: Tensor, groups: Tensor) -> float:
    """Half of the 95 % interval of the mean of `values` (...), whose `groups` (...) are independent; NaN for one group."""
    values = values.double().flatten()
    _, inverse = torch.unique(groups.flatten(), return_inverse=True)
    num_groups = int(inverse.max()) + 1
    if num_groups < 2:
        return math.nan
    sums = values.new_zeros(num_groups).index_add_(0, inverse, values - values.mean())
    deviation = math.sqrt(num_groups / (num_groups - 1) * sums.square().sum().item()) / len(values)
    return float(student.ppf(0.975, num_groups - 1)) * deviation


def _best_constant(losses: Callable[[Tensor], Tensor], tau: Tensor, tau_min: float, tau_max: float) -> float:
    def mean_loss(log_tau: float) -> float:
        return losses(torch.full_like(tau, math.exp(log_tau))).double().mean().item()

    bounds = math.log(tau_min), math.log(tau_max)
    inside = minimize_scalar(mean_loss, bounds=bounds, method="bounded", options={"xatol": _TOLERANCE}).x
    # The search never looks at the ends themselves.
    return math.exp(min((*bounds, float(inside)), key=mean_loss))
