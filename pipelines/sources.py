"""Where models and tokenizers come from: a local path, or the hub."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from pathlib import Path

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_SECONDS_TO_ANSWER = 5
# One of them is in the cache of the hub if a model or a tokenizer is.
_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")


def check_source(source: str) -> None:
    """Refuse a path that is not there and a hub that cannot be reached. Transformers takes a missing path for a hub name
    that is misspelt, and tries a hub without a network for half a minute.

    Raises:
        ValueError: naming the source.
    """
    path = Path(source).expanduser()
    if path.exists():
        return
    if "://" in source:
        raise ValueError(
            f"{source!r} is a URI, but models and tokenizers are read from a local path or by a hub name: copy it to a "
            "directory that all machines share"
        )
    if (
        not _HUB_NAME.fullmatch(source)
        or source.startswith(".")
        or (len(path.parts) > 1 and Path(path.parts[0]).is_dir())
    ):
        raise ValueError(f"{source!r} is missing: there is no such file or directory")
    _check_hub(source)


def _check_hub(name: str) -> None:
    # Transformers brings it; readers that are only sent a tokenizer need neither.
    from huggingface_hub import constants, try_to_load_from_cache

    if constants.HF_HUB_OFFLINE or any(isinstance(try_to_load_from_cache(name, file), str) for file in _FILES):
        return
    try:
        with urllib.request.urlopen(constants.ENDPOINT, timeout=_SECONDS_TO_ANSWER):
            pass
    except urllib.error.HTTPError:
        pass  # it answers
    except OSError as error:
        raise ValueError(
            f"{name!r} is no local directory, and the hub at {constants.ENDPOINT} cannot be reached from here: give the "
            "path of a directory"
        ) from error
