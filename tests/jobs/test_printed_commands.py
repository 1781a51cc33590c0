"""Tests that every command that a job prints can be typed: under "To look around", in --help and in reproductions."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tyro

from jobs import train_clip, train_lm
from jobs.engine.command_line import parse_preset
from jobs.engine.launch import print_where_to_look
from jobs.scoring.command import parse_subcommand
from jobs.scoring.dual_encoders.evaluate import image_sources
from jobs.scoring.temperatures.config import PredictTemperaturesConfig
from jobs.studies.reproduction.experiments import EXPERIMENTS
from jobs.tasks.presets import clip, language_models

ROOT = Path(__file__).parents[2]
JOBS = sorted(
    path.stem for path in (ROOT / "jobs").glob("*.py") if re.search(r"^def main\(", path.read_text(), re.MULTILINE)
)


def parse_arguments(job: str, arguments: Sequence[str]) -> Any:
    """Return the configuration that the arguments of a job stand for; it is made, and nothing is run."""
    module: Any = importlib.import_module(f"jobs.{job}")
    if job in ("analyse", "calibrate"):
        jobs = module.ANALYSES if job == "analyse" else module.subcommands(arguments)
        return parse_subcommand(arguments, jobs, job=job, description="")
    if job == "predict_temperatures":
        pairs, tokens = module.PredictPairTemperaturesConfig, module.PredictTemperaturesConfig
        return tyro.cli(pairs if "--images" in arguments else tokens, args=arguments)
    if job in ("reproduce", "submit", "train_reward", "revision"):
        return (module.main if job == "revision" else module.parse)(arguments)
    if hasattr(module, "PRESETS"):
        return parse_preset(module.PRESETS, arguments, job=job, purpose="")[0]
    kinds = [kind for name, kind in sorted(vars(module).items()) if name.endswith(("Config", "Job"))]
    return tyro.cli(kinds[-1], args=arguments)  # of `PrepareTextJob` and a `PrepareConfig` in it the former


def parse(command: str) -> Any:
    """Returns the configuration that a command stands for, or None for --help."""
    words = shlex.split(command)
    job = words[words.index("-m") + 1].removeprefix("jobs.")
    arguments = words[words.index("-m") + 2 :]
    if arguments != ["--help"]:
        return parse_arguments(job, arguments)
    with pytest.raises(SystemExit) as stop:
        parse_arguments(job, arguments)
    assert stop.value.code == 0
    return None


def commands_in(text: str) -> list[str]:
    """Returns the commands of a text that begin with `python -m jobs.`, each joined with its continuation lines."""
    return [
        line for line in map(str.strip, text.replace("\\\n", " ").splitlines()) if line.startswith("python -m jobs.")
    ]


@pytest.mark.parametrize("job", JOBS)
def test_what_help_shows_parses(job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # Every file that a command names is made here.
    shown = commands_in(importlib.import_module(f"jobs.{job}").__doc__ or "")
    assert shown
    for command in shown:
        for word in shlex.split(command):
            if word.endswith((".txt", ".jsonl", ".json", ".md")) and "=" not in word:
                Path(word).parent.mkdir(parents=True, exist_ok=True)
                Path(word).touch()
        parse(command)


def test_what_reproductions_show_parses() -> None:
    notes = [note for one in EXPERIMENTS.values() for study in one.studies["full"] for note in study.notes]
    shown = re.findall(r"`(python -m jobs\.[^`]+)`", "\n".join(notes))
    assert len(shown) >= 6
    for command in shown:
        parse(command)


def printed(command: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    outcome = {"directory": "runs/a", "export": "runs/a/export", "tracking_uri": ""}
    print_where_to_look(outcome, results="curves.png", commands=[command])
    return capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("name", clip.PRESETS)
def test_a_contrastive_run_shows_how_to_evaluate_on_what_it_was_validated_on(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    preset = clip.PRESETS[name]()
    splits = ("val", "restval") if preset.data.validation_captions else ()
    data = replace(preset.data, validation="my images/val 2014", validation_splits=splits)
    evaluation = parse(printed(train_clip.evaluation_of(replace(preset, data=data), "runs/a b/export"), capsys))
    source = image_sources(evaluation)["validation"]
    assert evaluation.models == ("runs/a b/export",)
    assert (source.source, source.captions) == (data.validation, data.validation_captions)
    assert tuple(filter(None, source.splits)) == splits
    assert source.max_bad_share == data.max_bad_share


@pytest.mark.parametrize("name", language_models.PRESETS)
def test_a_language_model_shows_what_its_export_can_be_used_for(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # Users type commands in this directory.
    preset = language_models.PRESETS[name]()
    config = parse(printed(train_lm.look_at(preset, "runs/a/export"), capsys))
    assert isinstance(config, PredictTemperaturesConfig) == preset.temperature.needs_tempnet
    assert (ROOT / (getattr(config, "text", "") or config.wikitext)).is_file()
