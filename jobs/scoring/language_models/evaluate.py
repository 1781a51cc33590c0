"""Running an evaluation: the plan is checked, workers compute the unfinished units, and a table is published.

All checks that can fail an evaluation before it starts are made by `make_plan`, which needs no Ray.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy
import torch
from lm_eval.models.utils import resolve_max_length
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from jobs.engine.export import model_digest, tempnet_digest
from jobs.engine.fields import absolute_path
from jobs.engine.masking import masked
from jobs.engine.tracking import resolve_uri
from jobs.scoring.language_models.config import NO_TEMPNET, EvaluateConfig
from jobs.scoring.language_models.harness import Tasks, TemperedLM, run_task
from jobs.scoring.language_models.windows import (
    ScoredWindow,
    document_windows,
    num_words,
    pair_window,
    read_lambada,
    read_text,
    score_windows,
    slices,
    wikitext_pages,
    windows_digest,
)
from jobs.scoring.results import Column, Results, figure_table, publish_evaluation
from jobs.scoring.text_parts import checked_model, checked_tempnet, load_model
from jobs.scoring.units import Finished, ModelSpec, UnitStore, holding_one, map_units, model_labels, unit_key
from jobs.tasks.base import naming_field
from pipelines.local_copy import is_directory
from pipelines.storage import join
from pipelines.text.tokenization import load_tokenizer
from tempnet.fingerprints import files_digest
from tempnet.network import PAIRED_DIRECTORY, TempNet
from tempnet.statistics import spearman

WIKITEXT, LAMBADA = "wikitext", "lambada"
# Increase this whenever the same input would give another result.
_VERSION = 2
_TITLES = {
    "word_perplexity": "word perplexity",
    "token_perplexity": "token perplexity",
    "bits_per_byte": "bits a byte",
    "tau_mean": "mean τ",
    "tau_std": "standard deviation of τ",
    "tau_entropy_spearman": "Spearman(τ, entropy at τ = 1)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModelSpec(ModelSpec):
    tempnet: str
    vocab_size: int | None
    """The effective vocabulary of a model with a TempNet, whose further logits are ignored; None without a TempNet."""
    max_length: int
    tempnet_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationUnit:
    """One model on one task, or on one slice of a task, at temperatures that share forward passes."""

    model: LanguageModelSpec
    task: str
    part: int = 0
    windows: tuple[ScoredWindow, ...] = ()
    """The windows to score; empty for a task of the harness."""
    keys: Mapping[str, str]
    """Name of a temperature → hash of everything that decides the result at it, by which its file is named. It leaves out
    the batch size, the workers and the device, which affect only the last digits."""

    @property
    def title(self) -> str:
        part = f" part {self.part + 1}" if self.windows else ""
        return f"{self.model.label} · {self.task}{part} · {', '.join(self.keys)}"


class Plan(NamedTuple):
    models: list[LanguageModelSpec]
    units: list[EvaluationUnit]
    pages: list[str]
    """Documents of the WikiText file that are scored."""

    @property
    def keys(self) -> list[str]:
        return [key for unit in self.units for key in unit.keys.values()]


def make_plan(config: EvaluateConfig) -> Plan:
    """Check the configuration, and divide the work into units."""
    tasks = Tasks(config.include_path, config.data_dir)
    task_digests = {name: _task_digest(tasks, name) for name in config.tasks}
    with naming_field("wikitext = "):
        pages = wikitext_pages(read_text(config.wikitext))[: config.limit or None] if config.wikitext else []
    with naming_field("lambada = "):
        pairs = read_lambada(config.lambada, config.limit) if config.lambada else []
    models, units = [], []
    for label, path, tempnet in zip(model_labels(config.models), config.models, _tempnets(config), strict=True):
        spec, tokenizer = _model_spec(config, label, path, tempnet)
        models.append(spec)
        length = spec.max_length
        # A page may be empty after detokenisation; a document without tokens has no windows.
        documents = [document_windows(tokenizer, page, length, detokenize=config.detokenize) for page in pages]
        words = [
            pair_window(tokenizer, context, f" {word}", length, document_start=config.document_start)
            for context, word in pairs
        ]
        for task, windows in ((WIKITEXT, list(itertools.chain(*documents))), (LAMBADA, words)):
            for part, inside in enumerate(slices(windows)):
                keys = _keys(config, spec, {"windows": windows_digest(inside)})
                units.append(EvaluationUnit(model=spec, task=task, part=part, windows=tuple(inside), keys=keys))
        for name, digest in task_digests.items():
            asked = {item: getattr(config, item) for item in ("limit", "num_fewshot", "document_start")}
            keys = _keys(config, spec, {"task": name, "task_digest": digest, "max_length": length, **asked})
            units += [EvaluationUnit(model=spec, task=name, keys={at: key}) for at, key in keys.items()]
    return Plan(models, units, pages)


def _keys(config: EvaluateConfig, model: LanguageModelSpec, what: dict[str, Any]) -> dict[str, str]:
    """Returns name of a temperature → key; `what` is scored."""
    keys = {}
    for temperature in config.columns:
        content = {
            "version": _VERSION,
            "model": model.digest,
            "vocab_size": model.vocab_size,
            "temperature": temperature.name,
            "tempnet": model.tempnet_digest if temperature.needs_tempnet else None,
            "dtype": config.dtype,
            **what,
        }
        keys[temperature.name] = unit_key(dict(sorted(content.items())))
    return keys


def _task_digest(tasks: Tasks, name: str) -> str:
    """Returns a digest of the harness's version, the user's task files, and the local data of the task."""
    if name in (WIKITEXT, LAMBADA):
        raise ValueError(
            f"tasks names {name!r}: use --{name} FILE, or the harness's lambada_openai and lambada_standard"
        )
    own = sorted(Path(tasks.include_path).rglob("*")) if tasks.include_path else []
    files = [path for path in own if path.suffix in (".yaml", ".py")] + tasks.data_files(name)
    return f"{version('lm-eval')} {files_digest(files, whole=True)}"


def _tempnets(config: EvaluateConfig) -> list[str]:
    if config.tempnets:
        return ["" if path == NO_TEMPNET else path for path in config.tempnets]
    beside = [join(model, PAIRED_DIRECTORY) for model in config.models]
    return [path if is_directory(path) else "" for path in beside]


def _model_spec(
    config: EvaluateConfig, label: str, path: str, tempnet: str
) -> tuple[LanguageModelSpec, PreTrainedTokenizerFast]:
    base, tokenizer = checked_model(path, "models: ", trust_remote_code=config.trust_remote_code)
    network = checked_tempnet(tempnet, "tempnets: ", path, base, tokenizer) if tempnet else None
    for temperature in config.columns:
        if temperature.needs_tempnet and network is None:
            raise ValueError(
                f"temperature {temperature.name!r} needs a TempNet, and {path} has none beside it: name one in tempnets, "
                f"or leave this temperature out"
            )
        temperature.function(network)  # raises ValueError for a τ_max that is not above τ₀
    max_length = resolve_max_length(base, tokenizer)
    if config.max_length > max_length:
        raise ValueError(f"max_length = {config.max_length} is more than the {max_length} positions of {path}")
    spec = LanguageModelSpec(
        label=label,
        path=absolute_path(path),
        tempnet=absolute_path(tempnet),
        vocab_size=network.config.input_size if network else None,
        max_length=config.max_length or max_length,
        digest=model_digest(path, trust_remote_code=config.trust_remote_code),
        tempnet_digest=tempnet_digest(network) if network else "",
    )
    return spec, tokenizer


class Evaluator:
    """What a worker of the pool runs: it holds one language model at a time, and computes the results of units."""

    def __init__(self, config: EvaluateConfig) -> None:
        # else the harness opens a process pool over all CPUs to bootstrap standard errors
        os.environ["DISABLE_MULTIPROC"] = "1"
        self._config = config
        self._temperatures = {temperature.name: temperature for temperature in config.columns}
        self._tasks = Tasks(config.include_path, config.data_dir)
        self._model = holding_one(self._load)

    def __call__(self, unit: EvaluationUnit) -> Finished:
        started, config, spec = time.monotonic(), self._config, unit.model
        base, network, tokenizer = self._model(spec)
        files: dict[str, Any] = {}
        results: dict[str, dict[str, float]] = {}
        if unit.windows:
            functions = {name: self._temperatures[name].function(network) for name in unit.keys}
            scores = score_windows(
                base, unit.windows, functions, vocab_size=spec.vocab_size, batch_size=config.batch_size
            )
            for name, score in scores.items():
                results[name] = {
                    item: getattr(score, item) for item in ("nll", "num_tokens", "num_windows", "num_greedy")
                }
                if self._temperatures[name].needs_tempnet:
                    arrays = {"tau": np.concatenate(score.tau), "entropy": np.concatenate(score.entropy)}
                    files[f"{unit.keys[name]}.safetensors"] = safetensors.numpy.save(arrays)
        else:
            (name,) = unit.keys
            lm = TemperedLM(
                base,
                tokenizer,
                temperature=self._temperatures[name],
                network=network,
                vocab_size=spec.vocab_size,
                max_length=spec.max_length,
                batch_size=config.batch_size,
                document_start=config.document_start,
            )
            results[name] = run_task(lm, self._tasks, unit.task, limit=config.limit, num_fewshot=config.num_fewshot)
        for name, key in unit.keys.items():  # these come last, since their existence marks the unit as finished
            files[f"{key}.json"] = {
                "model": masked(spec.path),
                "tempnet": masked(spec.tempnet),
                "temperature": name,
                "task": unit.task,
                "part": unit.part,
                "seconds": round(time.monotonic() - started, 3),
                "result": results[name],
            }
        return Finished(files=files)

    def _load(self, spec: LanguageModelSpec) -> tuple[PreTrainedModel, TempNet | None, PreTrainedTokenizerFast]:
        config = self._config
        options = {"trust_remote_code": config.trust_remote_code}
        return *load_model(spec.path, spec.tempnet, config.dtype, config.workers, **options), load_tokenizer(spec.path)


def evaluate(config: EvaluateConfig) -> Results:
    """Run or continue an evaluation, write `results.md` and `results.json`, and return the figures."""
    uri = resolve_uri(config.tracking, config.run.resolved_storage)
    plan = make_plan(config)
    store = UnitStore(f"{config.run.directory}/units")
    missing = set(store.missing(plan.keys, lambda key: [f"{key}.json"]))
    left = [
        replace(unit, keys={name: key for name, key in unit.keys.items() if key in missing})
        for unit in plan.units
        if not missing.isdisjoint(unit.keys.values())
    ]
    # The workers have another working directory. The units of a model follow one another, so they rarely change it.
    absolute = replace(
        config, include_path=absolute_path(config.include_path), data_dir=absolute_path(config.data_dir or ".")
    )
    failed = map_units(left, partial(Evaluator, absolute), config.workers, store).failed
    columns = make_columns(config, plan, store)
    table = markdown(columns)
    return publish_evaluation(config, uri=uri, columns=columns, table=table, identity=plan.keys, failed=failed)


def make_columns(config: EvaluateConfig, plan: Plan, store: UnitStore) -> list[Column]:
    """Returns the columns of all models and temperatures, without figures for tasks that have unfinished units."""
    columns = []
    for model, temperature in itertools.product(plan.models, config.columns):
        parameters = {"model": model.path, "tempnet": model.tempnet, "temperature": temperature.name}
        column = Column(title=f"{model.label} · {temperature.name}", parameters=parameters)
        columns.append(column)
        keys = defaultdict[str, list[str]](list)
        for unit in plan.units:
            if unit.model == model and temperature.name in unit.keys:
                keys[unit.task].append(unit.keys[temperature.name])
        for task, of_task in keys.items():
            column.metrics.update(_figures(plan.pages, store, task, of_task, with_tau=temperature.needs_tempnet))
    return columns


def _figures(
    pages: Sequence[str], store: UnitStore, task: str, keys: Sequence[str], *, with_tau: bool
) -> dict[str, float]:
    records = [record for key in keys if (record := store.read_json(f"{key}.json")) is not None]
    if len(records) < len(keys):
        return {}
    results = [record["result"] for record in records]
    if task not in (WIKITEXT, LAMBADA):
        return results[0]
    nll = math.fsum(result["nll"] for result in results)
    num_tokens, num_windows, num_greedy = (
        sum(result[name] for result in results) for name in ("num_tokens", "num_windows", "num_greedy")
    )
    figures: dict[str, float]
    if task == WIKITEXT:
        figures = {
            "word_perplexity": _exp(nll / sum(map(num_words, pages))),
            "token_perplexity": _exp(nll / num_tokens),
            "bits_per_byte": nll / sum(len(page.encode()) for page in pages) / math.log(2),
        }
    else:
        figures = {"perplexity": _exp(nll / num_windows), "acc": num_greedy / num_windows}
    if with_tau:
        arrays = [safetensors.numpy.load(store.read(f"{key}.safetensors")) for key in keys]
        tau, entropy = (np.concatenate([array[name] for array in arrays]) for name in ("tau", "entropy"))
        figures |= {
            "tau_mean": float(tau.mean(dtype=np.float64)),
            "tau_std": float(tau.std(dtype=np.float64)),
            "tau_entropy_spearman": float(spearman(torch.from_numpy(tau), torch.from_numpy(entropy))),
        }
    return {f"{task}/{name}": value for name, value in figures.items()}


def markdown(columns: Sequence[Column]) -> str:
    """Returns the table; a standard error stands behind its figure."""

    def title(name: str) -> str:
        task, _, metric = name.partition("/")
        return "" if "_stderr" in name else f"{task} {_TITLES.get(metric, metric)}"

    def cell(metrics: Mapping[str, float], name: str) -> str:
        text = f"{metrics[name]:,.2f}" if "perplexity" in name else f"{metrics[name]:.4f}"
        metric, dot, filter_name = name.partition(".")
        error = metrics.get(f"{metric}_stderr{dot}{filter_name}")
        return text if error is None else f"{text} ± {error:.4f}"

    return figure_table(columns, title, cell, "")


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
