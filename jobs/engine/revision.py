"""The revision of the code that a job runs: of the checkout, or as `TEMPNET_REVISION` tells it where there is none."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

VARIABLE = "TEMPNET_REVISION"
"""Environment variable that tells a job the revision of its code where there is no checkout."""
ROOT = Path(__file__).parents[2]
_DIRTY = "-dirty"


def revision_tags() -> dict[str, str]:
    """`git.revision` and `git.dirty` of this checkout or else of $TEMPNET_REVISION; without both, `git.revision` says so."""
    revision = checkout_revision() or os.environ.get(VARIABLE, "").strip()
    if not revision:
        return {"git.revision": f"not recorded: this code is no git checkout, and {VARIABLE} is not set"}
    return {"git.revision": revision.removesuffix(_DIRTY), "git.dirty": str(revision.endswith(_DIRTY)).lower()}


def checkout_revision(root: Path = ROOT) -> str:
    """The commit of a checkout, followed by `-dirty` if files have changed or are new; empty if the code is no checkout."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    # Git itself would look for one in the directories above, too, which is another project's.
    if not (root / ".git").exists():
        return ""
    try:
        return git("rev-parse", "HEAD") + (_DIRTY if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""
