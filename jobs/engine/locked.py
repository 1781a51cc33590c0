"""Checks that the installed packages have the versions of requirements.lock, for jobs that are submitted to a cluster."""

from __future__ import annotations

import re
from importlib.metadata import distributions
from pathlib import Path

LOCK = Path(__file__).parents[2] / "requirements.lock"
LOCKED_VARIABLE = "TEMPNET_LOCKED"
"""Name of the environment variable that makes a job check the packages of its machine."""
_NUM_SHOWN = 5


def check_locked(lock: Path = LOCK) -> None:
    """Check every installed package that the lock names; the local part of a version (`+cpu`) does not count.

    Raises:
        ValueError: if there is no lock or a version differs; the message shows the first packages.
    """
    if not lock.is_file():
        raise ValueError(f"{LOCKED_VARIABLE} is set, but {lock} is missing: the packages cannot be checked")
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", lock.read_text(), re.MULTILINE))
    wanted = {_normal(name): version for name, version in pinned.items()}
    differing, seen = [], set()
    for package in distributions():
        name = _normal(package.metadata["Name"] or "")
        # Only the first of a name is imported: setuptools adds older copies of some packages at the end of the path.
        is_first = name not in seen
        seen.add(name)
        if is_first and name in wanted and package.version.partition("+")[0] != wanted[name].partition("+")[0]:
            differing.append(f"{name} {package.version} instead of {wanted[name]}")
    if differing:
        shown = "; ".join(sorted(differing)[:_NUM_SHOWN])
        more = f" and {len(differing) - _NUM_SHOWN} more" if len(differing) > _NUM_SHOWN else ""
        raise ValueError(
            f"the packages of this machine are not those of {lock.name}: {shown}{more}. Install them by `make setup` or "
            "from the image, or submit with --environment pip or unchecked"
        )


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
