"""Test that every line of docs/security.md is backed by tests that exist, and that no call runs what it reads."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = re.findall(r"^\| (?!what holds|---)(.*) \| (.*) \|$", (ROOT / "docs/security.md").read_text(), re.MULTILINE)
assert len(ROWS) >= 20


@pytest.mark.parametrize(("claim", "tests"), ROWS)
def test_every_line_names_tests_that_exist_and_are_run(claim: str, tests: str) -> None:
    names = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", tests)
    assert len(names) == tests.count("`") // 2 > 0, claim
    for file, name in names:
        module = ast.parse((ROOT / file).read_text())
        (found,) = (node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == name)
        marks = [ast.unparse(mark) for mark in found.decorator_list if not isinstance(mark, ast.Call)]
        marks += [ast.unparse(node) for node in module.body if ast.unparse(node).startswith("pytestmark")]
        assert not re.search(r"mark\.(skip|gpu)", " ".join(marks)), name  # `make test` or `make test-all` runs it


# What each name would do with data: run it, or write it to places that it names itself. The few calls that are allowed
# unpickle what another process of the same job has packed, or run the code of a verifier's unit tests, isolated.
FORBIDDEN = re.compile(
    r"(?:cloud)?pickle\.loads?|marshal\.loads?|dill\.loads?|joblib\.load|yaml\.(?:load|unsafe_load|full_load)|eval|exec|"
    r"os\.system|shutil\.unpack_archive|.*\.extractall|(?:tar|archive|zip\w*)\.extract"
)
ALLOWED = {
    "jobs/engine/ray_train.py": "cloudpickle.loads",
    "jobs/scoring/verifiers/code_process.py": "exec",
}


def forbidden_calls(text: str) -> Iterator[str]:
    """Yield the calls of a module that run or extract what they read."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name, options = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
        is_unsafe = (
            FORBIDDEN.fullmatch(name) is not None
            or (name == "torch.load" and options.get("weights_only") != "True")
            or options.get("allow_pickle") == "True"
            or options.get("shell") == "True"
            or (
                re.fullmatch(r"Auto(?!HfQuantizer)\w+\.from_(pretrained|config)", name)
                and "trust_remote_code" not in options
            )
        )
        if is_unsafe:
            yield name


def test_no_call_runs_or_extracts_what_it_reads() -> None:
    files = [path for part in ("jobs", "pipelines", "tempnet") for path in sorted((ROOT / part).rglob("*.py"))]
    found = {str(path.relative_to(ROOT)): set(forbidden_calls(path.read_text())) for path in files}
    assert {file: names for file, names in found.items() if names} == {file: {name} for file, name in ALLOWED.items()}


def test_such_a_call_would_be_found_and_a_safe_one_is_none() -> None:
    calls = [
        "pickle.load(file)", "yaml.load(text)", "eval(text)", "tar.extractall('.')", "torch.load(path)", "os.system(text)",
        "np.load(path, allow_pickle=True)", "subprocess.run(text, shell=True)", "torch.load(path, weights_only=False)",
        "AutoConfig.from_pretrained(path)",
    ]  # fmt: skip
    assert len(list(forbidden_calls("\n".join(calls)))) == len(calls)
    assert not list(forbidden_calls("yaml.safe_load(text)\ntorch.load(path, weights_only=True)\nmodel.eval()"))
