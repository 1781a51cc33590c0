"""The files that prompts come in, and the files that benchmarks want back."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.scoring.generation.gsm8k import STOP_STRINGS, extract_answer, few_shot_prompt, gold_answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One thing to be answered."""

    id: int | str
    """Unique in its file; a text is seeded with it."""
    turns: tuple[str, ...]
    """What is asked; a second turn sees the answer to the first."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """What its format needs again in the end."""


# A prompt and its finished conversations: the texts of the turns of every sample.
Answered = tuple[Prompt, Sequence[Sequence[str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFormat:
    """How prompts of a kind are read, and what is made of the texts."""

    read: Callable[[Path], Iterator[Prompt]]
    """Errors name the line (or record) and what is wrong with it."""
    stop: tuple[str, ...] = ()
    """Strings that end a text; a chat model ends its turn itself."""
    grade: Callable[[Prompt, str], Mapping[str, Any]] = lambda prompt, text: {}
    """What a record says about a text beside the text."""
    export: Callable[[Sequence[Answered], str, str], str] | None = None
    """(answers, name of the model, settings) → the file that the benchmark wants; None: the records are that file."""


def read_prompts(path: str, format_name: str, limit: int) -> list[Prompt]:
    """The first `limit` prompts of a file (0: all).

    Raises:
        OSError: if it cannot be read.
        ValueError: if a record is malformed, with its line, or an id comes twice, or there is none at all.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"prompts = {path!r} is missing: there is no such file")
    prompts: list[Prompt] = []
    seen: set[int | str] = set()
    for prompt in FORMATS[format_name].read(Path(path)):
        if prompt.id in seen:
            raise ValueError(f"{path}: the id {prompt.id!r} comes twice")
        seen.add(prompt.id)
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts[: limit or None]


def _read_text(path: Path) -> Iterator[Prompt]:
    if path.suffix == ".txt":
        for number, line in enumerate(_decode(path).splitlines(), 1):
            if line.strip():
                yield Prompt(id=number, turns=(line,))
        return
    for where, number, record in _lines(path):
        identity = record.get("id", number)
        if not isinstance(identity, int | str):
            raise ValueError(f"{where}: `id` is neither a number nor a string")
        yield Prompt(id=identity, turns=(_string(record, "prompt", where),))


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
    """Records as FastChat's `gen_model_answer` writes them; `answer_id` is a digest instead of a random string."""
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
        try:
            gold = gold_answer(answer)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        yield Prompt(id=number, turns=(few_shot_prompt(question),), fields={"gold": gold})


def _grade_gsm8k(prompt: Prompt, text: str) -> Mapping[str, Any]:
    answer, gold = extract_answer(text), prompt.fields["gold"]
    return {"answer": answer, "gold": gold, "is_correct": answer == gold}


def _lines(path: Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """(where it is, line number from 1, object) of every line of a JSONL file; blank lines are passed over."""
    for number, line in enumerate(_decode(path).split("\n"), 1):
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
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error


FORMATS = {
    "text": PromptFormat(read=_read_text),
    "alpaca-eval": PromptFormat(read=_read_alpaca_eval, export=_export_alpaca_eval),
    "mt-bench": PromptFormat(read=_read_mt_bench, export=_export_mt_bench),
    "gsm8k": PromptFormat(read=_read_gsm8k, stop=STOP_STRINGS, grade=_grade_gsm8k),
}
