"""Tests that every command that a job prints can be typed: under "To look around", in --help and in reproductions."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tyro

from jobs import (
    analyse,
    calibrate,
    export,
    prepare_features,
    prepare_images,
    prepare_text,
    reproduce,
    revision,
    runs,
    sample_data,
    submit,
    train_clip,
    train_lm,
    train_reward,
)
from jobs.engine.command_line import parse_preset
from jobs.engine.launch import print_where_to_look
from jobs.scoring.command import parse_subcommand
from jobs.scoring.dual_encoders.config import EvaluateClipConfig
from jobs.scoring.dual_encoders.evaluate import image_sources
from jobs.scoring.generation.config import GenerateConfig
from jobs.scoring.language_models.config import EvaluateConfig
from jobs.scoring.playground.config import PlaygroundConfig
from jobs.scoring.sentence_encoders.config import EvaluateSentencesConfig
from jobs.scoring.temperatures.config import PredictPairTemperaturesConfig, PredictTemperaturesConfig
from jobs.studies.reproduction.experiments import EXPERIMENTS
from jobs.studies.sweeps import presets as sweeps
from jobs.tasks.presets import classifiers, clip, images, language_models, sentences

ROOT = Path(__file__).parents[2]
JOBS = sorted(
    path.stem for path in (ROOT / "jobs").glob("*.py") if re.search(r"^def main\(", path.read_text(), re.MULTILINE)
)


def of_presets(presets: Mapping[str, Callable[[], Any]], job: str) -> Callable[[Sequence[str]], Any]:
    return lambda arguments: parse_preset(presets, arguments, job=job, purpose="")[0]


def of(config: Any) -> Callable[[Sequence[str]], Any]:
    return lambda arguments: tyro.cli(config, args=arguments)


def parse_prediction(arguments: Sequence[str]) -> Any:
    kind = PredictPairTemperaturesConfig if "--images" in arguments else PredictTemperaturesConfig
    return tyro.cli(kind, args=arguments)  # type: ignore[type-var]


PARSERS: dict[str, Callable[[Sequence[str]], Any]] = {
    "train_lm": of_presets(language_models.PRESETS, "train_lm"),
    "train_clip": of_presets(clip.PRESETS, "train_clip"),
    "train_sentences": of_presets(sentences.PRESETS, "train_sentences"),
    "train_images": of_presets(images.PRESETS, "train_images"),
    "train_classifier": of_presets(classifiers.PRESETS, "train_classifier"),
    "sweep": of_presets(sweeps.PRESETS, "sweep"),
    "analyse": lambda arguments: parse_subcommand(arguments, analyse.ANALYSES, job="analyse", description=""),
    "calibrate": lambda arguments: parse_subcommand(
        arguments, calibrate.subcommands(arguments), job="calibrate", description=""
    ),
    "evaluate_clip": of(EvaluateClipConfig),
    "evaluate_lm": of(EvaluateConfig),
    "evaluate_sentences": of(EvaluateSentencesConfig),
    "export": of(export.ExportJob),
    "generate": of(GenerateConfig),
    "playground": of(PlaygroundConfig),
    "predict_temperatures": parse_prediction,
    "prepare_features": of_presets(prepare_features.PRESETS, "prepare_features"),
    "prepare_images": of(prepare_images.PrepareImagesJob),
    "prepare_text": of(prepare_text.PrepareTextJob),
    "reproduce": reproduce.parse,
    "revision": revision.main,
    "runs": of(runs.RunsConfig),
    "sample_data": of(sample_data.SampleDataConfig),
    "submit": submit.parse,
    "train_reward": train_reward.parse,
}


def parse(command: str) -> Any:
    """Returns the configuration that a command stands for, or None for --help."""
    words = shlex.split(command)
    job = words[words.index("-m") + 1].removeprefix("jobs.")
    arguments = words[words.index("-m") + 2 :]
    if arguments != ["--help"]:
        return PARSERS[job](arguments)
    with pytest.raises(SystemExit) as stop:
        PARSERS[job](arguments)
    assert stop.value.code == 0
    return None


def commands_in(text: str) -> list[str]:
    """Returns the commands of a text that begin with `python -m jobs.`, each joined with its continuation lines."""
    return [
        line for line in map(str.strip, text.replace("\\\n", " ").splitlines()) if line.startswith("python -m jobs.")
    ]


def test_every_job_has_a_parser() -> None:
    assert set(PARSERS) == set(JOBS)


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
