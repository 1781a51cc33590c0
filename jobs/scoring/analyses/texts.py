"""Analyses of groups of texts: records → a text archive → temperatures of every record → figures, a picture and MLflow.

subjectivity    questions and answers in groups of how subjective they are (SubjQA; TempNet, Figure 6 left)
instructions    instructions and answers in groups of the verb that they begin with (Alpaca; Figure 6 right)
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pyarrow.fs import FileType

from jobs.engine.report import markdown_table, picture
from jobs.engine.tracking import resolve_uri
from jobs.scoring.analyses.config import Instructions, Subjectivity, TextAnalysis
from jobs.scoring.results import publish_findings
from jobs.scoring.temperatures.config import PredictTemperaturesConfig
from jobs.scoring.temperatures.texts import model_settings, predict_archives
from jobs.scoring.text_parts import list_sources
from jobs.scoring.units import UnitStore, absolute_output, settings_digest
from pipelines.archives import ArchiveFormat, list_archives
from pipelines.images.temperature_table import read_table
from pipelines.lines import decode
from pipelines.storage import join, read_bytes, relative, resolve, write_bytes
from tempnet.intervals import mean_interval, spearman_interval

LEAST_RECORDS = 4
"""Number of records that `spearman_interval` needs."""
_MAX_FIELD_CHARACTERS = 1 << 22
_NOT_ANSWERED = "ANSWERNOTFOUND"
_LEVELS = {"question": "question_subj_level", "answer": "answer_subj_level"}
_GROUPS = {"1": "1, most subjective", "2": "2", "3": "3", "4": "4", "5": "5, least subjective"}
_POLITE = re.compile(r"^(?:please|kindly|(?:can|could|would) you(?: please)?)\s+", re.IGNORECASE)
_OTHER_FIRST_WORDS = """
a an the this that these those my your our their his her its i you we he she it they who whom whose what which when where
why how if in on at for from of to with without by as and or but not no yes there here is are was were am do does did has
have had can could would will shall should may might must given using based some any each every all one two three after
before during while because according sentence text
"""
_NO_VERBS = frozenset(_OTHER_FIRST_WORDS.split())


@dataclass(frozen=True, slots=True)
class Records:
    """The records of an analysis, as texts with their groups, the groups in their order, and what was left out."""

    records: list[tuple[str, str]]
    groups: list[str]
    left_out: Counter[str]
    has_order: bool
    """Whether the order of the groups means something, so that a rank correlation with it does."""


def read_subjectivity(data: str, by: Literal["question", "answer"]) -> Records:
    """Read SubjQA: the text of a record is the question and the answer's span; groups go from objective to subjective."""
    records: list[tuple[str, str]] = []
    left_out: Counter[str] = Counter()
    names = ("question", "human_ans_spans", _LEVELS[by])
    for path in _csv_files(data):
        for row in _csv_rows(path, set(names)):
            # A row that is too short has None in the place of what it lacks.
            question, answer, level = ((row[name] or "").strip() for name in names)
            if not question:
                left_out["without a question"] += 1
            elif not answer or answer == _NOT_ANSWERED:
                left_out["without an answer"] += 1
            elif level not in _GROUPS:
                left_out["without a level from 1 to 5"] += 1
            else:
                records.append((f"{question}\n{answer}", _GROUPS[level]))
    return _checked(records, list(_GROUPS.values())[::-1], left_out, data, has_order=True)


