"""The plan of training a sentence encoder: checks its configuration without Ray, and prepares the documents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from jobs.engine.launch import tracking_uri
from jobs.engine.task import Plan, PreparedTask, data_sets
from jobs.tasks.base import (
    DataReference,
    count_parameters,
    create_task,
    describe_tau,
    loss_networks,
    naming_field,
    resolve_paths,
)
from jobs.tasks.sentence_encoder.config import SentenceConfig
from jobs.tasks.sentence_encoder.task import (
    build_encoder,
    describe_documents,
    num_too_short,
    prepare_documents,
)
from jobs.tasks.text import refer_to
from pipelines.archives import list_archives
from pipelines.stream import READ_CPUS
from pipelines.text.manifest import Manifest
from pipelines.text.tokenization import load_tokenizer
from tempnet.contrastive.config import LOSS_KINDS, ContrastiveLossConfig, check_negatives


@dataclass(frozen=True, slots=True, kw_only=True)
class SentencePlan(Plan[SentenceConfig]):
    """The plan of training a sentence encoder."""

    unit = "documents"
    curves: ClassVar = {
        "loss (training objective)": ("train/loss", "train/mlm_loss", "validation/mlm_loss"),
        "an anchor finds its positive": ("validation/span_recall@1", "validation/mlm_accuracy"),
        "τ": ("train/tau_q05", "train/tau_mean", "train/tau_q95"),
        "cosine of anchor and positive": ("validation/positive_cosine",),
    }

    num_parameters: int
    """Number of parameters of the encoder with its head."""
    num_tempnet_parameters: int
    """Number of parameters of the TempNet; 0 without one."""

    @property
    def data_cpus(self) -> float:
        return READ_CPUS * self.config.workers.max_workers + self.config.data.preparing_cpus

    @property
    def _loss(self) -> str:
        loss, objective = self.config.temperature.loss_config, self.config.objective
        parts = []
        if self.config.is_contrastive:
            rho = f", ρ = {loss.rho:g}" if loss.kind.uses_rho else ""
            parts.append(f"{objective.contrastive_weight:g} × {loss.name}{rho}")
        if objective.mlm_weight:
            parts.append(f"{objective.mlm_weight:g} × MLM")
        return " + ".join(parts)

    def describe(self) -> str:
        config, data = self.config, self.config.data
        size, workers = config.optimizer.batch_size, config.workers.max_workers
        return self.describe_lines(
            about={
                "loss": self._loss,
                "spans": f"{data.num_anchors} anchors of {data.min_length} to {data.max_length} tokens a document, "
                f"{data.num_positives} positives each ({data.strategy}); documents from "
                f"{data.least_num_tokens} tokens on",
                "batch": f"{size} documents: {workers} workers × {size // workers}; each anchor against "
                f"{2 * config.num_pairs_per_batch - 2} others",
            },
            num_units=size,
            parameters=f"encoder with its head {self.num_parameters:,}, TempNet {self.num_tempnet_parameters:,}",
            num_trained=self.num_parameters + self.num_tempnet_parameters,
        )

    def prepare(self) -> PreparedTask:
        """Tokenise the documents, unless this was done before."""
        config = resolve_paths(self.config)
        train, validation = prepare_documents(config)
        loss = config.temperature.loss_config
        data = DataReference(train=refer_to(train), validation=validation.directory)
        is_whole = isinstance(train, Manifest)  # none while parts of the text are missing
        counts = {"num_documents": train.num_rows, "num_documents_too_short": num_too_short(train)} if is_whole else {}
        return PreparedTask(
            create_task=partial(create_task, "jobs.tasks.sentence_encoder.task:SentenceTask", config, data),
            num_samples=None,
            read_data_outcome=partial(describe_documents, train, validation),
            parameters=counts,
            data_sets=data_sets(self.config.data, train, validation),
            outcome={"loss": self._loss, "tau_min": loss.tau_min, "tau_max": loss.tau_max},
        )

    def rows(self, outcome: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Return the recall of spans, the MLM loss and the temperatures."""
        scores = outcome["validation"]
        rows = [("loss", outcome["loss"])]
        if "span_recall@1" in scores:
            rows.append(("an anchor finds its positive", f"{scores['span_recall@1']:.2%}"))
        if "mlm_loss" in scores:
            rows.append(("MLM loss, accuracy", f"{scores['mlm_loss']:.4f}, {scores['mlm_accuracy']:.2%}"))
        return [*rows, *describe_tau(scores)]


def make_plan(config: SentenceConfig) -> SentencePlan:
    """Make the plan of a run, checking everything that can be checked without Ray."""
    uri = tracking_uri(config)
    if config.data.is_streaming and config.is_contrastive:
        _check_streaming(config)
    for split in ("train", "validation"):
        with naming_field(f"data.{split}: "):
            list_archives(getattr(config.data, split))
    with naming_field("data."):
        tokenizer = load_tokenizer(config.tokenizer, needs_eos=False)
    encoder = build_encoder(config, tokenizer)
    width = int(encoder.config.hidden_size)
    networks = loss_networks(config.temperature, width) if config.is_contrastive else {}
    return SentencePlan(
        config=config,
        num_parameters=count_parameters(encoder),
        num_tempnet_parameters=count_parameters(*networks.values()),
        tracking_uri=uri,
    )


def _check_streaming(config: SentenceConfig) -> None:
    """Check that the contrastive loss does not need to know all documents before training."""
    temperature = config.temperature
    if temperature.loss_config.state_columns:
        others = [name for name, kind in LOSS_KINDS.items() if not kind.is_cyclic]
        legal = [name for name in others if not ContrastiveLossConfig.for_name(name).state_columns]
        raise ValueError(
            f"temperature.loss = {temperature.loss!r} keeps state of every document, but with data.prepare = 'streaming' "
            f"their number is not known before training: choose one of {', '.join(legal)}, or data.prepare ahead"
        )
    if temperature.needs_tempnets and temperature.projection:
        raise ValueError(
            "temperature.projection = True begins with prototypes of a sample of all documents, but with "
            "data.prepare = 'streaming' they are not there before training: choose temperature.projection False, or "
            "data.prepare ahead"
        )
    size = config.optimizer.batch_size
    with naming_field(f"optimizer.batch_size = {size}: "):  # There must be at least as many documents as in a batch.
        check_negatives(temperature.loss_config, config.num_pairs_per_batch, num_samples=size)
