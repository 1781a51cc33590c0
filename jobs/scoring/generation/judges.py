"""Scores from the answers of a judge, which other tools ask: alpaca_eval's win rate, and the grades of MT-bench."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import numpy as np

from pipelines.lines import decode, lines_of
from pipelines.storage import read_bytes


def describe_judged(path: str, format_name: str, generator: str) -> str:
    """Return the score of a model as text.

    Args:
        path: path or URI of the judge's answers.
        format_name: `alpaca-eval` or `mt-bench`.
        generator: name of the model.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is not in the judge's form, or holds nothing about this model.
    """
    from jobs.tasks.base import naming_field  # here, because it imports Transformers

    with naming_field("judged = "):
        text = decode(read_bytes(path))
    read, describe = _JUDGES[format_name]
    try:
        by_name: dict[str, list[float]] = {}
        for name, score in read(text):
            by_name.setdefault(name, []).append(score)
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"judged = {path!r} holds no answers of the judge of {format_name}: {error!r}") from error
    if generator not in by_name:
        known = ", ".join(map(repr, sorted(by_name))) or "nobody"
        raise ValueError(
            f"judged = {path!r} holds nothing about {generator!r}, but about {known}: name it by --generator"
        )
    return f"{generator}: {describe(by_name[generator])}"


def _preferences(text: str) -> Iterator[tuple[str, float]]:
    """Yield (name, preference for it in [0, 1]) of alpaca_eval's annotations; 1 is the reference, 2 the model, 0 a draw."""
    for record in json.loads(text):
        if (preference := record["preference"]) is not None:  # the judge gave no answer
            yield str(record["generator_2"]), 0.5 if preference == 0 else float(preference) - 1.0


def _grades(text: str) -> Iterator[tuple[str, float]]:
    """Yield (name, grade from 1 to 10) of FastChat's judgements; −1 marks an answer without a grade."""
    for line in lines_of(text):
        if line.strip() and (record := json.loads(line))["score"] != -1:
            yield str(record["model"]), float(record["score"])


def _describe_preferences(values: list[float]) -> str:
    error = 100 * np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else np.nan
    return (
        f"win rate {100 * np.mean(values):.2f} % (standard error {error:.2f}) of {len(values)} instructions; "
        "the length-controlled rate is in alpaca_eval's leaderboard.csv"
    )


def _describe_grades(values: list[float]) -> str:
    return f"mean grade {np.mean(values):.2f} of {len(values)} answers"


_JUDGES: dict[str, tuple[Callable[[str], Iterator[tuple[str, float]]], Callable[[list[float]], str]]] = {
    "alpaca-eval": (_preferences, _describe_preferences),
    "mt-bench": (_grades, _describe_grades),
}
