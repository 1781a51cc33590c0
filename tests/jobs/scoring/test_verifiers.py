"""Verifiers give rewards, and every way in which one fails costs its sample only and is counted; with real processes."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import wait_for

from jobs.scoring.verifiers.programs import isolation_problem, measure
from jobs.scoring.verifiers.verifier import Judgement, Panel, Sample, VerifierSection

needs_isolation = pytest.mark.skipif(
    isolation_problem(shutil.which("unshare")) != "", reason="the kernel lets no user make namespaces"
)
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


def judge(
    name: str, *texts: str, limits: dict[str, Any] | None = None, num_at_a_time: int = 1, **fields: Any
) -> Judgement:
    settings = VerifierSection(name=name, **{"seconds": 20.0, **(limits or {})})
    with closing(Panel(settings, num_at_a_time=num_at_a_time)) as panel:
        panel.check([("p", fields)])
        return panel.judge([Sample(prompt="2 + 2 =", text=text, fields=fields) for text in texts])


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_verifiers.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    return "own_verifiers"


def is_running(process: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
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
    for gold in ("1450", "1,450", 1450, 1450.0):
        assert judge("gsm8k", "The answer is $1450.00.", gold=gold).rewards == [1.0]
    with pytest.raises(ValueError, match="a number `gold`, and it is None"):
        judge("gsm8k", gold=None)


def test_a_function_that_fails_costs_its_samples_only(functions: str) -> None:
    texts = ["right", "raise", "half", "hang", "die", "nan", "word", "high", "low", "none", "right"]
    found = judge(f"{functions}:unruly", *texts, limits={"seconds": 1.5})
    assert found.rewards == [1.0, None, 0.5, *[None] * 7, 1.0]
    assert found.failures == {"raised": 1, "timed_out": 1, "died": 1, "not_a_number": 3, "out_of_range": 2}
    assert "ZeroDivisionError" in found.first_failure
    assert judge(f"{functions}:by_length", "text", answer="half of a character, \ud800").failures == {"raised": 1}


def test_the_code_of_a_verifier_is_known_by_its_content(functions: str, tmp_path: Path) -> None:
    def digest(name: str) -> str:
        with closing(Panel(VerifierSection(name=name))) as panel:
            return panel.check([])

    assert digest("exact") == ""
    script = tmp_path / "judge.py"
    script.write_text("print(1)")
    for name, path in ((f"{functions}:by_length", tmp_path / "own_verifiers.py"), (f"python3 {script}", script)):
        before = digest(name)
        assert before == digest(name)
        path.write_text(f"{path.read_text()}\n# changed")
        assert digest(name) != before != ""


def test_a_function_that_hangs_ends_with_the_process_that_asked_it(functions: str, tmp_path: Path) -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from jobs.scoring.verifiers.programs import FunctionVerifier\n"
        "from jobs.scoring.verifiers.verifier import Sample\n"
        "verifier = FunctionVerifier('own_verifiers:hang_and_tell', seconds=600)\n"
        f"verifier.judge(Sample(prompt='', text={str(tmp_path / 'pid')!r}))\n"
    )
    asking = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[3])
    pid = tmp_path / "pid"
    wait_for(lambda: pid.exists() and pid.read_text() != "")
    asking.kill()
    asking.wait()
    wait_for(lambda: not is_running(int(pid.read_text())))


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
    found = judge(script(tmp_path, body), *texts, limits={"seconds": 2.0}, num_at_a_time=2)
    assert found.rewards == [0.25, 1.0, 0.0, *[None] * 6]
    assert found.failures == {"raised": 1, "died": 1, "not_a_number": 2, "out_of_range": 1, "timed_out": 1}


def test_what_a_command_has_started_ends_with_it(tmp_path: Path) -> None:
    body = f"for start in '' 'timeout 600'; do $start sleep 600 & echo $! >> {tmp_path}/children; done; sleep 600"
    assert judge(script(tmp_path, body), "text", limits={"seconds": 1.5}).failures == {"timed_out": 1}
    children = (tmp_path / "children").read_text().split()
    wait_for(lambda: not any(is_running(int(child)) for child in children))


def test_a_command_that_prints_without_end_is_ended_early() -> None:
    started = time.monotonic()
    assert judge("yes", "text", limits={"seconds": 60.0}).failures == {"timed_out": 1}
    assert time.monotonic() - started < 30


CODE = "def double(x):\n    return 2 * x\n"
TESTS = ["assert double(4) == 8", "assert double('a') == 'aa'"]


@needs_isolation
def test_code_passes_if_the_end_of_its_tests_is_reached() -> None:
    texts = [
        CODE,
        f"Here it is:\n```python\n{CODE}```\nThat is all.",
        f"```\nnonsense here\n```\nrather:\n```py\n{CODE}```",
        f"```Python3\r\n{CODE}```\nThat is all.",
        CODE.replace("2 * x", "x"),
        "def double(:",
        f"{CODE}\nimport sys; sys.exit(0)",
        f"{CODE}\nimport os; os._exit(0)",
        "",
        "class Equal:\n    __eq__ = __bool__ = lambda *_: True\ndouble = lambda x: Equal()",
        "import builtins\nall = any = lambda _: True\nbuiltins.AssertionError = OSError\ndouble = all",
        "import atexit, os, gc\natexit.register(os._exit, 0)\nfor one in gc.get_objects(): print(one)",
    ]
    assert judge("unit-tests", *texts, num_at_a_time=2, tests=TESTS).rewards == [*[1.0] * 4, *[0.0] * 8]


# An answer to the question for names, and to every other one: what would be run if the tests called what they read.
FORGED = """
import json, os, socket
for number in range(3, 64):
    try:
        end = socket.socket(fileno=os.dup(number))
        for raised in ({"base": "exec", "arguments": ["import os; os._exit(0)"], "own": None},
                       {"base": "int", "arguments": [1], "own": {"mine": 1, "what": {"exception": ["a", "exec"]}}}):
            end.sendall(json.dumps({"raised": raised}).encode() + b"\\n")
    except OSError:
        pass
