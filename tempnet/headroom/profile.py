"""Profiles: what is kept of a row of logits so that its softmax can be evaluated later at any temperature.

With L̃ = L − max L, β = 1/τ, u = log β and s = β·L̃, the log-partition f(u) = log Σ exp(s) determines everything that the
loss at a temperature needs, because p = softmax(s) has

    f′(u) = E_p[s]      f″(u) = E_p[s] + Var_p[s]      cross-entropy(u) = f(u) − β·L̃_y      max p = exp(−f(u))

A profile holds f, f′ and f″ at temperatures that are evenly spaced in log τ, `NUM_NODES` of them over [1/8, 8], or more that
reach below 1/8. Between two nodes f is the polynomial of degree five that agrees with these values (quintic Hermite
interpolation). So 40 numbers stand for a row of V logits. Because the interpolation is linear in the values, a sum of
profiles is the profile of the summed loss: of all tokens of a text, or of each of its documents.

Shapes: N rows (tokens), V effective vocabulary, J nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tempnet.baselines import minimise
from tempnet.dro import shift_by_maximum

TAU_RANGE = (0.125, 8.0)
"""Range of temperatures that a profile covers; logits that were divided by a τ₀ beforehand are covered around τ₀."""
NUM_NODES = 13
NODES = torch.linspace(-math.log(TAU_RANGE[1]), -math.log(TAU_RANGE[0]), NUM_NODES, dtype=torch.float64)
"""Values of u = log β at the nodes; the middle one is τ = 1."""
_FIRST = NODES[0].item()
_STEP = (NODES[1] - NODES[0]).item()
# Row i holds the coefficients of t⁰ … t⁵ of the i-th basis polynomial on [0, 1]; the polynomials belong to f, h·f′ and
# h²·f″ at the left end, and to the same at the right end.
_BASIS = torch.tensor(
    [
        [1.0, 0.0, 0.0, -10.0, 15.0, -6.0],
        [0.0, 1.0, 0.0, -6.0, 8.0, -3.0],
        [0.0, 0.0, 0.5, -1.5, 1.5, -0.5],
        [0.0, 0.0, 0.0, 10.0, -15.0, 6.0],
        [0.0, 0.0, 0.0, -4.0, 7.0, -3.0],
        [0.0, 0.0, 0.0, 0.5, -1.0, 0.5],
    ],
    dtype=torch.float64,
)


@dataclass(frozen=True, slots=True)
class Profiles:
    """Profiles of N rows of logits, each with its target."""

    values: Tensor
    """f, f′ and f″ at the nodes: (N, J, 3)."""
    target: Tensor
    """L_y − max L: (N,)."""

    @classmethod
    def of_logits(cls, logits: Tensor, targets: Tensor, *, num_nodes: int = NUM_NODES) -> Profiles:
        """Compute the profiles of logits (N, V) with targets (N,) int64, in float32 at least."""
        shifted = shift_by_maximum(logits)
        values = []
        for number in range(num_nodes):
            scores = shifted * math.exp(_FIRST + number * _STEP)
            weights = scores.exp()
            # The row's maximum contributes exp(0) = 1, so the partition is at least 1.
            partition = weights.sum(-1)
            mean = (weights * scores).sum(-1) / partition
            centred = scores.sub_(mean.unsqueeze(-1)).square_()
            variance = (weights * centred).sum(-1) / partition
            values.append(torch.stack([partition.log(), mean, mean + variance], dim=-1))
        return cls(torch.stack(values, dim=1), shifted.gather(-1, targets.unsqueeze(-1)).squeeze(-1))

    def sum(self) -> Profiles:
        """Return the profile (1, J, 3) of the summed cross-entropy of all rows."""
        return Profiles(self.values.double().sum(0, keepdim=True), self.target.double().sum(0, keepdim=True))

    def partition(self, log_beta: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
        """Return f, f′ and f″, each (N,), at u = `log_beta`: (N,) or one number; u is clamped to the range of the nodes."""
        values = self.values
        u = torch.as_tensor(log_beta, dtype=values.dtype, device=values.device).expand(len(values))
        last = values.shape[1] - 1
        place = ((u - _FIRST) / _STEP).clamp(0.0, last)
        left = place.long().clamp(max=last - 1)
        t = place - left
        rows = torch.arange(len(values), device=values.device)
        scale = values.new_tensor([1.0, _STEP, _STEP**2])
        ends = torch.cat([values[rows, left] * scale, values[rows, left + 1] * scale], dim=-1)
        c = (ends @ _BASIS.to(values)).unbind(-1)  # The coefficients of t⁰ … t⁵.
        f = ((((c[5] * t + c[4]) * t + c[3]) * t + c[2]) * t + c[1]) * t + c[0]
        first = (((5 * c[5] * t + 4 * c[4]) * t + 3 * c[3]) * t + 2 * c[2]) * t + c[1]
        second = ((20 * c[5] * t + 12 * c[4]) * t + 6 * c[3]) * t + 2 * c[2]
        return f, first / _STEP, second / _STEP**2

    def cross_entropy(self, log_beta: Tensor | float) -> Tensor:
        """Return the cross-entropy (N,) in nats at u = `log_beta`: (N,) or one number, in the range of the nodes."""
        f, _, _ = self.partition(log_beta)
        return f - torch.as_tensor(log_beta, dtype=f.dtype, device=f.device).exp() * self.target

    def score(self, log_beta: Tensor | float) -> tuple[Tensor, Tensor]:
        """Return g = s_y − E_p[s] and v = Var_p[s], each (N,), at u = `log_beta`.

        −g is the derivative of the cross-entropy in u; v is the expectation of its second derivative under p.
        """
        _, mean, second = self.partition(log_beta)
        beta = torch.as_tensor(log_beta, dtype=mean.dtype, device=mean.device).exp()
        return beta * self.target - mean, (second - mean).clamp(min=0.0)

    def best_constant(self) -> float:
        """Return the u = log β at which the summed cross-entropy is smallest, in the range of `NODES`."""
        total = self.sum()
        low, high = NODES[0].item(), NODES[-1].item()
        return minimise(lambda u: total.cross_entropy(u).item(), low, high, tolerance=1e-7)


def num_nodes_down_to(tau_min: float) -> int:
    """Return the number of nodes of a profile that reaches down to a temperature, at least `NUM_NODES`."""
    return max(NUM_NODES, 1 + math.ceil((-math.log(tau_min) - _FIRST) / _STEP - 1e-9))


def clamp_log_beta(log_beta: Tensor) -> Tensor:
    """Limit u = log β to the range that profiles cover."""
    return log_beta.clamp(NODES[0].item(), NODES[-1].item())
