"""Say in one line what is wrong with an object store (the URI, the cause, the variables to set), and count what is repeated.

pyarrow reports every failure of a store as an OSError without a number, whose text holds the store's own name for it.

Every process counts its own repeated requests (`RETRIES`). The count of a task travels with its batches, results or rows
to the process that asked for it, which adds it to its own.
"""

from __future__ import annotations

import inspect
import math
import random
import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_ACCESS = (
    "ACCESS_DENIED",
    "INVALID_ACCESS_KEY",
    "INVALID_CLIENT_TOKEN",
    "SIGNATURE",
    "MISSING_AUTHENTICATION_TOKEN",
    "UNRECOGNIZED_CLIENT",
    "EXPIRED_TOKEN",
    "OPT_IN_REQUIRED",
    "HTTP status 401",
    "HTTP status 403",
    "Permission denied",
    "PERMISSION_DENIED",
    "UNAUTHENTICATED",
)
_BUCKET = ("NO_SUCH_BUCKET", "Bucket '", "bucket does not exist")
_MISSING = ("NO_SUCH_KEY", "RESOURCE_NOT_FOUND", "Path does not exist", "HTTP status 404")
_UNREACHABLE = ("Could not connect", "Could not resolve", "Couldn't connect", "Couldn't resolve", "Timeout was reached")


_NUM_ATTEMPTS = 8
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 5.0  # in seconds
# Separate from the global generator, whose state is not this module's to change.
_jitter = random.Random()


class RefusedWriteError(PermissionError):
    """An object store denies writing at a URI; reading may work."""


def persist(call: Callable[[], Result], unless: tuple[str, ...] = ()) -> Result:
    """Return what a call returns that may be repeated, asking again after pauses that double while that may help.

    No error is asked again whose text holds one of `unless`.

    pyarrow repeats some requests itself, but neither an answer 503 that is longer than the small object that was asked for
    (INTERNAL_FAILURE) nor more than three in a row.
    """
    for attempt in range(_NUM_ATTEMPTS):
        try:
            return call()
        except OSError as error:
            is_final = isinstance(error, FileNotFoundError | PermissionError)  # the same answer would come again
            if is_final or _holds(str(error), _ACCESS + _BUCKET + _MISSING + unless) or attempt == _NUM_ATTEMPTS - 1:
                raise
            RETRIES.add()
            time.sleep(min(_FIRST_PAUSE * 2**attempt, _LONGEST_PAUSE) * _jitter.uniform(0.5, 1.0))
    raise AssertionError


def explain(error: OSError, uri: str) -> OSError:
    """Return an error with one line for people in place of pyarrow's, of a store that was to be read at a URI."""
    text = " ".join(str(error).split())
    keys, endpoint = _variables(uri)
    if _holds(text, _BUCKET):
        return FileNotFoundError(
            f"{uri}: there is no such bucket here: correct the name, or set {endpoint} to the store that has it ({text})"
        )
    if isinstance(error, FileNotFoundError) or _holds(text, _MISSING):
        return FileNotFoundError(f"{uri}: there is no such object in the store, or it was deleted ({text})")
    if isinstance(error, PermissionError) or _holds(text, _ACCESS):
        return PermissionError(f"{uri}: the store refuses access: set {keys} to credentials that allow it ({text})")
    if _holds(text, _UNREACHABLE):
        return ConnectionError(f"{uri}: the store cannot be reached: set {endpoint}, or check the network ({text})")
    return OSError(f"{uri}: the store failed, also when asked again ({text})")


def explain_write(error: OSError, uri: str) -> OSError:
    """Return an error with one line for people in place of pyarrow's, of a store that was to be written to at a URI."""
    if isinstance(error, RefusedWriteError):
        return error
    if not isinstance(error, PermissionError) and not _holds(str(error), _ACCESS):
        return explain(error, uri)
    text = " ".join(str(error).split())
    return RefusedWriteError(
        f"{uri}: the store refuses to write there: check that {_variables(uri)[0]} are credentials with the permission to "
        f"write, and that the bucket is not read-only ({text})"
    )


def is_store(uri: str) -> bool:
    """Return whether a URI names an object store, and not files of this machine."""
    return "://" in uri and not uri.startswith("file:")


def _explaining(
    explain_error: Callable[[OSError, str], OSError],
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        signature = inspect.signature(function)

        @wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            uri = str(next(iter(signature.bind(*args, **kwargs).arguments.values())))
            if not is_store(uri):
                return function(*args, **kwargs)
            try:
                # A store that cannot be reached at all is named at once.
                return persist(lambda: function(*args, **kwargs), unless=(uri, *_UNREACHABLE))
            except OSError as error:
                if uri in str(error):  # It comes from this project, and is explained already.
                    raise
                raise explain_error(error, uri) from error

        return call

    return decorate


names_store = _explaining(explain)
"""Decorator of a function whose first argument is a URI that it reads: errors of a store are explained (`explain`)."""
names_written_store = _explaining(explain_write)
"""Decorator of a function whose first argument is a URI that it writes: errors of a store are explained."""


def _holds(text: str, names: tuple[str, ...]) -> bool:
    return any(name in text for name in names)


def _variables(uri: str) -> tuple[str, str]:
    """Return the environment variables that hold the credentials and the address of the store of a URI."""
    if uri.startswith(("gs://", "gcs://")):
        return "GOOGLE_APPLICATION_CREDENTIALS", "STORAGE_EMULATOR_HOST"
    if uri.startswith(("abfs://", "abfss://")):
        return "AZURE_CLIENT_ID, AZURE_TENANT_ID and AZURE_CLIENT_SECRET", "the account in the URI"
    return "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE)", "AWS_ENDPOINT_URL and AWS_DEFAULT_REGION"


SECONDS_BETWEEN_LINES = 60.0
"""Least number of seconds between two lines about repeated requests."""


class Retries:
    """Number of repeated requests: those of this process, and those that it has received from others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_waiting = 0

    def __reduce__(self) -> str:
        """Pickle `RETRIES` by its name: functions that are sent to another process count there."""
        return "RETRIES"

    def add(self, number: int = 1) -> None:
        """Count requests that are repeated here, or what `take` has returned in another process."""
        with self._lock:
            self._num_waiting += number

    def take(self) -> int:
        """Return the number that was counted since the last call, so that it is counted once."""
        with self._lock:
            taken, self._num_waiting = self._num_waiting, 0
        return taken


RETRIES = Retries()
"""The repeated requests that this process knows of."""


class RetryLog:
    """Adds up repeated requests, also those before a restart (`total`), and says at most once a minute what is new."""

    def __init__(
        self, say: Callable[[str], None], total: int = 0, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say, self._clock, self._said_at, self._num_said = say, clock, -math.inf, total
        self.total = total
        """Number of all repeated requests."""

    def add(self, number: int) -> None:
        """Add what `Retries.take` has returned, which may be 0, and say what is new if the minute is over."""
        self.total += number
        if self._clock() - self._said_at >= SECONDS_BETWEEN_LINES:
            self.close()

    def close(self) -> None:
        """Say what was not said yet."""
        if self.total > self._num_said:
            self._say(describe_retries(self.total - self._num_said, self.total))
            self._said_at, self._num_said = self._clock(), self.total


def describe_retries(number: int, total: int) -> str:
    """Describe a number of new repeated requests, of a total so far, in one line."""
    return f"requests to an object store failed and were repeated: {number}; {total} so far"