def read_instructions(data: str, num_verbs: int) -> Records:
    """Read Alpaca's records: a text is instruction, input and output, its group the verb that the instruction begins with."""
    try:
        entries = json.loads(read_bytes(data))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"data = {data} is no JSON file: {error}") from error
    if not isinstance(entries, list):
        raise ValueError(f"data = {data} holds no list of records")
    records: list[tuple[str, str]] = []
    left_out: Counter[str] = Counter()
    for entry in entries:
        parts = [entry.get(name, "") for name in ("instruction", "input", "output")] if isinstance(entry, dict) else []
        if not parts or not all(isinstance(part, str) for part in parts) or not parts[0].strip():
            left_out["not a record of Alpaca"] += 1
        elif verb := first_verb(parts[0]):
            records.append(("\n".join(part.strip() for part in parts if part.strip()), verb))
        else:
            left_out["not begun with a verb"] += 1
    verbs = [verb for verb, _ in Counter(group for _, group in records).most_common(num_verbs)]
    kept = [(text, group) for text, group in records if group in verbs]
    left_out[f"not begun with one of the {num_verbs} most frequent verbs"] = len(records) - len(kept)
    return _checked(kept, verbs, left_out, data, has_order=False)


def first_verb(instruction: str) -> str:
    """Return the first word of an instruction in lower case, without polite phrases; empty if it can be no verb."""
    match = re.match(r"[A-Za-z]+", _POLITE.sub("", instruction.strip()))
    word = match.group().lower() if match else ""
    return "" if word in _NO_VERBS else word


def _checked(
    records: list[tuple[str, str]], groups: list[str], left_out: Counter[str], data: str, *, has_order: bool
) -> Records:
    used = {group for _, group in records}
    if len(used) < 2:
        reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items() if count) or "there are no others"
        raise ValueError(
            f"data = {data} has {len(records)} records in {len(used)} groups, and 2 are needed; left out: {reasons}"
        )
    return Records(records, [group for group in groups if group in used], +left_out, has_order)


def _csv_files(data: str) -> list[str]:
    filesystem, root = resolve(data)
    if filesystem.get_file_info(root).type is FileType.File:
        return [data]
    try:
        files = list_archives(data, {".csv": ArchiveFormat.PLAIN})
    except FileNotFoundError as error:
        raise FileNotFoundError(f"data = {data} holds no .csv file: {error}") from error
    return [join(data, relative(file.path, root)) for file in files]


def _csv_rows(path: str, needed: set[str]) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(_MAX_FIELD_CHARACTERS)
    try:
        reader = csv.DictReader(io.StringIO(decode(read_bytes(path))))
        if missing := sorted(needed - set(reader.fieldnames or ())):
            raise ValueError(f"{path} is no file of SubjQA: it has no column {', '.join(missing)}")
        yield from reader
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as CSV in UTF-8: {error}") from error


def analyse_subjectivity(config: Subjectivity) -> dict[str, Any]:
    return analyse(config, read_subjectivity(config.data, config.by), f"τ by subjectivity of the {config.by}")


def analyse_instructions(config: Instructions) -> dict[str, Any]:
    return analyse(config, read_instructions(config.data, config.num_verbs), "τ by the verb of the instruction")


def analyse(config: TextAnalysis, records: Records, title: str) -> dict[str, Any]:
    """Run or continue the analysis of some records, print its table, and return the figures."""
    if records.has_order and len(records.records) < LEAST_RECORDS:
        raise ValueError(
            f"data = {config.data} has {len(records.records)} records that can be used, and an interval of a rank "
            f"correlation needs {LEAST_RECORDS}"
        )
    uri = resolve_uri(config.tracking, config.run.resolved_storage)
    output = absolute_output(config.output)
    names = ("model", "tempnet", "context_length", "batch_size", "precision", "max_bad_share", "workers")
    options = {name: getattr(config, name) for name in names}
    settings = model_settings(
        PredictTemperaturesConfig(text=join(output, "records.jsonl"), with_entropy=False, **options)
    )
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text, _ in records.records)
    record = settings.record() | {"analysis": title, "records": settings_digest({"lines": lines})}
    temperatures = join(output, "temperatures")
    UnitStore(temperatures).claim(record)
    write_bytes(settings.config.text, lines.encode())
    predict_archives(replace(settings, archives=list_sources(settings.config.text)), temperatures)
    means = read_means(temperatures)
    groups = [records.records[number][1] for number in sorted(means)]
    values = figures(records, groups, np.array([means[number] for number in sorted(means)]))
    metrics = {"tau_mean": values["tau_mean"], "num_records": float(values["num_records"])}
    if values["spearman"]:
        metrics["spearman"] = values["spearman"]["mean"]
    publish_findings(
        config,
        title,
        uri=uri,
        values=values,
        table=table(values),
        conclusion=conclusion(values),
        plot_file="groups.png",
        plot=partial(plot, values, title),
        metrics=metrics,
        settings=record,
        source=config.data,
    )
    return values


