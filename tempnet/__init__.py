"""Learned softmax temperatures: the robust loss, the temperature network (TempNet), and the models that use them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tempnet.dro import robust_loss, temperature_derivatives  # noqa: F401 - exported by `_PLACES`
    from tempnet.network import TempNet  # noqa: F401
    from tempnet.network_config import TempNetConfig  # noqa: F401
    from tempnet.oracle import best_constant_temperature, optimal_temperature, temperature_curve  # noqa: F401
    from tempnet.rho import check_rho, rho_from_target_entropy, target_entropy_from_rho  # noqa: F401

# Imported on first use: they import PyTorch, which takes seconds that the help of a command need not wait for.
_PLACES = {
    "TempNet": "network",
    "TempNetConfig": "network_config",
    "best_constant_temperature": "oracle",
    "check_rho": "rho",
    "optimal_temperature": "oracle",
    "rho_from_target_entropy": "rho",
    "robust_loss": "dro",
    "target_entropy_from_rho": "rho",
    "temperature_curve": "oracle",
    "temperature_derivatives": "dro",
}

__all__ = [*_PLACES]


def __getattr__(name: str) -> Any:
    """Import what the package exports when it is used."""
    if name in _PLACES:
        return getattr(import_module(f"tempnet.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
