"""What an analysis found, written to its directory, logged to MLflow and printed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.engine.export import open_export
from jobs.engine.identity import flatten
from jobs.engine.tracking import finish_run, open_run, survive_outage
from jobs.scoring.analyses.config import Analysis
from jobs.scoring.units import settings_digest
from pipelines.storage import resolve

RESULTS_FILE = "results.json"
TABLE_FILE = "results.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The figures of an analysis, and how they are shown."""

    title: str
    """Name of the analysis, for the picture and MLflow."""
    values: Mapping[str, Any]
    """All figures, in the form of JSON."""
    table: str
    """The figures as a Markdown table."""
    conclusion: str
    """One line that says what they mean."""
    picture: str
    """Name of the file of the picture."""
    plot: Callable[[Path], None]
    """Draws the picture into a file."""
    metrics: Mapping[str, float]
    """Metrics of the run in MLflow."""
    settings: dict[str, Any]
    """What the figures depend on; together with the place of the results it identifies the run in MLflow."""
    source: str
    """Path or URI of the data, as MLflow shows it."""


def publish(config: Analysis, findings: Findings, *, output: str, uri: str) -> None:
    """Write the figures, the table and the picture, log them to MLflow, and print the table and the conclusion.

    Args:
        config: configuration of the analysis.
        findings: what was found.
        output: path or URI of the results.
        uri: URI of the MLflow store; empty: nothing is logged.
    """
    values = {**findings.values, "title": findings.title, "settings": findings.settings}
    with open_export(output) as directory:
        (directory / RESULTS_FILE).write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n")
        (directory / TABLE_FILE).write_text(findings.table + "\n")
        findings.plot(directory / findings.picture)
        if uri:
            with survive_outage("the analysis"):
                _log(config, findings, directory, uri=uri, output=output)
    print(f"\n{findings.table}\n\n{findings.conclusion}\n{output}/{RESULTS_FILE}, {TABLE_FILE} and {findings.picture}")


def absolute_output(config: Analysis) -> str:
    """Return the absolute path or the URI of the results."""
    return config.output if "://" in config.output else resolve(config.output)[1]


def _log(config: Analysis, findings: Findings, directory: Path, *, uri: str, output: str) -> None:
    digest = settings_digest(findings.settings)
    tracked = open_run(
        uri=uri,
        experiment=config.tracking.experiment,
        name=findings.title,
        directory=f"{output}#{digest}",
        parameters=flatten(config),
        tags={},
        data_sets={"evaluation": ("data", digest, findings.source)},
    )
    finish_run(tracked, status="FINISHED", artifacts=directory, metrics=dict(findings.metrics), note=findings.table)
