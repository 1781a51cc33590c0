"""Check the source of a model or tokenizer: a local path, a URI, or a name on the Hugging Face hub.

What lies at a URI is checked after it was copied (`pipelines.local_copy`), as a local path.
"""

from __future__ import annotations

import os
import re
import urllib.error
import urllib.request
from pathlib import Path

from pipelines.local_copy import local_copy

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_SECONDS_TO_ANSWER = 5
# If a model or a tokenizer is in the local cache of the hub, so is at least one of these files.
_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")


def checked_copy(source: str, field: str, *, with_weights: bool = True) -> str:
    """Return what Transformers can load a model or tokenizer from: a path on this machine, or a hub name.

    Args:
        source: local path, URI or hub name.
        field: what the error message begins with, such as `model.path = `.
        with_weights: whether to copy the weights of a model at a URI.

    Raises:
        ValueError: if the source cannot be used; the message names the field and the source.
    """
    try:
        place = local_copy(source, with_weights=with_weights)
        check_source(place)
    except ValueError as error:
        raise ValueError(f"{field}{error}") from error
    return place


def check_source(source: str) -> None:
    """Reject a local path that does not exist, and a hub name that is not in the cache if the hub cannot be reached.

    Without this check, Transformers treats a missing path as a misspelt hub name, and without a network it keeps
    trying to reach the hub for half a minute.

    Raises:
        ValueError: if the source cannot be used; the message names it.
    """
    path = Path(source).expanduser()
    if path.exists():
        return
    if (
        not _HUB_NAME.fullmatch(source)
        or source.startswith(".")
        or (len(path.parts) > 1 and Path(path.parts[0]).is_dir())
    ):
        raise ValueError(f"{source!r} is missing: there is no such file or directory")
    _check_hub(source)


def _check_hub(name: str) -> None:
    # Imported here because it comes with Transformers, and processes that only receive a pickled tokenizer need
    # neither.
    from huggingface_hub import constants, try_to_load_from_cache

    if constants.HF_HUB_OFFLINE:
        return
    try:
        with urllib.request.urlopen(constants.ENDPOINT, timeout=_SECONDS_TO_ANSWER):
            pass
    except urllib.error.HTTPError:
        pass  # An HTTP error is still an answer: the hub can be reached.
    except OSError as error:
        if any(isinstance(try_to_load_from_cache(name, file), str) for file in _FILES):
            # Otherwise the hub's client asks again and again, for every file, before it takes what is in the cache.
            constants.HF_HUB_OFFLINE, os.environ["HF_HUB_OFFLINE"] = True, "1"
            print(f"the hub at {constants.ENDPOINT} does not answer: {name} is read from its cache here", flush=True)
            return
        raise ValueError(
            f"{name!r} is no local directory, and the hub at {constants.ENDPOINT} cannot be reached from here: give the "
            "path of a directory"
        ) from error
