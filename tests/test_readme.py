"""Every command and every path that the README shows exists; those that need a run are executed in tests/cluster."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from jobs.command_line import parse_preset
from jobs.presets import classifiers, clip, language_models, sentences, sweeps
from jobs.reproduce import parse
from jobs.reproduction.plan import make_reproduction

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.split("#")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line.strip()
]


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {command.split()[1] for command in COMMANDS if command.startswith("make ")}
    assert {"run", "test"} <= named <= targets


@pytest.mark.parametrize("command", [command for command in COMMANDS if re.search(r"jobs\.(train_|sweep)", command)])
def test_training_commands_parse(command: str) -> None:
    arguments = shlex.split(command)
    (job,) = (word for word in arguments if word.startswith(("jobs.train_", "jobs.sweep")))
    arguments = arguments[arguments.index(job) + 1 :]
    presets: Mapping[str, Callable[[], Any]]
    presets = {
        "jobs.train_lm": language_models.PRESETS,
        "jobs.train_clip": clip.PRESETS,
        "jobs.train_sentences": sentences.PRESETS,
        "jobs.train_classifier": classifiers.PRESETS,
        "jobs.sweep": sweeps.PRESETS,
    }[job]
    if arguments == ["--help"]:
        with pytest.raises(SystemExit):
            parse_preset(presets, arguments, job=job, purpose="")
    else:
        parse_preset(presets, arguments, job=job, purpose="")


@pytest.mark.parametrize("command", [command for command in COMMANDS if "jobs.reproduce" in command])
def test_reproductions_resolve(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEMPNET_HOME", str(tmp_path))
    arguments = shlex.split(command)
    arguments = arguments[arguments.index("jobs.reproduce") + 1 :]
    if arguments == ["--help"]:
        with pytest.raises(SystemExit):
            parse(arguments)
    else:
        config, _ = parse(arguments)
        assert make_reproduction(config).describe()


def test_every_job_that_is_shown_is_there() -> None:
    shown = set(re.findall(r"python -m jobs\.(\w+)", README))
    assert shown == {
        "train_lm", "prepare_text", "predict_temperatures", "calibrate", "generate", "evaluate_lm",
        "revision", "train_clip", "prepare_images", "evaluate_clip",
        "train_sentences", "evaluate_sentences", "train_classifier", "sweep",
        "reproduce",
    }  # fmt: skip
    for job in shown:
        assert (ROOT / "jobs" / f"{job}.py").is_file()


def test_links_and_pictures_exist() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / target).exists(), target
