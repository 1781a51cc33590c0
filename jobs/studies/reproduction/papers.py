"""The page of all tables and figures of the papers, with the verdicts that reproductions have left in the storage.

`papers.yaml` lists the tables and figures. The verdict of an experiment is that of its `results.json` at small scale: of the
record with most seeds among those with all rows and the experiment's own number of steps.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.fs
import yaml

from jobs.engine.config import RunSection
from jobs.studies.reproduction.experiments import EXPERIMENTS
from jobs.studies.reproduction.report import UNSEEN
from pipelines.storage import read_json, resolve, write_bytes

_HEAD = """# The papers, table by table

Every table and figure of the four papers, the command that makes it here, and what came of it. All of it is at small scale:
two CPU cores, the sample data or small public sets; a claim that cannot be told here may hold at the papers' scale.
[Reproduce a table](reproduce.md) says when a claim holds. `jobs.reproduce papers --output docs/papers.md` writes
this page from the records of the experiments (`results.json`), so that a verdict stands here only where its command has run.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PapersConfig:
    """Where the records are, and where the page goes."""

    storage: str = ""
    """Directory or URI that holds the results of experiments. Default: $TEMPNET_HOME, else ./runs."""
    output: str = ""
    """File to write, a path or URI. Default: papers.md in the storage."""


def write_papers(config: PapersConfig) -> str:
    storage = RunSection(name="papers", storage=config.storage).resolved_storage
    output = config.output or f"{storage}/papers.md"
    write_bytes(output, papers_page(_records(storage)).encode())
    return output


def papers_page(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the page, in Markdown."""
    content = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    lines = [_HEAD]
    for paper, items in content.items():
        lines += [f"## {paper}", "", "| | what | command | verdict |", "|---|---|---|---|"]
        lines += [
            f"| {item} | {entry['shows']} | {' | '.join(_cells(entry, records))} |" for item, entry in items.items()
        ]
        lines.append("")
    lines += ["## What was found", "", "± is half the 95 % interval over the replicates.", ""]
    for id, record in records.items():
        if statements := [*_statements(record)]:
            lines += [f"### {id}: {EXPERIMENTS[id].claim}", "", *statements, ""]
    return "\n".join(lines).rstrip() + "\n"


def _records(storage: str) -> dict[str, Mapping[str, Any]]:
    """Return id of an experiment → its record, for those that have one."""
    best: dict[str, Mapping[str, Any]] = {}
    filesystem, path = resolve(storage)
    # in order of their names, so that of records with as many seeds that of the defaults comes first
    items = filesystem.get_file_info(pyarrow.fs.FileSelector(path, allow_not_found=True))
    for name in sorted(item.base_name for item in items if item.base_name.startswith("reproduce-")):
        record = read_json(f"{storage}/{name}/results.json")
        if record is None:
            continue
        id, settings = record["experiment"]["id"], record["configuration"]
        is_whole = settings["scale"] == "small" and not settings["steps"] and not settings["arms"]
        if is_whole and (id not in best or settings["seeds"] > best[id]["configuration"]["seeds"]):
            best[id] = record
    return {id: best[id] for id in EXPERIMENTS if id in best}


def _cells(entry: Mapping[str, Any], records: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
    if "not done" in entry:
        return "–", f"not done: {entry['not done']}"
    if "command" in entry:
        return f"`{entry['command']}`", entry["verdict"]
    id = entry["experiment"]
    record = records.get(id)
    if record is None:
        return f"`jobs.reproduce {id}`", "not run at small scale"
    studies = [one for one in record["studies"] if entry.get("study") in (None, one["title"])]
    if not studies:
        return f"`jobs.reproduce {id} --scale full`", "has no small form; not run"
    settings = record["configuration"]
    options = [f"--seeds {settings['seeds']}"] if settings["seeds"] != 3 else []
    options += [f"--{name} {shlex.join(settings[name])}" for name in ("change", "data") if settings[name]]
    found = [statement["verdict"] for one in studies for statement in one["statements"]]
    return f"`{' '.join(['jobs.reproduce', id, *options])}`", _verdict(found, settings["seeds"], len(record["failed"]))


def _verdict(found: Sequence[str], num_seeds: int, num_failed: int) -> str:
    """Returns the verdict on statements, which is that of the claim if they are all of its statements."""
    seeds = f"{num_seeds} seed{'s' if num_seeds > 1 else ''}" + (f", {num_failed} runs FAILED" if num_failed else "")
    if not found:
        return f"no claim is tested at this scale ({seeds})"
    verbs = {"holds": "hold", "does not hold": "do not", UNSEEN: "cannot be told"}
    parts = ", ".join(f"{number} {verb}" for verdict, verb in verbs.items() if (number := found.count(verdict)))
    first = "does not hold" if "does not hold" in found else "holds" if set(found) == {"holds"} else "cannot be told"
    return f"**{first}** ({seeds}; statements: {parts})"


def _statements(record: Mapping[str, Any]) -> Iterator[str]:
    for number, study in enumerate(one for one in record["studies"] if one["statements"]):
        yield from ("",) * (number > 0)
        yield from (f"| {study['title']} | found | bound | |", "|---|---|---|---|")
        for statement in study["statements"]:
            verdict = "cannot be told" if statement["verdict"] == UNSEEN else statement["verdict"]
            yield f"| {statement['text']} | {' | '.join(statement['as_text'])} | {verdict} |"
