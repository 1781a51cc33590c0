"""The revision of the code, for a job that is submitted: Ray leaves `.git` out of what it uploads.

python -m jobs.revision

A submission hands it on as `env TEMPNET_REVISION=$(python -m jobs.revision)`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from jobs.engine.command_line import fail, run_job

VARIABLE = "TEMPNET_REVISION"
"""Environment variable that tells a job the revision of its code where there is no checkout."""
_ROOT = Path(__file__).parents[1]
_DIRTY = "-dirty"


def revision_tags() -> dict[str, str]:
    """`git.revision` and `git.dirty` of this checkout or else of $TEMPNET_REVISION; without both, `git.revision` says so."""
    revision = checkout_revision() or os.environ.get(VARIABLE, "").strip()
    if not revision:
        return {"git.revision": f"not recorded: this code is no git checkout, and {VARIABLE} is not set"}
    return {"git.revision": revision.removesuffix(_DIRTY), "git.dirty": str(revision.endswith(_DIRTY)).lower()}


def checkout_revision(root: Path = _ROOT) -> str:
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


def main(arguments: Sequence[str]) -> int:
    """Print the revision."""
    if arguments and arguments[0] in ("-h", "--help"):
        print((__doc__ or "").strip() + "\n\nusage: python -m jobs.revision")
        return 0
    if arguments:
        fail(f"jobs.revision takes no arguments, not {arguments[0]!r}")
    if not (revision := checkout_revision()):
        fail(f"{_ROOT} is no git checkout with a commit: there is no revision to print")
    print(revision)
    return 0


if __name__ == "__main__":
    run_job(main)
