"""Compare the mean held-out loss at predicted temperatures with that at constant temperatures, on the same rows.

    best constant   argmin over a range of the mean loss. It is fitted to the rows that it is evaluated on, which is an
                    advantage over the prediction of about half a nat in total.
    MeanShift       the mean of the predicted temperatures. It has the same level as the predictions but no spread.
    shuffled        the predicted temperatures given to random rows: the mean over the distribution of τ of the mean loss at
                    a constant τ. Same level, same spread, no knowledge.

Predictions that beat MeanShift but not the best constant have the wrong level. Predictions that beat neither contain
nothing that a single number could not express. All of it needs sums over independent groups of rows only.

Shapes: (...) rows of any layout, such as tokens (N,), or both members of B pairs (2, B); G groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tempnet.intervals import ratio_interval

# Tolerance in log τ. A loss is quadratic near its minimum, so this affects only the sixth digit of the loss.
_TOLERANCE = 1e-3
# Number of quantiles of τ that stand for its distribution.
_NUM_QUANTILES = 256


def compare_sums(
    own: Tensor, at: Callable[[float], Tensor], counts: Tensor, *, best_constant: float, mean: float, tau: Tensor | None
) -> dict[str, float]:
    """Compare the loss at predicted temperatures with that at constants, from sums over G independent groups of rows.

    With d_g the loss of a group at the constant less that at the predictions, the gain is Σd/Σn: positive if the
    prediction is better. Its interval is that of `tempnet.intervals.ratio_interval`.

    Args:
        own, counts: (G,) summed loss at the predicted temperatures, and number of rows.
        at: function from one temperature to the summed losses (G,) at it.
        best_constant, mean: the best constant (`find_best_constant`), and the mean of the predicted temperatures.
        tau: (...) the predicted temperatures of all rows, to compare with shuffled ones; None: without.

    Returns:
        `loss`, then `best_constant_loss`, `_tau`, `_gain` and `_gain_half_width` (NaN for a single group), the same four of
        `mean_shift`, and three (without τ) of `shuffled`.
    """
    found = {"best_constant": at(best_constant), "mean_shift": at(mean)}
    constants = {"best_constant": best_constant, "mean_shift": mean}
    if tau is not None:
        shares = (torch.arange(_NUM_QUANTILES, dtype=torch.float64) + 0.5) / _NUM_QUANTILES
        ordered = tau.flatten().double().cpu().sort().values
        values = ordered[(shares * len(ordered)).long()].tolist()
        found["shuffled"] = sum((at(value) for value in values), torch.zeros_like(own)) / _NUM_QUANTILES
    figures = {"loss": (own.sum() / counts.sum()).item()}
    for name, losses in found.items():
        gain = ratio_interval(losses - own, counts)
        figures |= {f"{name}_tau": constants[name]} if name in constants else {}
        figures |= {
            f"{name}_loss": (losses.sum() / counts.sum()).item(),
            f"{name}_gain": gain.mean,
            f"{name}_gain_half_width": gain.half_width,
        }
    return figures


@torch.no_grad()
def compare_with_constants(
    losses: Callable[[Tensor], Tensor], tau: Tensor, groups: Tensor, *, tau_min: float, tau_max: float
) -> dict[str, float]:
    """Compare as `compare_sums` does, from a function of the temperatures of all rows; without shuffled ones.

    Args:
        losses: function from temperatures (...) to the losses of the same rows (...). As a function of one τ, the mean loss
            must have a single minimum. (The robust loss is convex in τ, a cross-entropy in 1/τ.)
        tau: (...) predicted temperatures.
        groups: (...) integers that identify the document, block or image that each row belongs to.
        tau_min, tau_max: range that is searched for the best constant.
    """
    _, group = torch.unique(groups.expand(tau.shape).flatten(), return_inverse=True)
    num_groups = int(group.max()) + 1

    def sums(values: Tensor) -> Tensor:
        return torch.zeros(num_groups, dtype=torch.float64).index_add_(0, group.cpu(), values.double().flatten().cpu())

    def at(value: float) -> Tensor:
        return sums(losses(torch.full_like(tau, value)))

    return compare_sums(
        sums(losses(tau)),
        at,
        sums(torch.ones_like(tau)),
        best_constant=find_best_constant(lambda value: at(value).sum().item() / tau.numel(), tau_min, tau_max),
        mean=tau.double().mean().item(),
        tau=None,
    )


def find_best_constant(mean_loss: Callable[[float], float], tau_min: float, tau_max: float) -> float:
    """Return the constant τ in [τ₀, τ_max] with the least mean loss, which has a single minimum."""
    low, high = math.log(tau_min), math.log(tau_max)
    return math.exp(minimise(lambda log_tau: mean_loss(math.exp(log_tau)), low, high, tolerance=_TOLERANCE))


def minimise(loss: Callable[[float], float], low: float, high: float, *, tolerance: float) -> float:
    """Return where in [low, high] a function with a single minimum is least."""
    from scipy.optimize import minimize_scalar  # takes a third of a second, which a worker needs once, at its end

    inside = minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": tolerance}).x
    # The bounded search never evaluates the ends of the interval, so they are compared here.
    return min((low, high, float(inside)), key=loss)
