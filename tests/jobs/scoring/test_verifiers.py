"""Verifiers give rewards, and every way in which one fails costs its sample only and is counted; with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.scoring.verifiers.panel import Judgement, Panel
from jobs.scoring.verifiers.samples import Sample
from jobs.scoring.verifiers.unit_tests import Limits, isolation

LIMITS = Limits(seconds=20.0)
FUNCTIONS = """
import os, time
def by_length(sample): return len(sample["text"]) / 10
def unruly(sample):
    print("a word that is no answer")
    return {"raise": lambda: 1 / 0, "hang": lambda: time.sleep(600), "die": lambda: os._exit(3),
            "nan": lambda: float("nan"), "word": lambda: "good", "high": lambda: 1.5, "low": lambda: -0.1,
            "none": lambda: None, "right": lambda: True, "half": lambda: 0.5}[sample["text"]]()
def hang_and_tell(sample):
    open(sample["text"], "w").write(str(os.getpid()))
    time.sleep(600)
NOT_CALLABLE = 3
"""


def judge(name: str, *texts: str, limits: Limits = LIMITS, num_at_a_time: int = 1, **fields: Any) -> Judgement:
    panel = Panel(name, limits, num_at_a_time=num_at_a_time)
    panel.check([("p", fields)])
    try:
        return panel.judge([Sample(prompt="2 + 2 =", text=text, fields=fields) for text in texts])
    finally:
        panel.close()


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_verifiers.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    return "own_verifiers"


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(process: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def script(tmp_path: Path, body: str) -> str:
    path = tmp_path / "verify.sh"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_exact_match_ignores_white_space_at_the_ends() -> None:
    assert judge("exact", " 4\n", "4.", "", answer="4 ").rewards == [1.0, 0.0, 0.0]


def test_gsm8k_takes_the_number_after_the_mark_or_the_announced_one() -> None:
    texts = ["so it is 7.\n#### 1,450", "The answer is $1450.00. Or 3", "#### 1450\n#### 9", "no number"]
    for fields in ({"answer": "a long way\n#### 1,450"}, {"gold": "1450"}):
        assert judge("gsm8k", *texts, **fields).rewards == [1.0, 0.0, 0.0, 0.0]
    assert judge("gsm8k", "The answer is $1450.00.", gold="1450").rewards == [1.0]


def test_a_function_that_fails_costs_its_samples_only(functions: str) -> None:
    texts = ["right", "raise", "half", "hang", "die", "nan", "word", "high", "low", "none", "right"]
    found = judge(f"{functions}:unruly", *texts, limits=Limits(seconds=1.5))
    assert found.rewards == [1.0, None, 0.5, *[None] * 7, 1.0]
    assert found.failures == {"raised": 1, "timed_out": 1, "died": 1, "not_a_number": 3, "out_of_range": 2}
    assert "ZeroDivisionError" in found.first_failure


def test_a_function_that_hangs_ends_with_the_process_that_asked_it(functions: str, tmp_path: Path) -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from jobs.scoring.verifiers.functions import FunctionVerifier\n"
        "from jobs.scoring.verifiers.samples import Sample\n"
        "verifier = FunctionVerifier('own_verifiers:hang_and_tell', seconds=600)\n"
        f"verifier.judge(Sample(prompt='', text={str(tmp_path / 'pid')!r}))\n"
    )
    asking = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[3])
    pid = tmp_path / "pid"
    wait_until(lambda: pid.exists() and pid.read_text() != "")
    asking.kill()
    asking.wait()
    wait_until(lambda: not is_running(int(pid.read_text())))


def test_rewards_do_not_depend_on_how_many_are_judged_at_a_time(functions: str) -> None:
    texts = ["a" * size for size in (3, 0, 10, 7, 11, 1)]
    for number in (1, 4):
        found = judge(f"{functions}:by_length", *texts, num_at_a_time=number)
        assert found.rewards == [0.3, 0.0, 1.0, 0.7, None, 0.1]


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("own_verifiers:missing", {}, "no attribute 'missing'"),
        ("own_verifiers:NOT_CALLABLE", {}, "int and no function"),
        ("no_such_module:function", {}, "ModuleNotFoundError"),
        ("no-such-command --strict", {}, "is none of exact, gsm8k and unit-tests"),
        ("sh 'unclosed", {}, "no command line"),
        ("exact", {}, "prompt 'p': verifier.name = exact compares with a string `answer`"),
        ("gsm8k", {"answer": "no mark"}, "does not end in ####"),
        ("unit-tests", {"tests": []}, "runs `tests`"),
        ("unit-tests", {"tests": "assert ("}, "`tests` cannot be parsed"),
    ],
)
def test_what_cannot_be_run_or_lacks_a_reference_is_refused_before_any_sample(
    functions: str, name: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        judge(name, "text", **fields)


def test_a_command_reads_the_sample_and_answers_by_its_last_line_or_its_status(tmp_path: Path) -> None:
    body = """
    read sample
    case "$sample" in
    *'"text": "part"'*) echo thinking; echo 0.25;;
    *'"text": "right"'*'"prompt": "2 + 2 ="'*) exit 0;;
    *'"prompt": "2 + 2 ="'*'"text": "right"'*) exit 0;;
    *'"text": "wrong"'*) exit 1;;
    *'"text": "broken"'*) exit 2;;
    *'"text": "killed"'*) kill -9 $$;;
    *'"text": "word"'*) echo good;;
    *'"text": "nan"'*) echo nan;;
    *'"text": "much"'*) echo 7;;
    *'"text": "hang"'*) sleep 600;;
    esac
    """
    texts = ["part", "right", "wrong", "broken", "killed", "word", "nan", "much", "hang"]
    found = judge(script(tmp_path, body), *texts, limits=Limits(seconds=2.0))
    assert found.rewards == [0.25, 1.0, 0.0, *[None] * 6]
    assert found.failures == {"raised": 1, "died": 1, "not_a_number": 2, "out_of_range": 1, "timed_out": 1}


def test_what_a_command_has_started_ends_with_it(tmp_path: Path) -> None:
    body = f"sleep 600 & echo $! > {tmp_path}/child; sleep 600"
    assert judge(script(tmp_path, body), "text", limits=Limits(seconds=1.5)).failures == {"timed_out": 1}
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: not is_running(child))


CODE = "def double(x):\n    return 2 * x\n"
TESTS = ["assert double(4) == 8", "assert double('a') == 'aa'"]


def test_code_passes_if_the_end_of_its_tests_is_reached() -> None:
    texts = [
        CODE,
        f"Here it is:\n```python\n{CODE}```\nThat is all.",
        f"```\nnonsense here\n```\nrather:\n```py\n{CODE}```",
        CODE.replace("2 * x", "x"),
        "def double(:",
        f"{CODE}\nimport sys; sys.exit(0)",
        f"{CODE}\nimport os; os._exit(0)",
        "",
    ]
    assert judge("unit-tests", *texts, num_at_a_time=2, tests=TESTS).rewards == [1.0, 1.0, 1.0, *[0.0] * 5]


def test_code_is_held_within_its_limits(tmp_path: Path) -> None:
    texts = [
        "while True: pass",
        "import time; time.sleep(600)",
        "x = bytearray(3 << 30)",
        "open('big', 'wb').write(bytes(64 << 20))",
        "while True: print('x' * 10000)",
    ]
    found = judge("unit-tests", *texts, limits=Limits(seconds=2.0), num_at_a_time=2, tests="pass")
    assert found.rewards == [0.0] * 5
    assert not found.failures  # code that breaks its limits has failed its tests, and no sample is lost


def test_code_sees_no_secret_of_this_process_and_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    code = "import os\nopen('left', 'w').write('x')\nkeys = list(os.environ)\nplace = os.getcwd()"
    tests = ["assert 'AWS_SECRET_ACCESS_KEY' not in keys", f"assert not place.startswith({os.getcwd()!r})"]
    before = set(Path().iterdir())
    assert judge("unit-tests", code, tests=tests).rewards == [1.0]
    assert set(Path().iterdir()) == before


@pytest.mark.skipif(not isolation(), reason="the kernel lets no user make namespaces")
def test_code_has_no_network_and_nothing_outlives_it(tmp_path: Path) -> None:
    code = f"""
import os, socket, subprocess, time
out = open({str(tmp_path / "out")!r}, "w")
child = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=out)
names = [name for _, name in socket.if_nameindex()]
"""
    assert judge("unit-tests", code, tests="assert names == ['lo'] and child.poll() is None").rewards == [1.0]
    held = f"{tmp_path / 'out'}"
    wait_until(lambda: not any(holds(process, held) for process in Path("/proc").glob("[0-9]*")))


def holds(process: Path, file: str) -> bool:
    """Return whether a process has a file open; False for the processes of other users."""
    try:
        return any(os.readlink(link) == file for link in (process / "fd").iterdir())
    except OSError:
        return False
