"""The last lines of a job that makes many runs: its table, what failed, and where to look."""

from __future__ import annotations

from collections.abc import Mapping


def print_results(table: str, *, directory: str, files: str, failed: Mapping[str, str], tracking_uri: str) -> int:
    """Print them; returns the exit status: 1 if a trial failed.

    Args:
        files: what is worth opening in the directory.
        failed: name of a trial → its error.
    """
    print(f"\n{table}\n\n  results   {directory} ({files})")
    for name, reason in failed.items():
        print(f"  FAILED    {name}: {reason}")
    if tracking_uri:
        print("\nTo look around, type:")
        print(f"  .venv/bin/mlflow server --host 127.0.0.1 --port 5000 --backend-store-uri {tracking_uri}")
    return 1 if failed else 0
