"""Planning an evaluation: models and tasks are checked, and texts are tokenised and cut into jobs. Ray is not needed.

All checks that can fail an evaluation before it starts are made here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from lm_eval.models.utils import resolve_max_length
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from jobs.engine.export import model_digest, tempnet_digest
from jobs.engine.fields import absolute_path
from jobs.scoring.language_models.config import NO_TEMPNET, EvaluateConfig
from jobs.scoring.language_models.harness import Tasks
from jobs.scoring.language_models.temperatures import Temperature
from jobs.scoring.language_models.units import EvaluationUnit, Job, LanguageModelSpec, unit_key
from jobs.scoring.language_models.windows import (
    ScoredWindow,
    document_windows,
    num_words,
    pair_window,
    read_lambada,
    read_text,
    slices,
    wikitext_pages,
    windows_digest,
)
from jobs.scoring.models import model_labels
from jobs.tasks.base import naming_field
from pipelines.local_copy import checked_copy, is_directory, local_copy
from pipelines.storage import join
from pipelines.text.tokenization import load_tokenizer
from tempnet.base_model import read_config
from tempnet.fingerprints import files_digest
from tempnet.loading import load_tempnet
from tempnet.network import PAIRED_DIRECTORY, TempNet
from tempnet.weights import check_weight_files

WIKITEXT, LAMBADA = "wikitext", "lambada"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All the work of an evaluation."""

    config: EvaluateConfig
    models: list[LanguageModelSpec]
    temperatures: list[Temperature]
    jobs: list[Job]
    num_words: int
    """Number of words of the WikiText file that are scored."""
    num_bytes: int
    """Number of UTF-8 bytes of the same text."""

    @property
    def units(self) -> list[EvaluationUnit]:
        """The units of all jobs."""
        return [unit for job in self.jobs for unit in job.units]


def make_plan(config: EvaluateConfig) -> Plan:
    """Check the configuration, and divide the work into jobs.

    Raises:
        ValueError, OSError: naming the field, its value and the legal values.
    """
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
        # A page may be empty after detokenisation; a document without tokens has no windows.
        wikitext = [
            window
            for page in pages
            for window in document_windows(tokenizer, page, max_length=spec.max_length, detokenize=config.detokenize)
        ]
        lambada = [
            pair_window(
                tokenizer, context, f" {word}", max_length=spec.max_length, document_start=config.document_start
            )
            for context, word in pairs
        ]
        jobs += [*_window_jobs(config, spec, WIKITEXT, wikitext), *_window_jobs(config, spec, LAMBADA, lambada)]
        jobs += [
            Job(units=(_harness_unit(config, spec, temperature, name, digest),))
            for name, digest in task_digests.items()
            for temperature in config.columns
        ]
    return Plan(
        config=config,
        models=models,
        temperatures=config.columns,
        jobs=jobs,
        num_words=sum(map(num_words, pages)),
        num_bytes=sum(len(page.encode()) for page in pages),
    )


def _window_jobs(
    config: EvaluateConfig, spec: LanguageModelSpec, task: str, windows: list[ScoredWindow]
) -> Iterator[Job]:
    for part, slice_of_windows in enumerate(slices(windows)):
        digest = windows_digest(slice_of_windows)
        units = tuple(
            EvaluationUnit(
                model=spec,
                temperature=temperature,
                task=task,
                part=part,
                key=unit_key(spec, temperature, config.dtype, windows=digest),
            )
            for temperature in config.columns
        )
        yield Job(units=units, windows=tuple(slice_of_windows))


def _harness_unit(
    config: EvaluateConfig, spec: LanguageModelSpec, temperature: Temperature, name: str, digest: str
) -> EvaluationUnit:
    key = unit_key(
        spec,
        temperature,
        config.dtype,
        task=name,
        task_digest=digest,
        limit=config.limit,
        num_fewshot=config.num_fewshot,
        document_start=config.document_start,
        max_length=spec.max_length,
    )
    return EvaluationUnit(model=spec, temperature=temperature, task=name, part=0, key=key)


def _task_digest(tasks: Tasks, name: str) -> str:
    """Returns a digest of the harness's version, the user's task files, and the local data of the task."""
    if name in (WIKITEXT, LAMBADA):
        raise ValueError(
            f"tasks names {name!r}: use --{name} FILE, or the harness's lambada_openai and lambada_standard"
        )
    own = sorted(Path(tasks.include_path).rglob("*")) if tasks.include_path else []
    files = [path for path in own if path.suffix in (".yaml", ".py")] + tasks.data_files(name)
    return f"{version('lm-eval')} {files_digest(files)}"


def _tempnets(config: EvaluateConfig) -> list[str]:
    """Returns the location of each model's TempNet; an empty string if it has none."""
    if config.tempnets:
        return ["" if path == NO_TEMPNET else path for path in config.tempnets]
    beside = [join(model, PAIRED_DIRECTORY) for model in config.models]
    return [path if is_directory(path) else "" for path in beside]


def _model_spec(
    config: EvaluateConfig, label: str, path: str, tempnet: str
) -> tuple[LanguageModelSpec, PreTrainedTokenizerFast]:
    base = _base_config(path, config.trust_remote_code)
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


def _base_config(path: str, trust_remote_code: bool) -> PretrainedConfig:
    place = checked_copy(path, "models: ")
    check_weight_files(place)
    with naming_field("models: "):
        return read_config(place, trust_remote_code=trust_remote_code)
