"""The command `tempnet`: `tempnet train-lm PRESET …` runs what `python -m jobs.train_lm PRESET …` runs in a checkout."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

COMMAND_VARIABLE = "TEMPNET_COMMAND"
"""Name of the environment variable that tells a job that it was started by this command, for the commands it suggests."""
_REFUSED = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a job, or list the jobs; returns the exit status if the job itself does not exit."""
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    directory = jobs_directory()
    modules = {path.stem.replace("_", "-"): path for path in sorted((directory / "jobs").glob("[!_]*.py"))}
    if not words or words[0] in ("-h", "--help"):
        width = max(map(len, modules), default=0)
        lines = "\n".join(f"  {name:<{width}}  {_first_line(path)}" for name, path in modules.items())
        print(f"Learned softmax temperatures.\n\nusage: tempnet JOB …\n\njobs (JOB --help lists its options):\n{lines}")
        return 0 if words else _REFUSED
    job, *rest = words
    name = job.replace("_", "-")
    if name not in modules:
        near = difflib.get_close_matches(name, modules, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(modules)}"
        print(f"error: job {job!r} is unknown: {hint}", file=sys.stderr)
        return _REFUSED
    if importlib.util.find_spec("ray") is None:
        print("error: the jobs need more packages: pip install 'PATH-OF-WHEEL[pipeline]'", file=sys.stderr)
        return _REFUSED
    # Ray's workers, which are other processes, find the jobs by PYTHONPATH.
    sys.path.insert(0, str(directory))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH")]))
    os.environ[COMMAND_VARIABLE] = "tempnet"
    sys.argv = [f"tempnet {name}", *rest]
    runpy.run_module(f"jobs.{modules[name].stem}", run_name="__main__", alter_sys=True)
    return 0


def jobs_directory() -> Path:
    """Return the directory that holds `jobs/` and `pipelines/`: the checkout's root, or their place in the wheel."""
    package = Path(__file__).parent
    return next((path for path in (package / "_pipeline", package.parent) if (path / "jobs").is_dir()), package)


def _first_line(path: Path) -> str:
    """Return the first line of a module's docstring, without importing it."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]
