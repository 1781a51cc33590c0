"""The plan of training a sentence encoder: checks its configuration without Ray, and prepares the documents."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from jobs.engine.contrastive import check_sizes
from jobs.engine.description import describe_plan
from jobs.engine.launch import tracking_uri
from jobs.engine.task import PreparedTask, Task, data_set
from jobs.tasks.base import BasePlan, count_parameters, naming_field, resolve_paths
from jobs.tasks.sentence_encoder import report
from jobs.tasks.sentence_encoder.config import SentenceConfig
from jobs.tasks.sentence_encoder.data import prepare_split
from jobs.tasks.sentence_encoder.models import build_encoder, build_tempnet
from pipelines.archives import list_archives
from pipelines.text.manifest import Manifest
from pipelines.text.tokenization import load_tokenizer


def create_task(config: SentenceConfig, train: str, validation: str, rank: int, world_size: int) -> Task:
    """Create the task on a worker; `train` and `validation` are the directories of the prepared documents."""
    from jobs.tasks.sentence_encoder.task import SentenceTask

    return SentenceTask(config, Manifest.load(train), Manifest.load(validation), rank, world_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class SentencePlan(BasePlan[SentenceConfig]):
    """The plan of training a sentence encoder."""

    num_parameters: int
    """Number of parameters of the encoder with its head."""
    num_tempnet_parameters: int
    """Number of parameters of the TempNet; 0 without one."""

    summary_table = staticmethod(report.summary_table)
    write_report = staticmethod(report.write_report)

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
                f"{data.least_num_tokens} tokens on",
                "batch": f"{size} documents: {workers} workers × {size // workers}; each anchor against "
                f"{2 * config.num_pairs_per_batch - 2} others",
            },
            num_units=size,
            unit="documents",
            parameters=f"encoder with its head {self.num_parameters:,}, TempNet {self.num_tempnet_parameters:,}",
            num_trained=self.num_parameters + self.num_tempnet_parameters,
            tracking_uri=self.tracking_uri,
        )

    def prepare(self) -> PreparedTask:
        """Tokenise the documents, unless this was done before."""
        config = resolve_paths(self.config)
        train, validation = prepare_split(config, "train"), prepare_split(config, "validation")
        check_sizes(
            config,
            config.temperature if config.is_contrastive else None,
            num_samples=train.num_rows,
            num_pairs_per_batch=config.num_pairs_per_batch,
            noun="documents",
        )
        loss = config.temperature.loss_config
        return PreparedTask(
            create_task=partial(create_task, config, train.directory, validation.directory),
            num_samples=train.num_rows,
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
            },
        )


def make_plan(config: SentenceConfig) -> SentencePlan:
    """Make the plan of a run, checking everything that can be checked without Ray.

    Raises:
        ValueError, FileNotFoundError, OSError: if the configuration is refused; the message names the field, the value
            and what would be legal.
    """
    uri = tracking_uri(config)
    for split in ("train", "validation"):
        with naming_field(f"data.{split}: "):
            list_archives(getattr(config.data, split))
    try:
        tokenizer = load_tokenizer(config.tokenizer, needs_eos=False)
        encoder = build_encoder(config, tokenizer)
    except ValueError as error:
        if str(error).startswith("tokenizer "):
            raise ValueError(f"data.{error}") from error
        raise
    return SentencePlan(
        config=config,
        num_parameters=count_parameters(encoder),
        num_tempnet_parameters=count_parameters(build_tempnet(config, int(encoder.config.hidden_size))),
        tracking_uri=uri,
    )
