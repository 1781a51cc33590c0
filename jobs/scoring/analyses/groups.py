"""The job: records → a text archive → temperatures of every record → figures of the groups, a picture and MLflow."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from jobs.engine.tables import markdown_table
from jobs.engine.tracking import resolve_uri
from jobs.scoring.analyses.config import TextAnalysis
from jobs.scoring.analyses.records import Records
from jobs.scoring.results import Findings, absolute_output, publish_findings
from jobs.scoring.temperatures.config import PredictTemperaturesConfig
from jobs.scoring.temperatures.text_job import predict_archives
from jobs.scoring.temperatures.texts import PredictionSettings, model_settings
from jobs.scoring.text_sources import list_sources
from jobs.scoring.units import UnitStore, settings_digest
from pipelines.storage import join, resolve, write_bytes
from tempnet.intervals import mean_interval, spearman_interval

PICTURE_FILE = "groups.png"
RECORDS_FILE = "records.jsonl"
TEMPERATURES_DIRECTORY = "temperatures"
LEAST_RECORDS = 4
"""Number of records that `spearman_interval` needs."""


def analyse(config: TextAnalysis, records: Records, title: str) -> dict[str, Any]:
    """Run or continue an analysis, print its table, and return the figures.

    Args:
        config: the model and the places of data and results.
        records: the records to compare.
        title: name of the analysis, for the picture and MLflow.

    Raises:
        ValueError, OSError: before any work starts, if model, TempNet and records do not fit together.
        ScoringFailedError, TooManyProblemsError: see `predict_archives`.
    """
    if records.has_order and len(records.records) < LEAST_RECORDS:
        raise ValueError(
            f"data = {config.data} has {len(records.records)} records that can be used, and an interval of a rank "
            f"correlation needs {LEAST_RECORDS}"
        )
    uri = resolve_uri(config.tracking, config.run.resolved_storage)
    output = absolute_output(config)
    settings = _prediction_settings(config, join(output, RECORDS_FILE))
    lines = "".join(json.dumps({"text": record.text}, ensure_ascii=False) + "\n" for record in records.records)
    record = settings.record([]) | {"analysis": title, "records": settings_digest({"lines": lines})}
    temperatures = join(output, TEMPERATURES_DIRECTORY)
    UnitStore(temperatures).claim(record)
    write_bytes(settings.source, lines.encode())
    archives = list_sources(settings.source)
    predict_archives(settings, archives, temperatures, config.workers, max_bad_share=config.max_bad_share)
    groups, tau = _match(records, read_means(temperatures))
    values = figures(records, groups, tau)
    metrics = {"tau_mean": values["tau_mean"], "num_records": float(values["num_records"])}
    if values["spearman"]:
        metrics["spearman"] = values["spearman"]["mean"]
    findings = Findings(
        title=title,
        values=values,
        table=table(values),
        conclusion=conclusion(values),
        picture=PICTURE_FILE,
        plot=partial(plot, values, title),
        metrics=metrics,
        settings=record,
        source=config.data,
    )
    publish_findings(config, findings, uri=uri)
    return values


def _prediction_settings(config: TextAnalysis, text: str) -> PredictionSettings:
    """Return the settings that predict the temperatures of the records, which lie in an archive at `text`."""
    return model_settings(
        PredictTemperaturesConfig(
            model=config.model,
            tempnet=config.tempnet,
            text=text,
            context_length=config.context_length,
            batch_size=config.batch_size,
            precision=config.precision,
            with_entropy=False,
            max_bad_share=config.max_bad_share,
            workers=config.workers,
        )
    )


def read_means(output: str) -> dict[int, float]:
    """Return number of the record → mean τ of its tokens, from the tables of a prediction; empty records are absent."""
    filesystem, path = resolve(output)
    tables = [
        pq.read_table(f"{path}/{name}", filesystem=filesystem, columns=["key", "tau_mean"])
        for name in sorted(UnitStore(output).parts())
    ]
    if not tables:
        return {}
    columns = pa.concat_tables(tables).to_pydict()
    pairs = zip(columns["key"], columns["tau_mean"], strict=True)
    return {int(key.rpartition(":")[2]): tau for key, tau in pairs if tau is not None and math.isfinite(tau)}


def figures(records: Records, groups: Sequence[str], tau: np.ndarray) -> dict[str, Any]:
    """Return the figures of all groups, each mean with its 95 % half-width over records (None for a single record).

    Args:
        records: names and order of the groups, and what was left out.
        groups: group of every record (n).
        tau: mean τ of every record (n,).
    """
    rows = []
    names = np.array(groups)
    for group in records.groups:
        values = tau[names == group]
        if len(values):
            rows.append({"group": group, "num_records": len(values), **mean_interval(values).as_json()})
    correlation = None
    if records.has_order:
        positions = {group: number for number, group in enumerate(records.groups)}
        order = torch.tensor([positions[group] for group in groups], dtype=torch.float64)
        correlation = spearman_interval(torch.from_numpy(tau), order).as_json()
    return {
        "groups": rows,
        "num_records": len(tau),
        "tau_mean": float(tau.mean()),
        "spearman": correlation,
        "left_out": dict(records.left_out),
    }


def conclusion(values: dict[str, Any]) -> str:
    """Return one line that says whether τ differs between the groups."""
    left_out = ", ".join(f"{count} {reason}" for reason, count in values["left_out"].items()) or "none"
    counts = f"{values['num_records']} records; left out: {left_out}"
    if correlation := values["spearman"]:
        r, half = correlation["mean"], correlation["half_width"]
        word = "τ rises" if r > half else "τ falls" if r < -half else "no trend of τ can be seen"
        return f"{word} from the first group to the last: Spearman {r:+.3f} ± {half:.3f}. {counts}"
    ordered = sorted(values["groups"], key=lambda row: row["mean"])
    low, high = ordered[0], ordered[-1]
    return (
        f"lowest {low['group']} {_interval(low)}, highest {high['group']} {_interval(high)} (each interval is that of one "
        f"group alone). {counts}"
    )


def table(values: dict[str, Any]) -> str:
    """Return a Markdown table with a row for each group: records, and mean τ with its 95 % interval."""
    rows = [["group", "records", "mean τ"]]
    ordered = values["groups"] if values["spearman"] else sorted(values["groups"], key=lambda row: -row["mean"])
    rows += [[row["group"], f"{row['num_records']}", _interval(row)] for row in ordered]
    return markdown_table(rows)


def _interval(row: dict[str, Any]) -> str:
    return f"{row['mean']:.4f}" + ("" if row["half_width"] is None else f" ± {row['half_width']:.4f}")


def plot(values: dict[str, Any], title: str, path: Path) -> None:
    """Plot the mean τ of every group with its 95 % interval."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = values["groups"] if values["spearman"] else sorted(values["groups"], key=lambda row: row["mean"])
    figure, axes = plt.subplots(figsize=(7, 1.2 + 0.3 * len(rows)), layout="constrained")
    places = range(len(rows))
    means, halves = (
        [row["mean"] for row in rows],
        [row["half_width"] or 0.0 for row in rows],
    )
    axes.errorbar(means, places, xerr=halves, fmt="o", capsize=3)
    axes.set_yticks(list(places), [f"{row['group']} ({row['num_records']})" for row in rows])
    axes.axvline(values["tau_mean"], color="black", linestyle="--", linewidth=0.8, label="mean of all records")
    axes.set(xlabel="mean τ of a record, 95 % interval over records", title=title)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _match(records: Records, means: dict[int, float]) -> tuple[list[str], np.ndarray]:
    """Return the groups and mean τ of the records that have one, in order."""
    numbers = sorted(means)
    return [records.records[number].group for number in numbers], np.array([means[number] for number in numbers])
