"""Compare the mean held-out loss at predicted temperatures with that at two constant temperatures, on the same rows.

    best constant   argmin over [τ₀, τ_max] of the mean loss. It is fitted to the rows that it is evaluated on, which is
                    an advantage over the prediction.
    MeanShift       the mean of the predicted temperatures. It has the same level as the predictions but no spread.

Predictions that beat MeanShift but not the best constant have the wrong level. Predictions that beat neither contain
nothing that a single number could not express.

Shapes: (...) rows of any layout, such as tokens (N,), or both members of B pairs (2, B).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tempnet.intervals import mean_interval

# Tolerance in log τ. A loss is quadratic near its minimum, so this affects only the sixth digit of the loss.
_TOLERANCE = 1e-3


@torch.no_grad()
def compare_with_constants(
    losses: Callable[[Tensor], Tensor],
    tau: Tensor,
    groups: Tensor,
    *,
    tau_min: float,
    tau_max: float,
    best_constant: float | None = None,
) -> dict[str, float]:
    """Compute the mean loss at the predicted τ and at both constants, and the prediction's gain over each constant.

    With d_i = loss_i(constant) − loss_i(τ_i), the gain is the mean of d over all rows; it is positive if the
    prediction is better. Its interval (`tempnet.intervals.mean_interval`) allows the rows to depend on one another within
    a group, but assumes that the groups are independent.

    Args:
        losses: function from temperatures (...) to the losses of the same rows (...). As a function of one τ that is
            common to all rows, the mean loss must have a single minimum. (The robust loss is convex in τ, a
            cross-entropy in 1/τ.)
        tau: (...) predicted temperatures.
        groups: (...) integers that identify the document, block or image that each row belongs to.
        tau_min, tau_max: range that is searched for the best constant.
        best_constant: the best constant, if it is known (`find_best_constant`).

    Returns:
        `loss`, `best_constant_loss`, `best_constant_tau`, `best_constant_gain`, `best_constant_gain_half_width` (NaN
        for a single group), and the same four of `mean_shift`.
    """
    own = losses(tau).double()
    constants = {
        "best_constant": best_constant or find_best_constant(losses, tau, tau_min=tau_min, tau_max=tau_max),
        "mean_shift": tau.double().mean().item(),
    }
    figures = {"loss": own.mean().item()}
    for name, constant in constants.items():
        found = losses(torch.full_like(tau, constant)).double()
        gain = mean_interval(found - own, groups.expand(tau.shape))
        figures |= {
            f"{name}_loss": found.mean().item(),
            f"{name}_tau": constant,
            f"{name}_gain": gain.mean,
            f"{name}_gain_half_width": gain.half_width,
        }
    return figures


@torch.no_grad()
def find_best_constant(losses: Callable[[Tensor], Tensor], like: Tensor, *, tau_min: float, tau_max: float) -> float:
    """Return the constant in [τ₀, τ_max] with the least mean loss; the arguments are those of `compare_with_constants`.

    It does not depend on the values of `like`, which has the shape, dtype and device of the temperatures.
    """

    def mean_loss(log_tau: float) -> float:
        return losses(torch.full_like(like, math.exp(log_tau))).double().mean().item()

    bounds = math.log(tau_min), math.log(tau_max)
    from scipy.optimize import minimize_scalar  # as above

    inside = minimize_scalar(mean_loss, bounds=bounds, method="bounded", options={"xatol": _TOLERANCE}).x
    # The bounded search never evaluates the ends of the interval, so they are compared here.
    return math.exp(min((*bounds, float(inside)), key=mean_loss))
