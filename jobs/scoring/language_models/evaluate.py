"""Running an evaluation: workers compute the unfinished units, finished ones are read, and a table is published."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from jobs.engine.description import markdown_table
from jobs.engine.fields import absolute_path
from jobs.engine.tracking import resolve_uri
from jobs.scoring.language_models.config import EvaluateConfig
from jobs.scoring.language_models.plan import LAMBADA, WIKITEXT, Plan, make_plan
from jobs.scoring.language_models.units import EvaluationUnit, Job, read_arrays, read_result, unit_store
from jobs.scoring.language_models.worker import Evaluator
from jobs.scoring.results import Column, Results, publish_evaluation
from jobs.scoring.units import UnitStore, Work, map_units
from tempnet.statistics import spearman

_TITLES = {
    "word_perplexity": "word perplexity",
    "token_perplexity": "token perplexity",
    "bits_per_byte": "bits a byte",
    "tau_mean": "mean τ",
    "tau_std": "standard deviation of τ",
    "tau_entropy_spearman": "Spearman(τ, entropy at τ = 1)",
}


def evaluate(config: EvaluateConfig) -> Results:
    """Run or continue an evaluation, write `results.md` and `results.json`, and return the figures.

    Raises:
        ValueError, OSError: before any work starts, see :func:`jobs.scoring.language_models.plan.make_plan`.
        ScoringFailedError: naming every failed job, once all others have finished and the results are published.
    """
    uri = resolve_uri(config.tracking, config.run.resolved_storage)
    plan = make_plan(config)
    store = unit_store(config.run.directory)
    finished = store.names()
    jobs = [replace(job, units=tuple(unit for unit in job.units if unit.file not in finished)) for job in plan.jobs]
    left = [job for job in jobs if job.units]
    num_left = sum(len(job.units) for job in left)
    print(f"{len(plan.units)} units, {len(plan.units) - num_left} of them finished before; {config.run.directory}")
    # The workers have another working directory. The jobs of a model follow one another, so they rarely change it.
    absolute = replace(
        config, include_path=absolute_path(config.include_path), data_dir=absolute_path(config.data_dir or ".")
    )
    work: Work[Job] = Work(model=partial(Evaluator, absolute), title=lambda job: job.title)
    failed = map_units(left, work, config.workers, store).failed
    return publish_evaluation(
        config,
        uri=uri,
        columns=make_columns(plan, store),
        render=markdown,
        identity=[unit.key for unit in plan.units],
        failed=failed,
    )


def make_columns(plan: Plan, store: UnitStore) -> list[Column]:
    """Returns the columns of all models and temperatures, without figures for tasks that have unfinished units."""
    units = defaultdict[tuple[str, str, str], list[EvaluationUnit]](list)
    for unit in plan.units:
        units[unit.model.label, unit.temperature.name, unit.task].append(unit)
    columns = []
    for model, temperature in itertools.product(plan.models, plan.temperatures):
        column = Column(
            title=f"{model.label} · {temperature.name}",
            parameters={"model": model.path, "tempnet": model.tempnet, "temperature": temperature.name},
        )
        for (label, name, task), parts in units.items():
            if (label, name) == (model.label, temperature.name):
                column.metrics.update(_figures(plan, store, task, parts))
        columns.append(column)
    return columns


def _figures(plan: Plan, store: UnitStore, task: str, units: list[EvaluationUnit]) -> dict[str, float]:
    results = [result for unit in units if (result := read_result(store, unit)) is not None]
    if len(results) < len(units):
        return {}
    if task not in (WIKITEXT, LAMBADA):
        return results[0]
    nll = math.fsum(result["nll"] for result in results)
    num_tokens, num_windows, num_greedy = (
        sum(result[name] for result in results) for name in ("num_tokens", "num_windows", "num_greedy")
    )
    figures: dict[str, float]
    if task == WIKITEXT:
        figures = {
            "word_perplexity": _exp(nll / plan.num_words),
            "token_perplexity": _exp(nll / num_tokens),
            "bits_per_byte": nll / plan.num_bytes / math.log(2),
        }
    else:
        figures = {"perplexity": _exp(nll / num_windows), "acc": num_greedy / num_windows}
    if units[0].temperature.needs_tempnet:
        arrays = [read_arrays(store, unit) for unit in units]
        tau, entropy = (np.concatenate([array[name] for array in arrays]) for name in ("tau", "entropy"))
        figures |= {
            "tau_mean": float(tau.mean(dtype=np.float64)),
            "tau_std": float(tau.std(dtype=np.float64)),
            "tau_entropy_spearman": float(spearman(torch.from_numpy(tau), torch.from_numpy(entropy))),
        }
    return {f"{task}/{name}": value for name, value in figures.items()}


def markdown(columns: Sequence[Column]) -> str:
    """Returns a table with one column per model and temperature and one row per figure."""
    names = list(dict.fromkeys(name for column in columns for name in column.metrics))
    tasks = list(dict.fromkeys(name.partition("/")[0] for name in names))
    # figures of τ may appear only in a later column, so they are moved to their task
    names.sort(key=lambda name: tasks.index(name.partition("/")[0]))
    rows = [["", *(column.title for column in columns)]]
    for name in names:
        if "_stderr" not in name:
            rows.append([_title(name), *(_cell(column.metrics, name) for column in columns)])
    return markdown_table(rows)


def _title(name: str) -> str:
    task, _, metric = name.partition("/")
    return f"{task} {_TITLES.get(metric, metric)}"


def _cell(metrics: dict[str, float], name: str) -> str:
    if name not in metrics:
        return "–"
    value = metrics[name]
    text = f"{value:,.2f}" if "perplexity" in name else f"{value:.4f}"
    metric, dot, filter_name = name.partition(".")
    error = metrics.get(f"{metric}_stderr{dot}{filter_name}")
    return text if error is None else f"{text} ± {error:.4f}"


def _exp(value: float) -> float:
    """Returns exp(value), or ∞ if it would overflow."""
    return math.exp(value) if value < 700 else math.inf
