"""What may be shown of foreign text: no user names, passwords and other secrets in URIs, and no control characters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

Value = TypeVar("Value")

MASK = "***"
# Matches `user:password@` in a URI. Correctly encoded, neither holds a slash or an @; a password that does nevertheless
# is masked too, up to the last @ of the word.
_LOGIN = re.compile(r"(?<=://)(?:[^\s/]*:\S*|[^\s/]*)@")
# Matches secrets among the query parameters and in the fragment: `…?user=me&password=secret`, which databases accept,
# `odbc_connect`, which holds a whole connection string, the signatures of presigned URIs (`sig`, `X-Amz-Signature`), and
# `#access_token=…`.
_SECRET_WORDS = "pass|pwd|token|secret|key|signature|credential|odbc_connect"
_QUERY = re.compile(rf"(?i)(?<=[?&#])([^\s=&#]*(?:{_SECRET_WORDS})[^\s=&#]*|sig)=[^\s&#'\"]+")


# All control characters but tabs and line feeds: a terminal would act on them, and some can hide text or type commands.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Return a text with its control characters escaped, such as the names of files and records hold them."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def masked(value: Value) -> Value:
    """Replace the logins and secrets of all URIs in a text by `***`; also masks all texts in a mapping, list or tuple."""
    masking: Any = value
    if isinstance(masking, str):
        masking = _QUERY.sub(rf"\1={MASK}", _LOGIN.sub(f"{MASK}@", masking))
    elif isinstance(masking, Mapping):
        masking = {key: masked(item) for key, item in masking.items()}
    elif isinstance(masking, list | tuple):
        masking = type(masking)(masked(item) for item in masking)
    return masking
