"""Test that the jobs of a user share one token for Ray, however many of them start first at the same time."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from process_support import run_together
from support import ROOT

from jobs.engine.ray_token import ensure_token

# Waits for a line, so that all processes are ready before any of them makes a token, and then says what it sees.
SCRIPT = """
import sys
from pathlib import Path
from jobs.engine.ray_token import ensure_token

print("ready", flush=True)
sys.stdin.readline()
ensure_token()
print((Path.home() / ".ray" / "auth_token").read_text())
"""


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the place of the token of a user who has none."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / ".ray" / "auth_token"


def test_all_processes_that_start_at_once_have_the_same_token(token: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    seen = {printed.strip() for printed in run_together(SCRIPT, [[]] * 6, environment)}
    assert seen == {token.read_text()}
    assert len(bytes.fromhex(token.read_text())) == 32
    assert [path.name for path in token.parent.iterdir()] == ["auth_token"]
    assert stat.S_IMODE(token.stat().st_mode) == 0o600


def test_a_token_that_exists_is_kept_and_closed_to_others(token: Path) -> None:
    token.parent.mkdir()
    token.write_text("a token")
    token.chmod(0o644)
    ensure_token()
    assert token.read_text() == "a token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("name", "value"),
    [("RAY_AUTH_MODE", "disabled"), ("RAY_AUTH_TOKEN", "secret"), ("RAY_AUTH_TOKEN_PATH", "elsewhere")],
)
def test_none_is_made_where_none_is_read(token: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    ensure_token()
    assert not token.parent.exists()
