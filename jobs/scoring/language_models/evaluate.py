"""Running an evaluation: the plan is checked, workers compute the unfinished units, and a table is published.

All checks that can fail an evaluation before it starts are made by `make_plan`, which needs no Ray. A unit's result is kept
in a file that is named after everything that decides it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from lm_eval.models.utils import resolve_max_length
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from jobs.engine.export import model_digest, tempnet_digest
from jobs.engine.fields import absolute_path
from jobs.engine.report import markdown_table
from jobs.engine.tracking import resolve_uri
from jobs.scoring.language_models.config import NO_TEMPNET, EvaluateConfig, Temperature
from jobs.scoring.language_models.harness import Tasks, TemperedLM, run_task
from jobs.scoring.language_models.windows import (
    Score,
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
from jobs.scoring.results import Column, Results, publish_evaluation
from jobs.scoring.units import Finished, LoadedModel, ModelSpec, UnitStore, map_units, model_labels
from jobs.tasks.base import naming_field
from pipelines.local_copy import checked_copy, is_directory, local_copy
from pipelines.storage import join
from pipelines.text.tokenization import load_tokenizer
from tempnet.base_model import load_base, read_config
from tempnet.devices import input_device, loading_options, move_base
from tempnet.fingerprints import files_digest
from tempnet.loading import load_causal_lm, load_tempnet
from tempnet.network import PAIRED_DIRECTORY, TempNet
from tempnet.statistics import spearman
from tempnet.weights import check_weight_files

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
    """One model at one temperature on one task, or on one slice of a task."""

    model: LanguageModelSpec
    temperature: Temperature
    task: str
    part: int
    key: str
    """Hash of everything that decides the result. It leaves out the batch size, the workers and the device, which affect
    only the last digits."""

    @property
    def file(self) -> str:
        return f"{self.key}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One item of work for a worker: the units of one model and task that share forward passes, one per temperature."""

    units: tuple[EvaluationUnit, ...]
    windows: tuple[ScoredWindow, ...] = ()
    """The windows to score; empty for a task of the harness."""

    @property
    def title(self) -> str:
        first = self.units[0]
        part = f" part {first.part + 1}" if self.windows else ""
        return f"{first.model.label} · {first.task}{part} · {', '.join(unit.temperature.name for unit in self.units)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    models: list[LanguageModelSpec]
    temperatures: list[Temperature]
    jobs: list[Job]
    num_words: int
    """Number of words of the WikiText file that are scored."""
    num_bytes: int
    """Number of UTF-8 bytes of the same text."""

    @property
    def units(self) -> list[EvaluationUnit]:
        return [unit for job in self.jobs for unit in job.units]


def make_plan(config: EvaluateConfig) -> Plan:
    """Check the configuration, and divide the work into jobs."""
    tasks = Tasks(config.include_path, config.data_dir)
    task_digests = {name: _task_digest(tasks, name) for name in config.tasks}
    with naming_field("wikitext = "):
        pages = wikitext_pages(read_text(config.wikitext))[: config.limit or None] if config.wikitext else []
    with naming_field("lambada = "):
        pairs = read_lambada(config.lambada, config.limit) if config.lambada else []
    models, jobs = [], []
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
                what: dict[str, Any] = {"windows": windows_digest(inside)}
                units = tuple(_unit(config, spec, temperature, task, what, part) for temperature in config.columns)
                jobs.append(Job(units=units, windows=tuple(inside)))
        for name, digest in task_digests.items():
            what = {
                "task": name,
                "task_digest": digest,
                "limit": config.limit,
                "num_fewshot": config.num_fewshot,
                "document_start": config.document_start,
                "max_length": length,
            }
            jobs += [Job(units=(_unit(config, spec, temperature, name, what),)) for temperature in config.columns]
    return Plan(
        models=models,
        temperatures=config.columns,
        jobs=jobs,
        num_words=sum(map(num_words, pages)),
        num_bytes=sum(len(page.encode()) for page in pages),
    )


