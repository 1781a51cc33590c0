"""Learned softmax temperatures: the robust loss, the temperature network (TempNet), and the models that use them."""

from tempnet.dro import (
    check_rho,
    rho_from_target_entropy,
    robust_loss,
    target_entropy_from_rho,
    temperature_derivatives,
)
from tempnet.network import TempNet
from tempnet.network_config import TempNetConfig
from tempnet.oracle import best_constant_temperature, optimal_temperature, temperature_curve

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
