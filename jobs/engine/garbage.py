"""How often Python looks for garbage that refers to itself."""

from __future__ import annotations

import gc

_NUM_NEW_OBJECTS = 10_000


def collect_seldom() -> None:
    """Let this process look for garbage after 10 000 new objects, where Python does it after 700.

    Importing the libraries of a job leaves a million objects, of which hardly any is garbage, and looking through them
    again and again takes a part of every start.
    """
    gc.set_threshold(_NUM_NEW_OBJECTS)