def _unit(
    config: EvaluateConfig,
    model: LanguageModelSpec,
    temperature: Temperature,
    task: str,
    what: dict[str, Any],
    part: int = 0,
) -> EvaluationUnit:
    content = {
        "version": _VERSION,
        "model": model.digest,
        "vocab_size": model.vocab_size,
        "temperature": temperature.name,
        "tempnet": model.tempnet_digest if temperature.needs_tempnet else None,
        "dtype": config.dtype,
        **what,
    }
    key = hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=12).hexdigest()
    return EvaluationUnit(model=model, temperature=temperature, task=task, part=part, key=key)


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
    place = checked_copy(path, "models: ")
    check_weight_files(place)
    with naming_field("models: "):
        base = read_config(place, trust_remote_code=config.trust_remote_code)
    tokenizer = load_tokenizer(path)
    num_logits = base.get_text_config().vocab_size
    if len(tokenizer) > num_logits:
        raise ValueError(f"the tokenizer of {path} has {len(tokenizer)} tokens, the model a vocabulary of {num_logits}")
    network: TempNet | None = None
    if tempnet:
        with naming_field("tempnets: "):
            network = load_tempnet(local_copy(tempnet))
        state_size = base.get_text_config().hidden_size
        if network.config.reads_state and network.config.state_size != state_size:
            raise ValueError(
                f"the TempNet {tempnet} reads hidden states of {network.config.state_size} numbers, those of {path} have "
                f"{state_size}"
            )
        if network.config.input_size != len(tokenizer):
            raise ValueError(
                f"the TempNet {tempnet} was built for a vocabulary of {network.config.input_size}, the tokenizer of "
                f"{path} has {len(tokenizer)} tokens"
            )
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
    """What a worker of the pool runs: it holds one language model at a time, and computes the results of jobs."""

    def __init__(self, config: EvaluateConfig) -> None:
        # else the harness opens a process pool over all CPUs to bootstrap standard errors
        os.environ["DISABLE_MULTIPROC"] = "1"
        self._config = config
        self._tasks = Tasks(config.include_path, config.data_dir)
        self._model = LoadedModel(self._load)

    def __call__(self, job: Job) -> Finished:
        started, config, spec = time.monotonic(), self._config, job.units[0].model
        base, network, tokenizer = self._model.get(spec)
        results: dict[str, Score] | dict[str, dict[str, float]]
        if job.windows:
            functions = {unit.temperature.name: unit.temperature.function(network) for unit in job.units}
            results = score_windows(
                base, job.windows, functions, vocab_size=spec.vocab_size, batch_size=config.batch_size
            )
        else:
            (unit,) = job.units
            lm = TemperedLM(
                base,
                tokenizer,
                temperature=unit.temperature,
                network=network,
                vocab_size=spec.vocab_size,
                max_length=spec.max_length,
                batch_size=config.batch_size,
                document_start=config.document_start,
            )
            scores = run_task(lm, self._tasks, unit.task, limit=config.limit, num_fewshot=config.num_fewshot)
            results = {unit.temperature.name: scores}
        files: dict[str, Any] = {}
        for unit in job.units:
            result = results[unit.temperature.name]
            if isinstance(result, Score):
                if unit.temperature.needs_tempnet:
                    arrays = {"tau": np.concatenate(result.tau), "entropy": np.concatenate(result.entropy)}
                    files[f"{unit.key}.safetensors"] = safetensors.numpy.save(arrays)
                names = ("nll", "num_tokens", "num_windows", "num_greedy")
                result = {name: getattr(result, name) for name in names}
            files[unit.file] = {  # comes last, since its existence marks the unit as finished
                "model": unit.model.path,
                "tempnet": unit.model.tempnet,
                "temperature": unit.temperature.name,
                "task": unit.task,
                "part": unit.part,
                "seconds": round(time.monotonic() - started, 3),
                "result": result,
            }
        return Finished(files=files)

    def _load(self, spec: LanguageModelSpec) -> tuple[PreTrainedModel, TempNet | None, PreTrainedTokenizerFast]:
        options: dict[str, Any] = {
            "trust_remote_code": self._config.trust_remote_code,
            "device_map": self._config.workers.device_map,
        }
        network: TempNet | None = None
        place = local_copy(spec.path)
        if spec.tempnet:
            base, network = load_causal_lm(
                place, local_copy(spec.tempnet), dtype=self._config.dtype, fetch=local_copy, **options
            )
        else:
            options |= loading_options(self._config.dtype)
            base = load_base(place, fetch=local_copy, **options).eval()
        base = move_base(base, "cuda" if self._config.workers.use_gpu else "cpu")
        if network:
            network.to(input_device(base))
        return base, network, load_tokenizer(spec.path)


