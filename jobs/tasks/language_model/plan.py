"""The plan of training a language model: checks its configuration without Ray, prepares the text and determines ρ."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from jobs.engine.hardware import check_fits
from jobs.engine.launch import tracking_uri
from jobs.engine.metrics import TrackedRun
from jobs.engine.task import Plan, PreparedTask, data_sets
from jobs.tasks.base import (
    DataReference,
    count_parameters,
    create_task,
    feature_cache,
    naming_field,
    resolve_paths,
)
from jobs.tasks.language_model import report
from jobs.tasks.language_model.calibration import CALIBRATION_FILE, describe_measured, read_or_measure
from jobs.tasks.language_model.config import LanguageModelConfig, with_rho
from jobs.tasks.language_model.data import (
    blocks_layout,
    check_eight_bits,
    check_is_not_empty,
    features_to_read,
    refer_to_base,
    warn_of_known_text,
)
from jobs.tasks.language_model.models import (
    base_shapes,
    check_teacher,
    check_tokenizer,
    estimate_memory,
    load_tempnet,
    state_size,
)
from jobs.tasks.text import describe_data, prepare_split, prepare_training_text, refer_to
from pipelines.archives import Archive, list_archives
from pipelines.stream import READ_CPUS
from pipelines.text.manifest import Manifest
from pipelines.text.tokenization import document_start_id, load_tokenizer
from tempnet.base_model import BASE_FILE
from tempnet.network import TempNet
from tempnet.rho import check_rho

_TASKS = "jobs.tasks.language_model.task"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModelPlan(Plan[LanguageModelConfig]):
    """The plan of training a language model and its TempNet."""

    unit = "tokens"

    tokenizer: PreTrainedTokenizerFast
    """Tokenizer of the run, whose size is that of the effective vocabulary."""
    rho: float | None
    """ρ in nats; None if it has yet to be calibrated."""
    num_base_parameters: int
    """Number of parameters of the base model."""
    num_tempnet_parameters: int
    """Number of parameters of the TempNet; 0 without one."""
    memory: Mapping[str, float]
    """Item → bytes of a worker at its peak."""
    memory_of_sizes: Mapping[int, float]
    """Micro-batch size → bytes of a worker, for every size from which workers choose; empty if the size is given."""

    summary_table = staticmethod(report.summary_table)

    @property
    def data_cpus(self) -> float:
        return READ_CPUS * self.config.workers.max_workers + self.config.data.preparing_cpus

    def describe(self) -> str:
        config, is_frozen = self.config, self.config.model.is_frozen
        start = str(self.tokenizer.convert_ids_to_tokens(document_start_id(self.tokenizer)))
        tokens = config.optimizer.batch_size * config.data.context_length
        num_frozen = self.num_base_parameters if is_frozen else 0
        frozen = " (frozen, its hidden states are read)" if config.model.features else " (frozen)"
        end = {
            "measured": "a target if the base knows it, which is measured" if is_frozen else "a target",
            "target": "a target",
            "ignored": "no target",
        }[config.data.end_of_document]
        parts = (
            "micro-batches as large as free memory allows; the memory below is that of 1 block"
            if self.memory_of_sizes
            else f"{config.num_accumulation_steps} micro-batches × {config.micro_batch_size} blocks"
        )
        return self.describe_lines(
            about={
                "loss": f"{config.temperature.loss}, {self._describe_temperatures()}",
                "documents": f"read after {start!r}; the end, {self.tokenizer.eos_token!r}, is {end}",
                "batch": f"{config.optimizer.batch_size} blocks × {config.data.context_length} = {tokens} tokens: "
                f"{config.workers.max_workers} workers × {parts}",
            },
            num_units=tokens,
            parameters=f"base {self.num_base_parameters:,}{frozen if is_frozen else ''}, "
            f"TempNet {self.num_tempnet_parameters:,}",
            num_trained=self.num_base_parameters + self.num_tempnet_parameters - num_frozen,
            num_frozen=num_frozen,
            memory=self.memory,
        )

    def _describe_temperatures(self) -> str:
        settings = self.config.temperature
        of_teacher = self.config.is_distilled and self.config.distillation.keep == "entropy"
        parts = []
        if of_teacher or settings.has_free_tau or settings.kind.objective == "robust":
            parts.append(self._describe_rho())
        low, high = settings.tau_range
        if self.config.has_measured_range:
            parts.append(f"τ in [{low:g}, τ_max], τ_max to be chosen by the headroom test on a sample of the text")
        elif of_teacher or settings.has_free_tau:
            parts.append(f"τ in [{low:g}, {high:g}]")
        elif self.config.is_distilled:
            parts.append(f"predictions of the teacher at τ = {settings.tau:g}")
        else:
            parts.append(f"τ = {1.0 if settings.kind.temperature == 'one' else settings.tau:g} for every token")
        return ", ".join(parts)

    def _describe_rho(self) -> str:
        settings = self.config.temperature
        if settings.loss == "proper":
            return "no ρ: every token is asked for the entropy that its own cross-entropy shows to be right"
        if self.rho is None:
            return (
                f"ρ to be calibrated for a mean τ* of {settings.calibrated_tau:g} on "
                f"{settings.num_calibration_tokens:,} tokens of the training data"
            )
        size, most = len(self.tokenizer), math.log(len(self.tokenizer))
        return f"ρ = {self.rho:.4f}: target entropy {most - self.rho:.4f} of log {size} = {most:.4f} nats"

    def prepare(self) -> PreparedTask:
        """Tokenise and pack the text, unless this was done before, and calibrate ρ if it is not given."""
        config = resolve_paths(self.config)
        train = prepare_training_text(config, blocks_layout(config, "train"))
        validation = prepare_split(config, blocks_layout(config, "validation"), "validation", check_is_not_empty)
        base = refer_to_base(config) if config.model.is_frozen else None
        features = features_to_read(config, base, train, validation)
        if features is not None:
            feature_cache(config, train, [features[0].blocks], split="train")
        # While the training text is still being prepared, that of validation stands for it.
        text = train if isinstance(train, Manifest) else validation
        of_text = None if features is None else features[text is validation]
        config, measured = read_or_measure(config, text, base, of_text, needs_range=self.config.has_measured_range)
        for name, line in describe_measured(measured):
            print(f"{name:<12} {line}", flush=True)
        vocab_size = len(self.tokenizer)
        rho = config.temperature.resolve_rho(vocab_size)
        assert rho is not None
        config = with_rho(config, rho)
        tau_min, tau_max = config.temperature.tau_range
        known = {"rho": rho, "target_entropy": math.log(vocab_size) - rho, "tau_max": tau_max}
        data = DataReference(
            train=refer_to(train),
            validation=validation.directory,
            base=base,
            features=None if features is None else (features[0].directory, features[1].directory),
            memory=self.memory_of_sizes,
        )
        return PreparedTask(
            create_task=partial(create_task, f"{_TASKS}:LanguageModelTask", config, data),
            config=config,
            num_samples=None,
            read_data_outcome=partial(describe_data, train, validation, noun="blocks"),
            parameters={
                "vocab_size": vocab_size,
                **{f"resolved.{name}": value for name, value in known.items()},
                "resolved.end_of_document": config.data.end_of_document,
            },
            data_sets=data_sets(self.config.data, train, validation),
            outcome={**known, "tau_min": tau_min, "loss": config.temperature.loss},
            records=({BASE_FILE: asdict(base)} if base else {}) | ({CALIBRATION_FILE: measured} if measured else {}),
        )

    def write_report(self, directory: Path, outcome: Mapping[str, Any], tracked: TrackedRun | None) -> None:
        report.write_report(directory, outcome, self.tokenizer, tracked)


def make_plan(config: LanguageModelConfig) -> LanguageModelPlan:
    """Make the plan of a run, checking everything that can be checked without Ray."""
    uri = tracking_uri(config)
    archives = {}
    for field in ("train", "validation"):
        with naming_field(f"data.{field}: "):
            archives[field] = list_archives(getattr(config.data, field) or config.data.train)
    tokenizer = load_tokenizer(config.tokenizer)
    check_tokenizer(config, tokenizer)
    vocab_size = len(tokenizer)
    base = base_shapes(config, tokenizer)
    if config.model.precision and not config.model.features:
        check_eight_bits(config, base)
    rho = config.temperature.resolve_rho(vocab_size)
    with naming_field("temperature.rho: "):
        check_rho(rho or 0.0, vocab_size)
    network = None
    if config.temperature.needs_tempnet:
        network = TempNet(config.temperature.network_config(vocab_size, rho or 0.0, state_size(base)))
        if config.temperature.path:
            unknown = ["rho"] * (rho is None) + ["tau_max"] * config.has_measured_range
            load_tempnet(config.temperature.path, network.config, unknown=unknown)
    if config.temperature.fits_likelihood:
        check_is_new(config, archives)
    num_base, num_tempnet = count_parameters(base), count_parameters(network)
    estimate = partial(
        estimate_memory,
        base=base,
        num_base=base.get_output_embeddings().weight.numel() if config.model.features else num_base,
        num_tempnet=num_tempnet,
        num_teacher=count_parameters(check_teacher(config, tokenizer)) if config.is_distilled else 0,
        vocab_size=vocab_size,
    )
    fewest = config.with_num_workers(config.workers.min_workers)
    memory, of_sizes = estimate(fewest), {}
    if config.workers.micro_batch == "auto":
        share = fewest.micro_batch_size
        sizes = [size for size in range(1, share + 1) if share % size == 0]
        estimates = {size: estimate(fewest.with_micro_batch_size(size)) for size in sizes}
        memory, of_sizes = estimates[1], {size: sum(items.values()) for size, items in estimates.items()}
    check_fits(memory, config.workers)
    return LanguageModelPlan(
        config=config,
        tokenizer=tokenizer,
        rho=rho,
        num_base_parameters=num_base,
        num_tempnet_parameters=num_tempnet,
        memory=memory,
        memory_of_sizes=of_sizes,
        tracking_uri=uri,
    )


def check_is_new(config: LanguageModelConfig, archives: Mapping[str, list[Archive]]) -> None:
    """Log a warning if temperatures would be fitted to, or judged by, the likelihood of text that the base has learned."""
    if config.model.is_frozen:
        for field, found in archives.items():
            if text := getattr(config.data, field):
                warn_of_known_text(config.model.path, text, found, field=f"data.{field}")
    elif config.temperature.loss == "proper":
        logger.warning(
            "temperature.loss = proper fits temperatures to the likelihood of the text that the base model learns from, "
            "which from the second epoch on is no new text: train the base first, then a TempNet for it on held-out text "
            "(model.path, which freezes the base)"
        )
