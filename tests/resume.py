"""Let a long run of tests go on where it was ended: `pytest -p tests.resume --resume FILE`.

FILE gets a line for every test that is over, `passed`, `failed` or `skipped` and its name; the next run with the same FILE
leaves out those of which the last line does not say `failed`. What was running when a process was killed has no line, and is
run again. Nothing here knows which code FILE is about: `make test-all` names it by the commit, if nothing has changed.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--resume", metavar="FILE", type=Path, required=True, help="keep which tests are over and leave them out"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Record(config.getoption("--resume")))


class _Record:
    """The lines of FILE, and the worst outcome so far of the test that is running."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.outcome = "passed"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # A process that was killed may have left half a line, which then must not swallow the next one.
        whole = self.path.read_text().rpartition("\n")[:2] if self.path.exists() else ""
        self.path.write_text("".join(whole))

    def read(self) -> list[tuple[str, str]]:
        """Return the outcome and the name of every test that was over, in their order, with repetitions."""
        lines = (line.partition(" ") for line in self.path.read_text().splitlines())
        return [(outcome, name) for outcome, _, name in lines]

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        last = {name: outcome for outcome, name in self.read()}
        left = [item for item in items if last.get(item.nodeid, "failed") == "failed"]
        if len(left) < len(items):
            config.hook.pytest_deselected(items=[item for item in items if item not in left])
            items[:] = left

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "setup" or report.failed:
            self.outcome = report.outcome
        elif report.skipped and self.outcome != "failed":
            self.outcome = "skipped"
        if report.when == "teardown":
            with self.path.open("a") as file:
                file.write(f"{self.outcome} {report.nodeid}\n")
                file.flush()
                os.fsync(file.fileno())

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self.read():
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        lines = self.read()
        counts = Counter({name: outcome for outcome, name in lines}.values())
        shown = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "skipped", "failed"))
        once = len({name for outcome, name in lines if outcome == "failed"})
        terminalreporter.write_line(f"{self.path}: {shown}; {once} have failed at least once")
