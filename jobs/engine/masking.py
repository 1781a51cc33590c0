"""Masking of what only the one who gave it should know: the user and password of a URI."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

Value = TypeVar("Value")

MASK = "***"
# user:password@ of a URI. Written as they should be, neither holds a slash or an @; a password that does is masked as well,
# up to the last @ of the word.
_LOGIN = re.compile(r"(?<=://)(?:[^\s/]*:\S*|[^\s/]*)@")
# …?user=me&password=secret, as databases take it, or a whole connection in one value.
_QUERY = re.compile(r"(?i)(?<=[?&])([^\s=&]*(?:pass|pwd|token|secret|key|odbc_connect)[^\s=&]*)=[^\s&'\"]+")


def masked(value: Value) -> Value:
    """A text with the login of every URI in it replaced by `***`; a mapping, list or tuple with all its texts masked."""
    masking: Any = value
    if isinstance(masking, str):
        masking = _QUERY.sub(rf"\1={MASK}", _LOGIN.sub(f"{MASK}@", masking))
    elif isinstance(masking, Mapping):
        masking = {key: masked(item) for key, item in masking.items()}
    elif isinstance(masking, list | tuple):
        masking = type(masking)(masked(item) for item in masking)
    return masking
