"""Adds a hint to error messages: the command that creates the file that a job did not find."""

from __future__ import annotations

import re
from pathlib import Path

_WORD = re.compile(r"[^\s'\"`:;,()]+")
_EXPORT = re.compile(r"(?:.*/)?([^/]+)/export(?:/.*)?")
_SAMPLE = re.compile(r"(?:.*/)?data/sample(?:/.*)?")
# Patterns of the small presets' names. A test checks them against the presets, which this package must not import.
_SMALL_PRESETS = {
    "train_lm": re.compile(r"(?:gpt2-(?:scratch|finetune)|(?:llama[12]-.*)?frozen)-small"),
    "train_clip": re.compile(r"clip-.*-small"),
    "train_sentences": re.compile(r"declutr-.*-small"),
}


def with_hint(message: str) -> str:
    """Return an error message with the command that creates the first missing path in it, if the command is known.

    It is known for the sample data and for the export of a run that has the name of a small preset.
    """
    for word in _WORD.findall(message):
        if word.startswith("//") or Path(word).expanduser().exists():  # the first is a URI without its scheme
            continue
        if _SAMPLE.fullmatch(word):
            return f"{message.rstrip('.')}. The sample data are made by: python -m jobs.sample_data"
        if (export := _EXPORT.fullmatch(word)) and (command := _training_command(export[1])):
            return f"{message.rstrip('.')}. This model is made by: {command}"
    return message


def _training_command(run: str) -> str:
    """Return the command that trains a run with the name of a small preset; empty for any other name."""
    return next((f"python -m jobs.{job} {run}" for job, names in _SMALL_PRESETS.items() if names.fullmatch(run)), "")
