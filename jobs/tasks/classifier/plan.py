"""The plan of a cell: checks its configuration without Ray. No data are prepared, because labelled sentences are few."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from jobs.engine.launch import tracking_uri
from jobs.engine.task import Plan, PreparedTask
from jobs.tasks.base import count_parameters, create_task, resolve_paths
from jobs.tasks.classifier.config import ClassifierConfig
from jobs.tasks.classifier.task import build_model, read_fold
from pipelines.sentences.senteval import SentenceTask
from pipelines.text.tokenization import load_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierPlan(Plan[ClassifierConfig]):
    """The plan of a cell. A cell is one of many, so it has no report: its curves can be viewed in MLflow."""

    unit = "sentences"

    data: SentenceTask
    """The SentEval task, or the content of the file."""
    num_train: int
    """Number of training sentences."""
    num_held_out: int
    """Number of held-out sentences."""
    num_cut: int
    """Number of sentences truncated to `data.num_tokens`, including held-out ones."""
    num_parameters: int
    """Number of parameters of the Transformers classifier."""
    num_center_parameters: int
    """Number of parameters of the class centres."""

    @property
    def share_cut(self) -> float:
        """Share of all sentences that were truncated to `data.num_tokens`."""
        return self.num_cut / (self.num_train + self.num_held_out)

    @property
    def data_cpus(self) -> float:
        """Number of CPUs for reading data: 0, because the workers hold all sentences in memory."""
        return 0.0

    def describe(self) -> str:
        config, names = self.config, self.data.class_names
        num_epochs = config.run.num_steps * config.optimizer.batch_size / self.num_train
        return self.describe_lines(
            about={
                "loss": config.setting.name,
                "data": f"{self.data.name}: {self.num_train} sentences to train on ({num_epochs:.1f} epochs), "
                f"{self.num_held_out} held out, {len(names)} classes ({', '.join(names)}); "
                f"{self.share_cut:.2%} of the sentences were cut to {config.data.num_tokens} tokens",
            },
            num_units=config.optimizer.batch_size,
            parameters=f"model {self.num_parameters:,}, centres {self.num_center_parameters:,}",
            num_trained=self.num_parameters + self.num_center_parameters,
        )

    def prepare(self) -> PreparedTask:
        """Return the prepared task; the data need no preparation."""
        source = self.config.data.file or f"{self.config.data.directory}/{self.data.name}"
        counts = {"num_train": self.num_train, "num_held_out": self.num_held_out}
        return PreparedTask(
            create_task=partial(create_task, "jobs.tasks.classifier.task:ClassifierTask", resolve_paths(self.config)),
            num_samples=self.num_train,
            parameters={**counts, "num_cut": self.num_cut},
            data_sets={"training": (self.data.name, self.data.digest, source)},
            outcome={
                **counts,
                "class_names": list(self.data.class_names),
                "share_cut": self.share_cut,
                "num_lines_lost": dict(self.data.problems),
            },
        )

    def rows(self, outcome: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Return accuracy and cross-entropy on the held-out sentences."""
        return [
            ("held-out accuracy", f"{outcome['validation']['accuracy']:.2%}"),
            ("held-out cross-entropy", f"{outcome['validation']['cross_entropy']:.4f}"),
            (f"sentences cut to {self.config.data.num_tokens} tokens", f"{self.share_cut:.2%}"),
        ]


def make_plan(config: ClassifierConfig) -> ClassifierPlan:
    """Make the plan of a cell, checking everything that can be checked without Ray."""
    uri = tracking_uri(config)
    task, train, held_out = read_fold(config)
    if (size := config.optimizer.batch_size) > len(train):
        raise ValueError(
            f"optimizer.batch_size = {size} is more than the {len(train)} sentences of a fold to train on: choose at most "
            f"{len(train)}"
        )
    module = build_model(config, load_tokenizer(config.tokenizer, needs_eos=False), task.class_names)
    return ClassifierPlan(
        config=config,
        data=task,
        num_train=len(train),
        num_held_out=len(held_out),
        num_cut=train.num_cut,
        num_parameters=count_parameters(module.model),
        num_center_parameters=count_parameters(module.soft_triple),
        tracking_uri=uri,
    )
