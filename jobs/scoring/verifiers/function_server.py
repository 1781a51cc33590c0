"""The process of a function that verifies: `python -m jobs.scoring.verifiers.function_server MODULE:FUNCTION`.

Its first line says whether the function was imported. Then it reads a sample as JSON, one a line, and answers with one
line: `value`, what the function returned, and `problem`, which is empty unless it raised an exception. What the function
prints goes to the standard error, because the standard output holds the answers. It ends with the process that started it,
also from within a function that hangs.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

_SECONDS_BETWEEN_LOOKS = 1.0


def main(name: str) -> None:
    """Import the function and answer until the input ends."""
    threading.Thread(target=_end_with_parent, args=[os.getppid()], daemon=True).start()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)

        def answer(value: Any = None, problem: str = "") -> None:
            answers.write(json.dumps({"value": value, "problem": problem}) + "\n")
            answers.flush()

        try:
            function = load_function(name)
        except Exception as error:
            answer(problem=describe(error))
            return
        answer()
        for line in sys.stdin.buffer:
            try:
                value = function(json.loads(line))
                number = hasattr(value, "__float__") and not isinstance(value, str)
                answer(float(value) if number else repr(value)[:100])
            except Exception as error:
                answer(problem=describe(error))


def load_function(name: str) -> Callable[[dict[str, Any]], Any]:
    """Import a function by its name MODULE:FUNCTION.

    Raises:
        TypeError: if it is no function; and what the import of its module raises.
    """
    module, _, attribute = name.partition(":")
    function = getattr(importlib.import_module(module), attribute)
    if not callable(function):
        raise TypeError(f"{attribute} is a {type(function).__name__} and no function")
    loaded: Callable[[dict[str, Any]], Any] = function
    return loaded


def _end_with_parent(parent: int) -> None:
    """End this process once it has another parent than the given one, which has died then."""
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    os._exit(1)


def describe(error: Exception) -> str:
    """Return an exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


if __name__ == "__main__":
    main(sys.argv[1])
