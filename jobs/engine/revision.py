"""Determines the Git revision of the code that a job runs: from the checkout, or else from `TEMPNET_REVISION`."""

from __future__ import annotations

import os
import subprocess
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
