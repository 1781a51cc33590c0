"""Learned softmax temperatures: the robust loss, the temperature network (TempNet), and the models that use them."""

from tempnet.dro import (
    best_constant_temperature,
    check_rho,
    optimal_temperature,
    rho_from_target_entropy,
    robust_loss,
    target_entropy_from_rho,
    temperature_curve,
    temperature_derivatives,
)
from tempnet.network import TempNet, TempNetConfig

__all__ = [
    "TempNet",
    "TempNetConfig",
    "best_constant_temperature",
    "check_rho",
    "optimal_temperature",
    "rho_from_target_entropy",
    "robust_loss",
    "target_entropy_from_rho",
    "temperature_curve",
    "temperature_derivatives",
]
