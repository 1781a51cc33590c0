"""Execute the notebooks of docs/ in the directory of the README's reader, with options added that make them short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from readme_support import PYTHON
from support import BIN, ROOT


def run_notebook(name: str, home: Path, options: Mapping[str, Sequence[str]]) -> str:
    """Execute all cells of a notebook in a kernel of its own, and return what they printed and displayed as text, without
    warnings and progress on standard error.

    Args:
        name: file in docs/.
        home: directory of the README's reader, whose `.venv` becomes this environment.
        options: maps the pattern of a line `jobs.JOB …` to what is added at its end; every command must match one.
    """
    if not (home / ".venv").exists():
        (home / ".venv").symlink_to(BIN.parent)
    notebook = nbformat.read(ROOT / "docs" / name, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code" and PYTHON in cell.source:
            (line,) = (line for line in cell.source.splitlines() if line.startswith(PYTHON))
            (added,) = (more for pattern, more in options.items() if fnmatchcase(line.removeprefix(PYTHON), pattern))
            cell.source = cell.source.replace(line, " ".join([line, *added]))
    NotebookClient(notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(home)}}).execute()
    outputs = [
        output
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.get("name") != "stderr"
    ]
    return "".join(
        output.text if output.output_type == "stream" else f"{output.get('data', {}).get('text/plain', '')}\n"
        for output in outputs
    )
