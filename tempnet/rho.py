"""The radius ρ of the KL ball of the robust loss, in nats, and the entropy H = log K − ρ that it asks for.

ρ has a meaning only together with the number K of contrasts (for a language model, its effective vocabulary). PyTorch is
not needed here, so that configurations are checked before it is imported. The formulas are in `tempnet.dro`.
"""

from __future__ import annotations

import math


def rho_from_target_entropy(target_entropy: float, num_contrasts: int) -> float:
    """Return ρ = log K − H for a target entropy H in nats; H outside (0, log K] raises ValueError."""
    log_k = math.log(num_contrasts)
    if not 0.0 < target_entropy <= log_k:
        raise ValueError(
            f"target_entropy = {target_entropy:g} nats is impossible with {num_contrasts} contrasts: "
            f"choose a value in (0, log {num_contrasts} = {log_k:.4f}]"
        )
    return log_k - target_entropy


def target_entropy_from_rho(rho: float, num_contrasts: int) -> float:
    """Return H = log K − ρ in nats, the entropy of softmax(L/τ*) at an interior optimum τ*.

    An infeasible ρ raises ValueError, see :func:`check_rho`.
    """
    check_rho(rho, num_contrasts)
    return math.log(num_contrasts) - rho


def check_rho(rho: float, num_contrasts: int) -> None:
    """Raise ValueError for a ρ outside [0, log K); the message names ρ, K, the allowed range and what to choose.

    At or above log K the constraint is never active, and every temperature would go to its lower bound.
    """
    log_k = math.log(num_contrasts)
    if not 0.0 <= rho < log_k:
        raise ValueError(
            f"rho = {rho:g} is outside [0, log K) = [0, {log_k:.4f}) for K = {num_contrasts} contrasts (for a language "
            f"model, its effective vocabulary). rho asks for an entropy of log K − rho nats; choose rho below "
            f"{log_k:.4f}, or give target_entropy in nats instead, near the cross-entropy that the model reaches in the "
            f"middle of the run, for example target_entropy = {min(4.0, log_k / 2):.2f} "
            f"(rho = {log_k - min(4.0, log_k / 2):.2f})"
        )
