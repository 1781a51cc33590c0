"""The configuration of an evaluation of sentence encoders: which models, on which tasks, and with which workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pipelines.sentences.senteval import TASK_NAMES, present_tasks

from jobs.engine.config import RunSection, TrackingSection
from jobs.engine.named_values import named_values, twice
from jobs.scoring.language_models.config import EvaluationWorkersSection


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateSentencesConfig:
    """Every model is evaluated on all data that is named."""

    models: tuple[str, ...]
    """Encoders as `train_sentences` exports them, or any Transformers text encoders: directories or hub names."""
    data: str = ""
    """A directory in SentEval's layout (MR/, CR/, SUBJ/, MPQA/, SST/, TREC/, MRPC/)."""
    tasks: tuple[str, ...] = ()
    """Of MR, CR, SUBJ, MPQA, SST2, TREC, MRPC. Empty: those that are there."""
    similarity: tuple[str, ...] = ()
    """NAME=FILE: judgements of similarity: lines of score, tab, sentence, tab, sentence; or STS benchmark's files."""
    num_folds: int = 10
    """Of the cross-validation where a task gives no test sentences."""
    num_inner_folds: int = 5
    """Of the one in which the regularisation is chosen, where a task gives no development sentences."""
    seed: int = 0
    """Of the folds."""
    num_tokens: int = 0
    """Longer sentences are cut to these. 0: what the model was saved with, 512 at most."""
    batch_size: int = 64
    """Sentences in a forward pass."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of the encoders; embeddings are float32."""
    max_bad_share: float = 0.01
    """Share of a task's lines that may be unreadable before the job fails; they are counted in the table."""
    name: str = "sentence-evaluation"
    """Name of the evaluation: its directory in storage keeps what is finished, and the results."""
    storage: str = ""
    """Directory or URI that holds evaluations and the MLflow store. Default: $TEMPNET_HOME, else ./runs."""
    workers: EvaluationWorkersSection = field(default_factory=EvaluationWorkersSection)
    tracking: TrackingSection = field(default_factory=lambda: TrackingSection(experiment="sentence-evaluation"))

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("models is empty: name at least one")
        if again := twice(path.rstrip("/") for path in self.models):
            raise ValueError(f"models names {again!r} twice")
        if not (self.data or self.similarity):
            raise ValueError(
                "nothing to evaluate on: give data, a directory in SentEval's layout, or similarity, NAME=FILE"
            )
        if self.tasks and not self.data:
            raise ValueError("tasks needs data, the directory that they are in")
        for name in self.tasks:
            if name not in TASK_NAMES:
                raise ValueError(f"tasks: {name!r} is unknown: choose of {', '.join(TASK_NAMES)}")
        if again := twice([*self.tasks, *named_values("similarity", self.similarity)]):
            raise ValueError(f"tasks and similarity name {again!r} twice")
        for name, least in (("num_folds", 2), ("num_inner_folds", 2), ("num_tokens", 0), ("batch_size", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least {least}")
        if not 0.0 <= self.max_bad_share <= 1.0:
            raise ValueError(f"max_bad_share = {self.max_bad_share:g} must lie in [0, 1]")
        _ = self.run  # refuses names and storage that cannot be used

    @property
    def run(self) -> RunSection:
        """Name and storage with the rules of training runs."""
        run = RunSection(name=self.name, storage=self.storage)
        _ = run.resolved_storage
        return run

    @property
    def present_tasks(self) -> tuple[str, ...]:
        """The tasks to evaluate on.

        Raises:
            FileNotFoundError: if `data` is no directory, or holds none.
        """
        if not self.data:
            return ()
        try:
            return self.tasks or present_tasks(self.data)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"data: {error}") from error
