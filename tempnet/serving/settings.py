"""What a server and its requests say about the TempNet: environment variables, and arguments of each request.

A server finds its TempNet in the directory or under the hub name that TEMPNET_PATH holds. TEMPNET_DEFAULT=on applies
it to every request that does not say otherwise; by default a request must ask for it. The arguments of a request are

    tempnet             true or false (also 1, 0, "on", "off"): whether its tokens are sampled at predicted temperatures
    tempnet_tau_max     τ_max of this request, which takes the place of the TempNet's own
    tempnet_tau         a constant τ in the place of predicted ones
    tempnet_then        what follows: "on", "off" (or 0), or a constant τ; 1 is refused, as vLLM turns true into it: say 1.0
    tempnet_then_after  number of generated tokens after which it follows
    tempnet_then_at     token after which it follows: its id, or its text, such as "</think>"

If `tempnet` is left out, any other of them implies that it is true. With both tempnet_then_after and tempnet_then_at the
earlier one counts.
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
TAU_ARGUMENT = "tempnet_tau"
THEN_ARGUMENT = "tempnet_then"
AFTER_ARGUMENT = "tempnet_then_after"
AT_ARGUMENT = "tempnet_then_at"
_ARGUMENTS = (SWITCH_ARGUMENT, TAU_MAX_ARGUMENT, TAU_ARGUMENT, THEN_ARGUMENT, AFTER_ARGUMENT, AT_ARGUMENT)

_SWITCHES = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}

OFF = 0.0
"""Setting of a row without a TempNet. A positive setting is τ_max of predicted temperatures, a negative one −τ of a
constant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTemperature:
    """The arguments of one request, in the order of this module's docstring; None for those that it does not give."""

    is_on: bool | None
    tau_max: float | None
    tau: float | None
    then: bool | float | None
    after: int | None
    at: int | str | None

    @property
    def is_ever_on(self) -> bool:
        """Whether the request asks for a temperature at any time."""
        return bool(self.is_on) or self.then not in (None, False)

    def settings(self, own_tau_max: float, *, is_on_by_default: bool) -> tuple[float, float]:
        """Return the settings (see :data:`OFF`) of the tokens before and after the switch."""
        predicted = own_tau_max if self.tau_max is None else self.tau_max
        is_on = is_on_by_default if self.is_on is None else self.is_on
        first = OFF if not is_on else predicted if self.tau is None else -self.tau
        if self.then is None:
            return first, first
        return first, (predicted if self.then else OFF) if isinstance(self.then, bool) else -self.then

    @classmethod
    def parse(cls, arguments: Mapping[str, Any] | None) -> RequestTemperature:
        """Read the arguments of a request; those whose names do not begin with "tempnet" are ignored.

        A name or value that is not legal raises ValueError, which names the argument, the value and what is legal.
        """
        given = {name: value for name, value in (arguments or {}).items() if value is not None}
        if unknown := [name for name in given if name.startswith(SWITCH_ARGUMENT) and name not in _ARGUMENTS]:
            raise ValueError(f"{unknown[0]} is none of {', '.join(_ARGUMENTS)}")
        switch, then = given.get(SWITCH_ARGUMENT), given.get(THEN_ARGUMENT)
        is_on = None if switch is None else _parse_switch(SWITCH_ARGUMENT, switch)
        if is_on is None and any(name in given for name in _ARGUMENTS):
            is_on = True
        if type(then) is int and then == 1:
            raise ValueError(f"{THEN_ARGUMENT} = 1 may be a τ, or a true that became a number: say 1.0, 'on' or 'off'")
        if isinstance(then, str | bool) or then == 0:
            then = _parse_switch(THEN_ARGUMENT, then)
        elif then is not None:
            then = _parse_positive(THEN_ARGUMENT, then)
        after, at = given.get(AFTER_ARGUMENT), given.get(AT_ARGUMENT)
        if after is not None and (type(after) is not int or after < 1):
            raise ValueError(f"{AFTER_ARGUMENT} = {after!r} must be a whole number of tokens, at least 1")
        if at is not None and not (isinstance(at, str) and at) and (type(at) is not int or at < 0):
            raise ValueError(f"{AT_ARGUMENT} = {at!r} must be the id of a token, or its text")
        if (then is None) != (after is None and at is None):
            raise ValueError(
                f"{THEN_ARGUMENT} needs {AFTER_ARGUMENT} or {AT_ARGUMENT}, and each of these needs {THEN_ARGUMENT}"
            )
        tau_max, tau = (
            _parse_positive(name, given[name]) if name in given else None for name in (TAU_MAX_ARGUMENT, TAU_ARGUMENT)
        )
        return cls(is_on=is_on, tau_max=tau_max, tau=tau, then=then, after=after, at=at)


def is_on_by_default() -> bool:
    """Return whether TEMPNET_DEFAULT applies the TempNet to requests that do not say; ValueError if it is no switch."""
    return _parse_switch(DEFAULT_VARIABLE, os.environ.get(DEFAULT_VARIABLE) or "off")


def network_path() -> str | None:
    """Return the directory or hub name that TEMPNET_PATH holds, or None if it is not set."""
    return os.environ.get(PATH_VARIABLE) or None


def _parse_positive(name: str, value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0.0:
        return float(value)
    raise ValueError(f"{name} = {value!r} must be a finite number above 0")


def _parse_switch(name: str, value: Any) -> bool:
    text = "1" if value is True or value == 1 else "0" if value is False or value == 0 else str(value).lower()
    if text not in _SWITCHES:
        raise ValueError(f"{name} = {value!r} is none of true, false, 1, 0, 'on', 'off'")
    return _SWITCHES[text]
