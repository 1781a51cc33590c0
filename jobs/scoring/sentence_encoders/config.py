"""The configuration of an evaluation of sentence encoders: the models, the tasks and the workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jobs.engine.config import TrackingSection
from jobs.engine.fields import find_duplicate, named_values
from jobs.scoring.config import EvaluationConfig, check_least, check_share
from pipelines.sentences.senteval import SENTEVAL_NAMES, check_task, present_tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateSentencesConfig(EvaluationConfig):
    """The models and the data; every model is evaluated on all the data."""

    models: tuple[str, ...]
    """Directories, URIs or hub names of the models: exports of `train_sentences`, or any Transformers text encoders, trained
    or not. An embedding is the mean of the last hidden states; a directory that names another pooling is refused.
    glove:FILE is the mean of word vectors from a text file, with a word and its numbers per line."""
    data: str = ""
    """SentEval's `data/downstream`, or its `data`, which has the probing tasks too. Empty: no tasks."""
    tasks: tuple[str, ...] = ()
    """Tasks to evaluate on, by SentEval's names: MR, CR, SUBJ, MPQA, SST2, SST5, TREC, MRPC, SNLI, SICKEntailment, the ten
    probing tasks, and by the cosine STS12 to STS16, STSBenchmark and SICKRelatedness. Empty: all that are found in `data`
    but SNLI, whose regression takes hours."""
    similarity: tuple[str, ...] = ()
    """Judgements as NAME=FILE: lines of score, tab, sentence, tab, sentence; or files of the STS benchmark."""
    num_folds: int = 10
    """Number of cross-validation folds for tasks without test sentences."""
    num_inner_folds: int = 5
    """Number of folds used to choose the regularisation, for tasks without development sentences."""
    seed: int = 0
    """Random seed of the folds."""
    num_tokens: int = 0
    """Maximum tokens of a sentence; longer ones are cut. 0: as saved with the model, else its positions, at most 512."""
    batch_size: int = 64
    """Number of sentences per forward pass."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision in which the encoders run. Embeddings are always float32."""
    max_bad_share: float = 0.01
    """Largest share of a task's lines, in [0, 1], that may be unreadable before the job fails. They are counted."""
    name: str = "sentence-evaluation"
    """Name of the evaluation; also the name of its directory in storage, which keeps finished cells and the results."""
    tracking: TrackingSection = field(default_factory=lambda: TrackingSection(experiment="sentence-evaluation"))

    def __post_init__(self) -> None:
        EvaluationConfig.__post_init__(self)
        if again := find_duplicate(path.rstrip("/") for path in self.models):
            raise ValueError(f"models names {again!r} twice")
        if not (self.data or self.similarity):
            raise ValueError(
                "nothing to evaluate on: give data, a directory in SentEval's layout, or similarity, NAME=FILE"
            )
        if self.tasks and not self.data:
            raise ValueError("tasks needs data, the directory that they are in")
        for name in self.tasks:
            check_task(name, SENTEVAL_NAMES, "tasks: ")
        if self.tasks:
            _ = self.present_tasks
        check_least(self, num_folds=2, num_inner_folds=2, num_tokens=0, batch_size=1)
        check_share("max_bad_share", self.max_bad_share)

    @property
    def present_tasks(self) -> tuple[str, ...]:
        """The tasks to evaluate on (FileNotFoundError: none is there; ValueError: two, or judgements, have the same name)."""
        found = self.tasks
        if self.data and not found:
            found = present_tasks(self.data, [name for name in SENTEVAL_NAMES if name != "SNLI"])
        if again := find_duplicate([*found, *named_values("similarity", self.similarity)]):
            raise ValueError(f"tasks and similarity name {again!r} twice: call the judgements otherwise")
        return found
