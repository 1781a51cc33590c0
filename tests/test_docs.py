"""Test that the files, links, modules and messages that the pages of docs/ name exist."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_FILE = r"(?:tempnet|pipelines|jobs|infra|benchmarks|tests|docs)/[\w/.-]*\.\w+"


PAGES, NOTEBOOKS = (sorted(path.name for path in (ROOT / "docs").glob(f"*.{kind}")) for kind in ("md", "ipynb"))
NAMING_FILES = ["CONTRIBUTING.md", *(f"docs/{name}.md" for name in ("tour", "extend", "results", "method", "errors"))]
"""Pages that name many files. If no file is found in one of them, the pattern is wrong."""


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *(f"docs/{name}" for name in PAGES)])
def test_files_that_a_page_names_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    found = re.findall(rf"`({_FILE})(?:::(\w+))?`", text)
    for file, name in found:
        assert (ROOT / file).exists(), f"{page} names {file}"
        if name:
            defined = {getattr(node, "name", "") for node in ast.parse((ROOT / file).read_text()).body}
            assert name in defined, f"{page} names {name} in {file}"
    assert found or page not in NAMING_FILES


def anchors_of(text: str) -> set[str]:
    """Return the anchors of a page's headings, made as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS])
def test_links_of_a_page_lead_to_pages_and_headings_of_the_site(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / "docs" / page).read_text()):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        place = ROOT / "docs" / (file or page)
        assert place.parent == ROOT / "docs", f"{target} lies outside the site"
        assert place.is_file(), target
        assert not anchor or anchor in anchors_of(place.read_text()), target


def test_the_site_shows_every_page_and_modules_that_exist() -> None:
    shown = re.findall(r"^ +- [^:]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(shown) == PAGES
    modules = re.findall(r"^::: (\S+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    assert modules
    assert [name for name in modules if not ROOT.joinpath(*name.split(".")).with_suffix(".py").is_file()] == []


def test_every_notebook_is_executed_by_a_test_and_linked_from_a_page() -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests" / "cluster").glob("test_readme_*.py"))
    assert NOTEBOOKS
    for name in NOTEBOOKS:
        assert f'"{name}"' in tests, name
        assert any(f"]({name})" in (ROOT / "docs" / page).read_text() for page in PAGES), name


_PLACEHOLDER = "\0"


def strings_in(path: Path) -> Iterator[str]:
    """Yield the strings of a module except its docstrings.

    Adjacent literals are joined, and a placeholder stands for every value that an f-string interpolates.
    """
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    is_part = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    is_docstring = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else _PLACEHOLDER for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in is_part | is_docstring:
            yield node.value


@functools.cache
def source_strings() -> str:
    """Return all strings of the program, with a line feed and a placeholder between them."""
    files = sorted(path for part in ("jobs", "pipelines", "tempnet") for path in (ROOT / part).rglob("*.py"))
    return f"\n{_PLACEHOLDER}".join(text for path in files for text in strings_in(path))


ERRORS = (ROOT / "docs/errors.md").read_text()
QUOTED = re.findall(r"^\| `([^`]+)` \|", ERRORS, re.MULTILINE)
"""The code-font text in the first cell of every table row."""


@pytest.mark.parametrize("message", QUOTED)
def test_messages_that_errors_md_quotes_are_in_the_source(message: str) -> None:
    assert message in source_strings(), f"docs/errors.md quotes {message!r}, which no string of the program holds"
    assert len(message.split()) >= 4, f"{message!r} is too short to tell one message from another"


def test_every_table_of_errors_md_quotes_messages() -> None:
    rows = re.findall(r"^\| (?!message \||exit status \||\d+ \|)", ERRORS, re.MULTILINE)
    assert len(rows) == len(QUOTED) >= 35
