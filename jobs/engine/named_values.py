"""Parses lists of NAME=VALUE given on a command line."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence


def named_values(field_name: str, values: Sequence[str]) -> dict[str, str]:
    """Parse a list of `NAME=VALUE` into a dictionary.

    Args:
        field_name: name of the option, for error messages.
        values: the list.

    Raises:
        ValueError: if an entry is not `NAME=VALUE`, its name has other characters than letters, digits and `-_.`, or a
            name occurs twice.
    """
    split = [text.partition("=") for text in values]
    for text, (name, _, value) in zip(values, split, strict=True):
        if not (name and value) or not all(character.isalnum() or character in "-_." for character in name):
            raise ValueError(f"{field_name}: {text!r} is not NAME=VALUE, with letters, digits and -_. in the name")
    if again := find_duplicate(name for name, _, _ in split):
        raise ValueError(f"{field_name} names {again!r} twice")
    return {name: value for name, _, value in split}


def parse_resources(field_name: str, values: Sequence[str]) -> dict[str, float]:
    """Parse a list of `NAME=AMOUNT` of custom Ray resources into a dictionary.

    Raises:
        ValueError: as :func:`named_values`, or if an amount is not a positive number.
    """
    resources: dict[str, float] = {}
    for name, amount in named_values(field_name, values).items():
        try:
            resources[name] = float(amount)
        except ValueError:
            resources[name] = 0.0
        if not 0.0 < resources[name] < math.inf:
            raise ValueError(f"{field_name}: the amount of {name}={amount} must be a positive number, such as 0.1")
    return resources


def find_duplicate(names: Iterable[str]) -> str:
    """Return the first name that occurs more than once; empty if there is none."""
    return next((name for name, count in Counter(names).items() if count > 1), "")