"""


@needs_isolation
@pytest.mark.parametrize(
    ("code", "tests", "reward"),
    [
        (FORGED, "pass", 0.0),
        ("def sort(x): x.sort()", "a = [3, 1]\nsort(a)\nassert a == [1, 3]", 1.0),
        ("def twice(f, x): return f(f(x))", "assert twice(lambda x: x + 3, 1) == 7", 1.0),
        ("def up(n):\n    yield from range(n)", "assert list(up(3)) == [0, 1, 2] and sum(up(4)) == 6", 1.0),
        (
            "class Wrong(ValueError): pass\ndef f(x): raise Wrong('no', x)",
            "for kind in (Wrong, ValueError):\n    try: f(3); found = None\n    except kind as error: found = error.args\n"
            "    assert found == ('no', 3)",
            1.0,
        ),
        (
            "import math\nclass V:\n    def __init__(self, x): self.x = x\n    def __eq__(self, o): return self.x == o.x\n"
            "    def __mul__(self, k): return V(self.x * k)",
            "v = V(2)\nv.x += math.ceil(.5)\nassert v * 3 == V(9) and v != V(2) and isinstance(v, V) and v.x == 3",
            1.0,
        ),
        (
            "from collections import Counter\nfrom fractions import Fraction\ndef f(s): return Counter(s), Fraction(1, 3)",
            "from fractions import Fraction\nassert f('aab') == ({'a': 2, 'b': 1}, Fraction(1, 3))",
            1.0,
        ),
    ],
)
def test_tests_reach_code_in_another_process(code: str, tests: str, reward: float) -> None:
    assert judge("unit-tests", code, tests=tests).rewards == [reward]


@needs_isolation
def test_code_is_held_within_its_limits() -> None:
    """Each program breaks one limit, some only with several processes or files that are each within it."""
    many = "import os, subprocess, sys, time\n"
    some = "subprocess.Popen([sys.executable, '-c', 'x = bytearray(150 << 20); import time; time.sleep(9)'])"
    texts = [
        "while True: pass",
        "import time; time.sleep(600)",
        "x = bytearray(3 << 30)",
        "while True: print('x' * 10000)",
        f"{many}for _ in range(4): {some}\ntime.sleep(9)",
        f"{many}for _ in range(60): subprocess.Popen(['sleep', '9'])\ntime.sleep(1)",
        "for i in range(4): open(str(i), 'wb').write(bytes(6 << 20))",
    ]
    limits = {"seconds": 4.0, "memory_mib": 400}
    found = judge("unit-tests", *texts, limits=limits, num_at_a_time=2, tests="pass")
    assert found.rewards == [0.0] * 7
    assert not found.failures  # code that breaks its limits has failed its tests, and no sample is lost
    texts = [f"{many}{some}", f"{many}for _ in range(8): subprocess.Popen(['sleep', '9'])", texts[-1].replace("4", "2")]
    limits["seconds"] = 60.0  # what is allowed takes longer on a busy machine
    assert judge("unit-tests", *texts, limits=limits, tests="pass").rewards == [1.0] * 3


def test_what_processes_use_is_counted_together() -> None:
    burn = "import time\nwhile time.process_time() < .3: pass\n"
    script = (
        f"import subprocess, sys, time\na, b = [subprocess.Popen([sys.executable, '-c', {burn!r}]) for _ in 'ab']\n"
    )
    with subprocess.Popen([sys.executable, "-c", f"{script}a.wait()\nb.wait()\ntime.sleep(60)"]) as process:
        try:
            wait_for(lambda: measure(process.pid)[0] > 0.5 and measure(process.pid)[2] == 1)
        finally:
            process.kill()


# Each sets `won` to what it has got hold of, and none does harm where it wins.
ATTACKS = {
    "environment of the parent": "won = len(open(f'/proc/{os.getppid()}/environ').read())",
    "environment of this process": "won = 'AWS_SECRET_ACCESS_KEY' in str(os.environ) or open('/proc/self/environ').read()",
    "a file of yours": "won = open(SECRET).read()",
    "writing elsewhere": "won = open(SECRET, 'a').write('x')",
    "a socket with a path": "s = socket.socket(socket.AF_UNIX); s.connect(PATH); won = 1",
    "an abstract socket": "s = socket.socket(socket.AF_UNIX); s.connect(ABSTRACT); won = 1",
    "a socket of the network": "won = socket.create_connection(('127.0.0.1', PORT), 5)",
    "other processes": "os.kill(PID, 0); won = 1",
}
NEEDING_RIGHTS = {
    "writing beside Python": "name = os.path.join(os.path.dirname(os.__file__), 'x-tempnet')\n"
    "open(name, 'w').close()\nos.remove(name)\nwon = 1",
    "mounting": "import ctypes; os.mkdir('r'); won = not ctypes.CDLL(None).mount(b'none', b'r', b'tmpfs', 0, None)",
    "another root": "os.mkdir('r'); os.chroot('r'); won = 1",
}


@needs_isolation
@pytest.mark.parametrize(
    ("attack", "is_isolated"),
    [(body, True) for body in (*ATTACKS.values(), *NEEDING_RIGHTS.values())]
    + [(body, False) for body in ATTACKS.values()],
    ids=[*ATTACKS, *NEEDING_RIGHTS, *(f"{name}, without isolation" for name in ATTACKS)],
)
def test_an_attack_wins_only_without_isolation(
    attack: str, is_isolated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_isolated:
        monkeypatch.setenv("PATH", "")
    (tmp_path / "secret").write_text("secret")
    with socket.socket(socket.AF_UNIX) as path, socket.socket(socket.AF_UNIX) as abstract, socket.socket() as network:
        path.bind(str(tmp_path / "socket"))
        abstract.bind(f"\0tempnet-{os.getpid()}")
        network.bind(("127.0.0.1", 0))
        for server in (path, abstract, network):
            server.listen()
        values = {
            "SECRET": str(tmp_path / "secret"), "PATH": str(tmp_path / "socket"), "PID": os.getpid(),
            "ABSTRACT": f"\0tempnet-{os.getpid()}", "PORT": network.getsockname()[1],
        }  # fmt: skip
        setting = "".join(f"{key} = {value!r}\n" for key, value in values.items())
        body = "".join(f"    {line}\n" for line in attack.split("\n"))
        code = f"import os, socket\n{setting}won = 0\ntry:\n{body}except Exception: pass\nwon = bool(won)"
        limits = {"allow_unisolated": not is_isolated}
        found = judge("unit-tests", code, limits=limits, tests=f"assert won is {not is_isolated}")
    assert found.rewards == [1.0]


@needs_isolation
def test_no_process_of_code_outlives_it(tmp_path: Path) -> None:
    code = "import subprocess\nchild = subprocess.Popen(['sleep', '600.345'], start_new_session=True)"
    assert judge("unit-tests", code, tests="assert child.poll() is None").rewards == [1.0]
    wait_for(lambda: not any("600.345" in (one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"])))


def test_code_is_not_run_where_it_cannot_be_isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match=r"cannot be isolated .* no command unshare .* --verifier.allow-unisolated"):
        judge("unit-tests", CODE, tests=TESTS)
    found = Panel(VerifierSection(name="unit-tests")).judge([Sample(prompt="", text=CODE, fields={"tests": TESTS})])
    assert found.failures == {"died": 1}  # on a worker's machine
    assert judge("unit-tests", CODE, limits={"allow_unisolated": True}, tests=TESTS).rewards == [1.0]
