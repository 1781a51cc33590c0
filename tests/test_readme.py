"""Test that the README and the pages of docs/ agree with the repository.

Every shell line must be run by a test, and every make target, job, option and link must exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from extend_support import FILES
from readme_support import README, RUN_BY, patterns_of, recipe, shell_lines

ROOT = Path(__file__).parents[1]
CLUSTER = ROOT / "tests" / "cluster"
HISTORY = {"results"}
"""Pages about the past, whose commands need not work any more."""
FOLLOWED = {"extend"}
"""Pages whose own commands and Python files tests/cluster/test_extend_task.py runs."""
PAGES = {page.stem: page.read_text() for page in sorted((ROOT / "docs").glob("*.md")) if page.stem not in HISTORY}


@cache
def marks_of(test: str) -> set[str]:
    """Return the names of the pytest marks of the test `FILE.py::FUNCTION`, including those of its module."""
    file, _, function = test.partition("::")
    module = ast.parse((CLUSTER / file).read_text())
    (found,) = (node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == function)
    own = [ast.unparse(decorator) for decorator in found.decorator_list if isinstance(decorator, ast.Attribute)]
    shared = [ast.unparse(node.value) for node in module.body if ast.unparse(node).startswith("pytestmark =")]
    return set(re.findall(r"pytest\.mark\.(\w+)", " ".join(own + shared)))


@pytest.mark.parametrize("line", shell_lines())
def test_every_line_is_run_by_a_test_of_make_test(line: str) -> None:
    patterns = patterns_of(line)
    assert len(patterns) == 1, f"{line!r} has {patterns or 'no place'} in RUN_BY (tests/cluster/readme_support.py)"
    assert not {"long", "skip", "gpu"} & marks_of(RUN_BY[patterns[0]])


def test_every_place_is_that_of_a_line() -> None:
    assert RUN_BY.keys() == {pattern for line in shell_lines() for pattern in patterns_of(line)}


def test_a_line_of_which_no_test_knows_is_seen() -> None:
    assert not patterns_of(".venv/bin/python -m jobs.train_lm another-preset")


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_is_one_of_the_readme(page: str) -> None:
    text = PAGES[page]
    if page not in FOLLOWED:
        assert set(shell_lines(text)) <= set(shell_lines())
        assert set(blocks_of("python", text)) <= set(blocks_of("python", README))
    assert set(re.findall(r"^```(\w*)", text, re.MULTILINE)) <= {"bash", "python", ""}
    assert not re.findall(r"`(?:\S+/)?python [^`]+`", text)  # A command belongs in a block of its own.
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"`make ([^`]+)`", text)) <= set(targets)


def blocks_of(language: str, text: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_every_python_block_of_a_followed_page_is_a_file_that_its_test_writes() -> None:
    assert len(FILES) == len(blocks_of("python", PAGES["extend"])) > 0


@cache
def field_names() -> set[str]:
    """Return the names of the fields of all dataclasses in jobs/ and pipelines/."""
    classes = (
        node
        for part in ("jobs", "pipelines")
        for path in (ROOT / part).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    return {
        item.target.id
        for node in classes
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }


def options_in(text: str) -> Iterator[str]:
    """Yield the name of every option `--section.field` or `--field` that a text has in code font."""
    for code in re.findall(r"`([^`\n]+)`", text):
        yield from re.findall(r"(?<!\S)--([a-z][a-z0-9.-]*)", code)


@pytest.mark.parametrize("page", ["README", *PAGES])
def test_options_are_fields(page: str) -> None:
    text = README if page == "README" else PAGES[page]
    for option in set(options_in(text)) - {"help", "dry-run"}:
        names = [name.removeprefix("no-").replace("-", "_") for name in option.split(".")]
        assert set(names) - {"section", "field", "base"} <= field_names(), f"{page} shows --{option}"


def test_every_cluster_test_is_in_one_part_of_make_test() -> None:
    named = {
        part: re.findall(r"tests/cluster/(test_\w+\.py)", " ".join(recipe(f"test-{part}")))
        for part in ("text", "encoders", "faults", "quantised")
    }
    assert all(named.values())
    files = [file for part in named.values() for file in part]
    assert len(set(files)) == len(files)
    assert set(files) < {path.name for path in CLUSTER.glob("test_*.py")}
    rest = " ".join(recipe("test-rest"))
    assert sorted(re.findall(r"--ignore=tests/cluster/(test_\w+\.py)", rest)) == sorted(files)
    whole = recipe("test")
    assert all(line in whole for part in (*named, "rest", "fast") for line in recipe(f"test-{part}"))
    assert "long" in rest


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {line.split()[1] for line in shell_lines() if line.startswith("make ")} <= targets


def test_every_job_that_is_shown_is_there() -> None:
    jobs = {path.stem for path in (ROOT / "jobs").glob("*.py") if "run_job(main)" in path.read_text()}
    shown = set(re.findall(r"python -m jobs\.(\w+)", README))
    assert shown == jobs - {"sample_data"}  # The README shows `make run`, which runs it.


def test_links_and_pictures_exist() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert target.startswith("https://arxiv.org/abs/") or (ROOT / target).exists(), target
