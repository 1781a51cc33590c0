"""Find the Python files and the shell lines of docs/extend.md, and write the files into a directory."""

from __future__ import annotations

import re
from pathlib import Path

from readme_support import shell_lines
from support import ROOT

PAGE = (ROOT / "docs" / "extend.md").read_text()
FILES = dict(re.findall(r"```python\n# (\S+\.py)\n(.*?)```", PAGE, re.DOTALL))
"""Path of every Python file of the page, which is its first line as a comment → the text below that line."""
LINES = shell_lines(PAGE)
"""The shell lines of the page, in order."""


def write_files(directory: Path) -> Path:
    """Write the Python files of the page into a directory, and return it."""
    for name, text in FILES.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n{text}")
    return directory
