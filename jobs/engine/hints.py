"""Adds a hint to error messages: the command that creates the file that a job did not find, or what was meant instead."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

_WORD = re.compile(r"[^\s'\"`:;,()]+")
_EXPORT = re.compile(r"(?:.*/)?([^/]+)/export(?:/.*)?")
_SAMPLE = re.compile(r"(?:.*/)?data/sample(?:/.*)?")
# Patterns of the presets' names. A test checks them against the presets, which this package must not import.
_PRESETS = {
    "sweep": re.compile(r".*-rho-lr(?:-small)?"),
    "train_lm": re.compile(r"gpt2-(?:scratch|finetune)(?:-small)?|(?:llama[12]-.*)?frozen(?:-small)?"),
    "train_clip": re.compile(r"clip-.*"),
    "train_sentences": re.compile(r"declutr-.*"),
    "train_classifier": re.compile(r"triple-entropy.*"),
}
_TRAINED = ("train_lm", "train_clip", "train_sentences")  # the jobs whose runs have an export
_PLACEHOLDER = "'model' is no local directory"  # the path in the preset `frozen`
_NO_MODEL = "Transformers model"  # part of every message about a directory that is none


def with_hint(message: str) -> str:
    """Return an error message with what helps with the first path in it for which that is known.

    For a path that is missing: the command that makes the sample data, or trains a small preset. For a directory that is no
    model of the wanted kind: the export in it, or the options for an image–text model.
    """
    for word in _WORD.findall(message):
        if word.startswith("//"):  # a URI without its scheme
            continue
        hint = ""
        if word == "model" and _PLACEHOLDER in message:
            return f"{message.rstrip('.')}. The preset `frozen` is for a model of your own: give --model.path"
        if (path := Path(word).expanduser()).exists():
            hint = _meant(path, word) if _NO_MODEL in message else ""
        elif _SAMPLE.fullmatch(word):
            hint = "The sample data are made by: python -m jobs.sample_data"
        elif (export := _EXPORT.fullmatch(word)) and (command := _training_command(export[1])):
            hint = f"This model is made by: {command}"
        if hint:
            return f"{message.rstrip('.')}. {hint}"
    return message


def _meant(directory: Path, name: str) -> str:
    """Say what was meant by a directory that is no model of the wanted kind; empty if that is not known."""
    if (directory / "export" / "config.json").is_file():
        return f"It is a run; its model is {name.rstrip('/')}/export"
    with suppress(OSError, ValueError):
        if {"embedding_size", "image_size"} <= json.loads((directory / "config.json").read_bytes()).keys():
            return (
                "It is an image–text model: give it --images in the place of --text, or score it by jobs.evaluate_clip"
            )
    return ""


def job_of(preset: str) -> str:
    """Return the job that has a preset of this name; empty if none has."""
    return next((job for job, names in _PRESETS.items() if names.fullmatch(preset)), "")


def _training_command(run: str) -> str:
    """Return the command that trains a run with the name of a small preset; empty for any other name."""
    job = job_of(run)
    return (
        f"python -m jobs.{job} {run}" if job in _TRAINED and run.endswith("-small") and run != "declutr-small" else ""
    )
