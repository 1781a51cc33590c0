"""Determines the Git revision of the code that a job runs: from the checkout, or else from `TEMPNET_REVISION`."""

from __future__ import annotations

import os
import re
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

VARIABLE = "TEMPNET_REVISION"
"""Name of the environment variable that gives a job the revision of its code if the code is not a Git checkout."""
ROOT = Path(__file__).parents[2]
_DIRTY = "-dirty"


def revision_tags() -> dict[str, str]:
    """Return the tags `git.revision` and `git.dirty` from this checkout, or else from $TEMPNET_REVISION.

    If neither exists, `git.revision` says that the revision is not recorded, and there is no `git.dirty`.
    """
    revision = checkout_revision() or os.environ.get(VARIABLE, "").strip()
    if not revision:
        return {"git.revision": f"not recorded: this code is no git checkout, and {VARIABLE} is not set"}
    return {"git.revision": revision.removesuffix(_DIRTY), "git.dirty": str(revision.endswith(_DIRTY)).lower()}


def checkout_revision(root: Path = ROOT) -> str:
    """Return the commit of a checkout, followed by `-dirty` if files have changed or are new; empty without a checkout."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    # Git itself would also search the parent directories, where it might find the checkout of another project.
    if not (root / ".git").exists():
        return ""
    try:
        return git("rev-parse", "HEAD") + (_DIRTY if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


LOCK = ROOT / "requirements.lock"
LOCKED_VARIABLE = "TEMPNET_LOCKED"
"""Name of the environment variable that makes a job check the packages of its machine."""
_NUM_SHOWN = 5


def check_locked(lock: Path = LOCK) -> None:
    """Check every installed package that the lock names; the local part of a version (`+cpu`) does not count."""
    if not lock.is_file():
        raise ValueError(f"{LOCKED_VARIABLE} is set, but {lock} is missing: the packages cannot be checked")
    differing = []
    for name, wanted in re.findall(r"^([\w.-]+)==(\S+)$", lock.read_text(), re.MULTILINE):
        with suppress(PackageNotFoundError):
            if (found := version(name)).partition("+")[0] != wanted.partition("+")[0]:
                differing.append(f"{name} {found} instead of {wanted}")
    if differing:
        shown = "; ".join(sorted(differing)[:_NUM_SHOWN])
        more = f" and {len(differing) - _NUM_SHOWN} more" if len(differing) > _NUM_SHOWN else ""
        raise ValueError(
            f"the packages of this machine are not those of {lock.name}: {shown}{more}. Install them by `make setup` or "
            "from the image, or submit with --environment pip or unchecked"
        )