def read_means(output: str) -> dict[int, float]:
    """Return number of the record → mean τ of its tokens, from the tables of a prediction; empty records are absent."""
    columns = read_table(output, ["key", "tau_mean"]).to_pydict()
    pairs = zip(columns["key"], columns["tau_mean"], strict=True)
    return {int(key.rpartition(":")[2]): tau for key, tau in pairs if tau is not None and math.isfinite(tau)}


def figures(records: Records, groups: Sequence[str], tau: np.ndarray) -> dict[str, Any]:
    """Return the figures of all groups, each mean with its 95 % half-width over records (None for a single record)."""
    rows = []
    names = np.array(groups)
    for group in records.groups:
        values = tau[names == group]
        if len(values):
            rows.append({"group": group, "num_records": len(values), **mean_interval(values).as_json()})
    correlation = None
    if records.has_order:
        order = torch.tensor([records.groups.index(group) for group in groups], dtype=torch.float64)
        correlation = spearman_interval(torch.from_numpy(tau), order).as_json()
    return {
        "groups": rows,
        "num_records": len(tau),
        "tau_mean": float(tau.mean()),
        "spearman": correlation,
        "left_out": dict(records.left_out),
    }


def _in_order(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the groups in the order that they have, else by their mean τ."""
    groups: list[dict[str, Any]] = values["groups"]
    return groups if values["spearman"] else sorted(groups, key=lambda row: float(row["mean"]))


def conclusion(values: dict[str, Any]) -> str:
    left_out = ", ".join(f"{count} {reason}" for reason, count in values["left_out"].items()) or "none"
    counts = f"{values['num_records']} records; left out: {left_out}"
    if correlation := values["spearman"]:
        r, half = correlation["mean"], correlation["half_width"]
        word = "τ rises" if r > half else "τ falls" if r < -half else "no trend of τ can be seen"
        return f"{word} from the first group to the last: Spearman {r:+.3f} ± {half:.3f}. {counts}"
    ordered = _in_order(values)
    low, high = ordered[0], ordered[-1]
    return (
        f"lowest {low['group']} {_interval(low)}, highest {high['group']} {_interval(high)} (each interval is that of one "
        f"group alone). {counts}"
    )


def table(values: dict[str, Any]) -> str:
    ordered = _in_order(values)[:: 1 if values["spearman"] else -1]
    rows = [[row["group"], f"{row['num_records']}", _interval(row)] for row in ordered]
    return markdown_table([["group", "records", "mean τ"], *rows])


def _interval(row: dict[str, Any]) -> str:
    return f"{row['mean']:.4f}" + ("" if row["half_width"] is None else f" ± {row['half_width']:.4f}")


def plot(values: dict[str, Any], title: str, path: Path) -> None:
    rows = _in_order(values)
    with picture(path, figsize=(7, 1.2 + 0.3 * len(rows))) as ((axes,),):
        places, halves = range(len(rows)), [row["half_width"] or 0.0 for row in rows]
        axes.errorbar([row["mean"] for row in rows], places, xerr=halves, fmt="o", capsize=3)
        axes.set_yticks(list(places), [f"{row['group']} ({row['num_records']})" for row in rows])
        axes.axvline(values["tau_mean"], color="black", linestyle="--", linewidth=0.8, label="mean of all records")
        axes.set(xlabel="mean τ of a record, 95 % interval over records", title=title)
        axes.legend(fontsize=8)