def evaluate(config: EvaluateConfig) -> Results:
    """Run or continue an evaluation, write `results.md` and `results.json`, and return the figures."""
    uri = resolve_uri(config.tracking, config.run.resolved_storage)
    plan = make_plan(config)
    store = UnitStore(f"{config.run.directory}/units")
    finished = store.names()
    jobs = [replace(job, units=tuple(unit for unit in job.units if unit.file not in finished)) for job in plan.jobs]
    left = [job for job in jobs if job.units]
    num_left = sum(len(job.units) for job in left)
    print(f"{len(plan.units)} units, {len(plan.units) - num_left} of them finished before; {config.run.directory}")
    # The workers have another working directory. The jobs of a model follow one another, so they rarely change it.
    absolute = replace(
        config, include_path=absolute_path(config.include_path), data_dir=absolute_path(config.data_dir or ".")
    )
    failed = map_units(left, partial(Evaluator, absolute), config.workers, store).failed
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
    records = [record for unit in units if (record := store.read_json(unit.file)) is not None]
    if len(records) < len(units):
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
            "word_perplexity": _exp(nll / plan.num_words),
            "token_perplexity": _exp(nll / num_tokens),
            "bits_per_byte": nll / plan.num_bytes / math.log(2),
        }
    else:
        figures = {"perplexity": _exp(nll / num_windows), "acc": num_greedy / num_windows}
    if units[0].temperature.needs_tempnet:
        arrays = [safetensors.numpy.load(store.read(f"{unit.key}.safetensors")) for unit in units]
        tau, entropy = (np.concatenate([array[name] for array in arrays]) for name in ("tau", "entropy"))
        figures |= {
            "tau_mean": float(tau.mean(dtype=np.float64)),
            "tau_std": float(tau.std(dtype=np.float64)),
            "tau_entropy_spearman": float(spearman(torch.from_numpy(tau), torch.from_numpy(entropy))),
        }
    return {f"{task}/{name}": value for name, value in figures.items()}


def markdown(columns: Sequence[Column]) -> str:
    names = list(dict.fromkeys(name for column in columns for name in column.metrics))
    tasks = list(dict.fromkeys(name.partition("/")[0] for name in names))
    # figures of τ may appear only in a later column, so they are moved to their task
    names.sort(key=lambda name: tasks.index(name.partition("/")[0]))
    rows = [["", *(column.title for column in columns)]]
    for name in names:
        if "_stderr" not in name:
            task, _, metric = name.partition("/")
            title = f"{task} {_TITLES.get(metric, metric)}"
            rows.append([title, *(_cell(column.metrics, name) for column in columns)])
    return markdown_table(rows)


def _cell(metrics: dict[str, float], name: str) -> str:
    if name not in metrics:
        return "–"
    value = metrics[name]
    text = f"{value:,.2f}" if "perplexity" in name else f"{value:.4f}"
    metric, dot, filter_name = name.partition(".")
    error = metrics.get(f"{metric}_stderr{dot}{filter_name}")
    return text if error is None else f"{text} ± {error:.4f}"


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
