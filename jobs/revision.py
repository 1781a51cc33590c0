"""Print the Git revision of the code, to pass it to a submitted job: Ray does not upload the directory `.git`.

    python -m jobs.revision

A submission passes it on with `env TEMPNET_REVISION=$(python -m jobs.revision)`.
"""

from __future__ import annotations

from collections.abc import Sequence

from jobs.engine.command_line import fail, run_job
from jobs.engine.revision import ROOT, checkout_revision


def main(arguments: Sequence[str]) -> int:
    """Print the revision; returns the exit status."""
    if arguments and arguments[0] in ("-h", "--help"):
        print((__doc__ or "").strip() + "\n\nusage: python -m jobs.revision")
        return 0
    if arguments:
        fail(f"jobs.revision takes no arguments, not {arguments[0]!r}")
    if not (revision := checkout_revision()):
        fail(f"{ROOT} is no git checkout with a commit: there is no revision to print")
    print(revision)
    return 0


if __name__ == "__main__":
    run_job(main)
