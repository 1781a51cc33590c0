"""Parses lists of NAME=VALUE given on a command line."""

from __future__ import annotations

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
    if again := twice(name for name, _, _ in split):
        raise ValueError(f"{field_name} names {again!r} twice")
    return {name: value for name, _, value in split}


def twice(names: Iterable[str]) -> str:
    """Return the first name that occurs more than once; empty if there is none."""
    return next((name for name, count in Counter(names).items() if count > 1), "")
