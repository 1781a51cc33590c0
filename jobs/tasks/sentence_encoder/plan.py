"""The plan of training a sentence encoder: checks its configuration without Ray, and prepares the documents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.engine.contrastive import check_sizes
from jobs.engine.description import describe_plan
from jobs.engine.hardware import state_bytes_per_worker
from jobs.engine.launch import tracking_uri
from jobs.engine.task import PreparedTask, Task, data_set
from jobs.engine.tracking import TrackedRun
from jobs.tasks.sentence_encoder.config import SentenceConfig, with_absolute_paths
from jobs.tasks.sentence_encoder.data import prepared
from jobs.tasks.sentence_encoder.models import build_encoder, build_tempnet
from jobs.tasks.sentence_encoder.report import summary_table, write_report
from pipelines.archives import list_archives
from pipelines.stream import READ_CPUS
from pipelines.text.manifest import Manifest
from pipelines.text.tokenization import load_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceSpec:
    """See `jobs.engine.task.TaskSpec`."""

    config: SentenceConfig
    train_directory: str
    """Directory of the prepared training documents."""
    validation_directory: str
    """Directory of the prepared validation documents."""

    def create(self, rank: int, world_size: int) -> Task:
        """Create the task on a worker."""
        # Imported here because the import loads DeepSpeed, which only the workers need.
        from jobs.tasks.sentence_encoder.task import SentenceTask

        train, validation = Manifest.load(self.train_directory), Manifest.load(self.validation_directory)
        return SentenceTask(self.config, train, validation, rank=rank, world_size=world_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class SentencePlan:
    """See `jobs.engine.task.Plan`."""

    config: SentenceConfig
    num_parameters: int
    """Number of parameters of the encoder with its head."""
    num_tempnet_parameters: int
    """Number of parameters of the TempNet; 0 without one."""
    tracking_uri: str
    """MLflow tracking URI; empty if the run is not logged."""

    @property
    def data_cpus(self) -> float:
        """Number of CPUs for reading data, with one reader for every worker."""
        return READ_CPUS * self.config.workers.num_workers

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
        """Return the plan as text for the terminal."""
        config, data = self.config, self.config.data
        size, workers = config.optimizer.batch_size, config.workers.num_workers
        return describe_plan(
            config,
            about={
                "loss": self._loss,
                "spans": f"{data.num_anchors} anchors of {data.min_length} to {data.max_length} tokens a document, "
                f"{data.num_positives} positives each ({data.strategy}); documents from "
                f"{data.spans.least_num_tokens} tokens on",
                "batch": f"{size} documents: {workers} workers × {size // workers}; each anchor against "
                f"{2 * config.num_pairs_per_batch - 2} others",
            },
            num_units=size,
            unit="documents",
            parameters=f"encoder with its head {self.num_parameters:,}, TempNet {self.num_tempnet_parameters:,}",
            state_gib=self.state_gib_per_worker,
            tracking_uri=self.tracking_uri,
        )

    @property
    def state_gib_per_worker(self) -> float:
        """Memory of a worker in GiB, without activations and per-document state."""
        return state_bytes_per_worker(self.num_parameters + self.num_tempnet_parameters, 0, self.config.workers) / 2**30

    def prepare(self) -> PreparedTask:
        """Tokenise the documents, unless this was done before."""
        config = with_absolute_paths(self.config)
        train, validation = prepared(config, "train"), prepared(config, "validation")
        check_sizes(
            config,
            config.temperature if config.is_contrastive else None,
            num_samples=train.num_rows,
            num_pairs_per_batch=config.num_pairs_per_batch,
            noun="documents",
        )
        loss = config.temperature.loss_config
        return PreparedTask(
            config=config,
            spec=SentenceSpec(
                config=config, train_directory=train.directory, validation_directory=validation.directory
            ),
            parameters={
                "num_documents": train.num_rows,
                "num_documents_too_short": train.num_documents - train.num_rows,
            },
            data_sets={
                "training": data_set(self.config.data.train, train.digest),
                "validation": data_set(self.config.data.validation, validation.digest),
            },
            outcome={
                "loss": self._loss,
                "tau_min": loss.tau_min,
                "tau_max": loss.tau_max,
                "num_documents_lost": {"train": dict(train.problems), "validation": dict(validation.problems)},
                "num_documents_too_short": {
                    "train": train.num_documents - train.num_rows,
                    "validation": validation.num_documents - validation.num_rows,
                },
                "num_documents_train": train.num_rows,
                "num_epochs": config.run.num_steps * config.optimizer.batch_size / train.num_rows,
            },
        )

    def summary_table(self, outcome: Mapping[str, Any]) -> str:
        """Return the results of a run as text for the terminal."""
        return summary_table(outcome)

    def write_report(self, directory: Path, outcome: Mapping[str, Any], tracked: TrackedRun | None) -> None:
        """Write the plots of a finished run."""
        write_report(directory, outcome, tracked)


def make_plan(config: SentenceConfig) -> SentencePlan:
    """Make the plan of a run, checking everything that can be checked without Ray.

    Raises:
        ValueError, FileNotFoundError, OSError: if the configuration is refused; the message names the field, the value
            and what would be legal.
    """
    uri = tracking_uri(config)
    for split in ("train", "validation"):
        try:
            list_archives(getattr(config.data, split))
        except (ValueError, FileNotFoundError) as error:
            raise type(error)(f"data.{split}: {error}") from error
    try:
        tokenizer = load_tokenizer(config.tokenizer, needs_eos=False)
        encoder = build_encoder(config, tokenizer)
    except ValueError as error:
        if str(error).startswith("tokenizer "):
            raise ValueError(f"data.{error}") from error
        raise
    tempnet = build_tempnet(config, int(encoder.config.hidden_size))
    return SentencePlan(
        config=config,
        num_parameters=sum(parameter.numel() for parameter in encoder.parameters()),
        num_tempnet_parameters=sum(parameter.numel() for parameter in tempnet.parameters()) if tempnet else 0,
        tracking_uri=uri,
    )
