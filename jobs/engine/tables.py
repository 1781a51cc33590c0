"""Tables of results as Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table whose columns are also aligned in the source text.

    The first row is the heading. The first column is aligned to the left, and all others hold figures, aligned to the
    right.
    """
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        figures = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return f"| {' | '.join([cells[0].ljust(widths[0]), *figures])} |"

    ruler = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(map(line, [rows[0], ruler, *rows[1:]]))
