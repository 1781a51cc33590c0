"""Checks of the values of a configuration's section, whose errors name the field and say what is legal."""

from __future__ import annotations

import math
from typing import Any


def check_positive(section: str, config: Any, *names: str) -> None:
    """Raise ValueError if a named value of a section is not positive or not finite."""
    for name in names:
        value = getattr(config, name)
        if not 0 < value < math.inf:  # also refuses NaN
            raise ValueError(f"{section}.{name} = {value} must be positive" + (" and finite" if value > 0 else ""))


def check_not_negative(section: str, config: Any, *names: str) -> None:
    """Raise ValueError if a named value of a section is negative or not finite."""
    for name in names:
        value = getattr(config, name)
        if not 0 <= value < math.inf:
            raise ValueError(f"{section}.{name} = {value} must not be negative" + (" but finite" if value > 0 else ""))


def check_share(section: str, config: Any, *names: str) -> None:
    """Raise ValueError if a named value of a section does not lie in [0, 1]."""
    for name in names:
        value = getattr(config, name)
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{section}.{name} = {value:g} must lie in [0, 1]")
