"""The view of an experiment in which MLflow's list of runs begins with the metrics that decide.

By default the list shows no metric, and which columns a person has chosen is known to one browser only. But a tag of the
experiment can hold a shared view, which an address opens in any browser. The view also lets the charts begin with the
courses of validation and training.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from mlflow import MlflowClient

from jobs.engine.masking import masked

_KEY = "figures"
_VIEW_TAG = f"mlflow.sharedViewState.{_KEY}"
_NOTE_TAG = "mlflow.note.content"
_QUERY = f"viewStateShareKey={_KEY}&workflowType=machine_learning"
_WIDTH = 190  # pixels, in which `validation/cross_entropy_tau` fits
# Prefixes of metric names, in the order in which their charts are shown; all others come behind them.
_CHART_SECTIONS = ("validation", "train", "train/learning_rate")


def metric_column(name: str) -> str:
    """Return MLflow's name for the column of a metric."""
    return f"metrics.`{name}`"


def tag_column(name: str) -> str:
    """Return MLflow's name for the column of a tag."""
    return f"tags.`{name}`"


def add_columns(client: MlflowClient, experiment_id: str, columns: Iterable[str]) -> None:
    """Add columns to the view of an experiment, behind those that it has; a new view also gets a link in the description.

    A description that somebody has written stays as it is. MLflow leaves out a column that no run of the experiment has.

    Args:
        client: a client of the MLflow store.
        experiment_id: MLflow's ID of the experiment.
        columns: from :func:`metric_column` and :func:`tag_column`.
    """
    tags = client.get_experiment(experiment_id).tags
    known = json.loads(tags.get(_VIEW_TAG, "{}")).get("columnOrder", [])
    if missing := [column for column in dict.fromkeys(columns) if column not in known]:
        client.set_experiment_tag(experiment_id, _VIEW_TAG, json.dumps(_state([*known, *missing])))
        if _NOTE_TAG not in tags:
            link = f"[The runs with the metrics that decide](#/experiments/{experiment_id}/runs?{_QUERY})"
            client.set_experiment_tag(experiment_id, _NOTE_TAG, link)


def _state(columns: Sequence[str]) -> dict[str, Any]:
    """Return the state of MLflow's page, in the form in which its frontend keeps it."""
    return {
        "selectedColumns": ["attributes.`Source`", *columns],
        "columnOrder": list(columns),
        "columnWidths": dict.fromkeys(columns, _WIDTH),
        "compareRunCharts": [],  # MLflow adds a chart for every metric to the section that has the name of its prefix.
        "compareRunSections": [
            {"uuid": name, "name": name, "display": True, "isReordered": False} for name in _CHART_SECTIONS
        ],
        "isAccordionReordered": True,
    }


def where_to_browse(uri: str, experiment_id: str | None) -> str:
    """Return the lines that say how to see an experiment's runs in MLflow: a command if it needs one, and an address.

    Passwords are masked.

    Args:
        uri: MLflow tracking URI.
        experiment_id: MLflow's ID of the experiment; None or empty: the address is that of MLflow's first page.
    """
    uri = masked(uri)
    page = f"/#/experiments/{experiment_id}/runs?{_QUERY}" if experiment_id else ""
    if uri.startswith(("http://", "https://")):
        return f"  {uri.rstrip('/')}{page}"
    command = f".venv/bin/mlflow server --host 127.0.0.1 --port 5000 --backend-store-uri {shlex.quote(uri)}"
    return f"  {command}\n  and open http://127.0.0.1:5000{page}"
