"""What a server and its requests say about the TempNet: environment variables, and arguments of each request.

A server finds its TempNet in the directory or under the hub name that TEMPNET_PATH holds. TEMPNET_DEFAULT=on applies
it to every request that does not say otherwise; by default a request must ask for it. The arguments of a request are

    tempnet             true or false (also 1, 0, "on", "off"): whether its tokens are sampled at predicted temperatures
    tempnet_tau_max     τ_max of this request, which takes the place of the TempNet's own; it implies tempnet = true
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PATH_VARIABLE = "TEMPNET_PATH"
DEFAULT_VARIABLE = "TEMPNET_DEFAULT"
SWITCH_ARGUMENT = "tempnet"
TAU_MAX_ARGUMENT = "tempnet_tau_max"

_SWITCHES = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTemperature:
    """What one request asks for."""

    is_on: bool | None
    """Whether its tokens are to be sampled at predicted temperatures; None if the request does not say."""
    tau_max: float | None
    """τ_max of the request; None for the TempNet's own."""

    @classmethod
    def parse(cls, arguments: Mapping[str, Any] | None) -> RequestTemperature:
        """Read the arguments of a request; those that are not about the TempNet are ignored.

        Raises:
            ValueError: if a value is not legal; the message names the argument, the value and what is legal.
        """
        arguments = arguments or {}
        switch, tau_max = arguments.get(SWITCH_ARGUMENT), arguments.get(TAU_MAX_ARGUMENT)
        is_on = None if switch is None else _parse_switch(SWITCH_ARGUMENT, switch)
        if tau_max is not None:
            is_number = isinstance(tau_max, int | float) and not isinstance(tau_max, bool)
            if not (is_number and math.isfinite(tau_max) and tau_max > 0.0):
                raise ValueError(f"{TAU_MAX_ARGUMENT} = {tau_max!r} must be a finite number above 0")
            is_on = True if is_on is None else is_on
        return cls(is_on=is_on, tau_max=None if tau_max is None else float(tau_max))


def is_on_by_default() -> bool:
    """Return whether TEMPNET_DEFAULT applies the TempNet to requests that do not say.

    Raises:
        ValueError: if the variable holds something else than a switch.
    """
    return _parse_switch(DEFAULT_VARIABLE, os.environ.get(DEFAULT_VARIABLE) or "off")


def network_path() -> str | None:
    """Return the directory or hub name that TEMPNET_PATH holds, or None if it is not set."""
    return os.environ.get(PATH_VARIABLE) or None


def _parse_switch(name: str, value: Any) -> bool:
    text = "1" if value is True or value == 1 else "0" if value is False or value == 0 else str(value).lower()
    if text not in _SWITCHES:
        raise ValueError(f"{name} = {value!r} is none of true, false, 1, 0, 'on', 'off'")
    return _SWITCHES[text]
