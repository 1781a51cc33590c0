"""Tests that the revision of a job's code is its checkout's, or the one that the job was given without a checkout."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from jobs.engine import revision
from jobs.engine.revision import checkout_revision, revision_tags


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    directory = tmp_path / "checkout"
    directory.mkdir()
    (directory / "a").write_text("1")
    name = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "a"], [*name, "commit", "-qm", "first"]):
        subprocess.run(["git", *words], cwd=directory, check=True)
    return directory


def test_changed_and_new_files_make_it_dirty(checkout: Path) -> None:
    clean = checkout_revision(checkout)
    assert len(clean) == 40
    (checkout / "new").write_text("1")
    assert checkout_revision(checkout) == f"{clean}-dirty"
    (checkout / "new").unlink()
    (checkout / "a").write_text("2")
    assert checkout_revision(checkout) == f"{clean}-dirty"


def test_a_directory_inside_another_projects_checkout_has_none(checkout: Path) -> None:
    (checkout / "site-packages").mkdir()
    assert checkout_revision(checkout / "site-packages") == ""


def test_without_a_checkout_it_is_what_was_told_and_else_the_tag_says_that_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = "0123456789abcdef0123456789abcdef01234567"
    monkeypatch.setenv("TEMPNET_REVISION", told)
    here = checkout_revision()
    assert revision_tags()["git.revision"] == here.removesuffix("-dirty") != told
    monkeypatch.setattr(revision, "checkout_revision", lambda: "")
    assert revision_tags() == {"git.revision": told, "git.dirty": "false"}
    monkeypatch.setenv("TEMPNET_REVISION", f"{told}-dirty")
    assert revision_tags() == {"git.revision": told, "git.dirty": "true"}
    monkeypatch.setenv("TEMPNET_REVISION", "")
    assert revision_tags().keys() == {"git.revision"}
    assert revision_tags()["git.revision"].startswith("not recorded: ")
