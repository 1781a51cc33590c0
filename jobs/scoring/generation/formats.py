"""The formats of prompt files and of the answer files that benchmarks expect, and scores from the answers of their judges."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jobs.scoring.generation.gsm8k import STOP_STRINGS, extract_answer, few_shot_prompt, gold_answer
from jobs.tasks.base import naming_field
from pipelines.lines import decode, lines_of
from pipelines.local_copy import local_copy
from pipelines.storage import read_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    id: int | str
    """Unique within its file; it is part of the random seed of the prompt's texts."""
    turns: tuple[str, ...]
    """The user's messages, in order; every turn also sees the earlier turns and their answers."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Values from the input file that the format needs for grading or exporting."""


# A prompt and its finished conversations: for every sample, the generated text of every turn.
Answered = tuple[Prompt, Sequence[Sequence[str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFormat:
    """How a kind of prompt file is read, and how the generated texts are graded and exported."""

    read: Callable[[Path], Iterator[Prompt]]
    stop: tuple[str, ...] = ()
    """Strings that end a text. They are not used with a chat template, since a chat model ends its own turn."""
    grade: Callable[[Prompt, str], Mapping[str, Any]] = lambda prompt, text: {}
    export: Callable[[Sequence[Answered], str, str], str] | None = None
    """(answers, name of the model, hash of the settings) → content of the file that the benchmark expects. None: the
    records file itself is the output."""


def read_prompts(path: str, format_name: str, limit: int = 0, *, field: str = "prompts") -> list[Prompt]:
    """Returns the first `limit` prompts of a file that `field` names, or all if `limit` is 0."""
    with naming_field(f"{field} = "):
        place = Path(local_copy(path))
    if not place.exists():
        raise FileNotFoundError(f"{field} = {path!r} is missing: there is no such file")
    prompts = list(FORMATS[format_name].read(place))
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    ((most_frequent, count),) = Counter(prompt.id for prompt in prompts).most_common(1)
    if count > 1:
        raise ValueError(f"{path}: the id {most_frequent!r} comes twice")
    return prompts[: limit or None]


def _read_text(path: Path) -> Iterator[Prompt]:
    if path.suffix == ".txt":
        for number, line in enumerate(lines_of(_decode(path)), 1):
            if line.strip():
                yield Prompt(id=number, turns=(line,))
        return
    for where, number, record in _lines(path):
        identity = record.get("id", number)
        if not isinstance(identity, int | str):
            raise ValueError(f"{where}: `id` is neither a number nor a string")
        fields = {name: value for name, value in record.items() if name not in ("id", "prompt")}
        yield Prompt(id=identity, turns=(_string(record, "prompt", where),), fields=fields)


def _read_alpaca_eval(path: Path) -> Iterator[Prompt]:
    try:
        records = json.loads(_decode(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} line {error.lineno}: no JSON: {error.msg}") from error
    if not isinstance(records, list):
        raise ValueError(f"{path}: alpaca-eval is a JSON list, this is a {type(records).__name__}")
    for number, record in enumerate(records):
        where = f"{path} record {number}"
        if not isinstance(record, dict):
            raise ValueError(f"{where} is no JSON object")
        instruction, dataset = _string(record, "instruction", where), _string(record, "dataset", where)
        yield Prompt(id=number, turns=(instruction,), fields={"dataset": dataset})


def _export_alpaca_eval(answers: Sequence[Answered], generator: str, settings: str) -> str:
    records = [
        {
            "instruction": prompt.turns[0],
            "output": samples[0][0].strip(),
            "generator": generator,
            "dataset": prompt.fields["dataset"],
        }
        for prompt, samples in answers
    ]
    return json.dumps(records, indent=2, ensure_ascii=False) + "\n"


def _read_mt_bench(path: Path) -> Iterator[Prompt]:
    for where, _, record in _lines(path):
        turns = record.get("turns")
        if not isinstance(record.get("question_id"), int):
            raise ValueError(f"{where}: `question_id` is missing or no number")
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
            raise ValueError(f"{where}: `turns` is missing or no list of strings")
        yield Prompt(id=record["question_id"], turns=tuple(turns))


def _export_mt_bench(answers: Sequence[Answered], generator: str, settings: str) -> str:
    """Writes records as FastChat's `gen_model_answer` does, except that `answer_id` is a digest and not random."""
    lines = []
    for prompt, samples in answers:
        identity = hashlib.blake2b(f"{generator}/{settings}/{prompt.id}".encode(), digest_size=11).hexdigest()
        choices = [{"index": i, "turns": [turn.strip() for turn in turns]} for i, turns in enumerate(samples)]
        record = {"question_id": prompt.id, "answer_id": identity, "model_id": generator, "choices": choices}
        lines.append(json.dumps(record | {"tstamp": time.time()}, ensure_ascii=False))
    return "".join(f"{line}\n" for line in lines)


def _read_gsm8k(path: Path) -> Iterator[Prompt]:
    for where, number, record in _lines(path):
        question, answer = _string(record, "question", where), _string(record, "answer", where)
        with naming_field(f"{where}: "):
            gold = gold_answer(answer)
        yield Prompt(id=number, turns=(few_shot_prompt(question),), fields={"gold": gold})


def _grade_gsm8k(prompt: Prompt, text: str) -> Mapping[str, Any]:
    answer, gold = extract_answer(text), prompt.fields["gold"]
    return {"answer": answer, "gold": gold, "is_correct": answer == gold}


def _lines(path: Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yields (location for messages, line number from 1, object) for the lines of a JSONL file that are not blank."""
    for number, line in enumerate(lines_of(_decode(path)), 1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: no JSON: {error.msg}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{where} is no JSON object")
        yield where, number, record


def _string(record: Mapping[str, Any], name: str, where: str) -> str:
    if not isinstance(record.get(name), str):
        raise ValueError(f"{where}: `{name}` is missing or no string")
    return str(record[name])


def _decode(path: Path) -> str:
    try:
        return decode(path.read_bytes())
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error


FORMATS = {
    "text": PromptFormat(read=_read_text),
    "alpaca-eval": PromptFormat(read=_read_alpaca_eval, export=_export_alpaca_eval),
    "mt-bench": PromptFormat(read=_read_mt_bench, export=_export_mt_bench),
    "gsm8k": PromptFormat(read=_read_gsm8k, stop=STOP_STRINGS, grade=_grade_gsm8k),
}


def describe_judged(path: str, format_name: str, generator: str) -> str:
    """Return the score of a model as text: by alpaca_eval's judge, or by that of mt-bench."""
    with naming_field("judged = "):
        text = decode(read_bytes(path))
    by_name: dict[str, list[float]] = {}
    try:
        for name, score in (_preferences if format_name == "alpaca-eval" else _grades)(text):
            by_name.setdefault(name, []).append(score)
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"judged = {path!r} holds no answers of the judge of {format_name}: {error!r}") from error
    if generator not in by_name:
        known = ", ".join(map(repr, sorted(by_name))) or "nobody"
        raise ValueError(
            f"judged = {path!r} holds nothing about {generator!r}, but about {known}: name it by --generator"
        )
    values = by_name[generator]
    if format_name == "mt-bench":
        return f"{generator}: mean grade {np.mean(values):.2f} of {len(values)} answers"
    standard_error = 100 * np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else np.nan
    return (
        f"{generator}: win rate {100 * np.mean(values):.2f} % (standard error {standard_error:.2f}) of {len(values)} "
        "instructions; the length-controlled rate is in alpaca_eval's leaderboard.csv"
    )


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
