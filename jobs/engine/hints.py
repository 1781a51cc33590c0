"""Which command makes what a job did not find."""

from __future__ import annotations

import re
from pathlib import Path

_WORD = re.compile(r"[^\s'\"`:;,()]+")
_EXPORT = re.compile(r"(?:.*/)?([^/]+)/export(?:/.*)?")
_SAMPLE = re.compile(r"(?:.*/)?data/sample(?:/.*)?")


def with_hint(message: str) -> str:
    """An error's message, with the command that makes the first path in it that is not there, if one is known: sample data,
    and the export of a run that has the name of a preset.
    """
    for word in _WORD.findall(message):
        if Path(word).expanduser().exists():
            continue
        if _SAMPLE.fullmatch(word):
            return f"{message.rstrip('.')}. The sample data are made by: python -m jobs.sample_data"
        if (export := _EXPORT.fullmatch(word)) and (command := _training_command(export[1])):
            return f"{message.rstrip('.')}. This model is made by: {command}"
    return message


def _training_command(preset: str) -> str:
    # Imported late: only a message about a missing model needs them.
    from jobs.tasks.presets import clip, language_models, sentences

    jobs = {"train_lm": language_models, "train_clip": clip, "train_sentences": sentences}
    return next((f"python -m jobs.{job} {preset}" for job, module in jobs.items() if preset in module.PRESETS), "")
