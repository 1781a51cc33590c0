"""The configurations, that is, the command lines, of `jobs.analyse`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jobs.engine.config import RunSection, TrackingSection
from jobs.scoring.config import PoolSection, check_least, check_share


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """The model, the records, and where the results go."""

    model: str
    """Directory, URI or hub name of a Transformers causal LM, such as an export of `train_lm`."""
    tempnet: str = ""
    """Directory, URI or hub name of the TempNet. Default: `tempnet/` in the directory of the model."""
    data: str
    """The records; a path or URI."""
    output: str
    """Directory or URI of results.json, results.md, groups.png and the temperatures of all records. A repeated run
    predicts only what is missing."""
    context_length: int = 0
    """Number of positions that the model reads at once. 0: all that it was built for."""
    batch_size: int = 16
    """Number of windows per forward pass."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision in which the base model runs. TempNet and τ are float32."""
    max_bad_share: float = 0.01
    """Largest share of records, in [0, 1], that may be unreadable before the job fails."""
    storage: str = ""
    """Directory or URI of the MLflow store. Default: $TEMPNET_HOME, else ./runs."""
    workers: PoolSection = field(default_factory=PoolSection)
    tracking: TrackingSection = field(default_factory=lambda: TrackingSection(experiment="analyses"))

    def __post_init__(self) -> None:
        check_least(self, batch_size=1, context_length=0)
        check_share("max_bad_share", self.max_bad_share)
        for name in ("model", "data", "output"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty: it must name a file or directory")
        _ = self.run.resolved_storage

    @property
    def run(self) -> RunSection:
        """Name and storage as the section that training runs use, checked by the same rules."""
        return RunSection(name="analysis", storage=self.storage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subjectivity(Analysis):
    """Compare the mean τ of questions and answers with how subjective they are (SubjQA; TempNet, Figure 6 left).

    `data` is a CSV file of SubjQA, or a directory that is searched for them. Records without an answer are left out.
    """

    by: Literal["question", "answer"] = "question"
    """Whose subjectivity makes the five groups: 1 is the most subjective in the files, and 5 the least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instructions(Analysis):
    """Compare the mean τ of instructions and answers by the verb that they begin with (TempNet, Figure 6 right).

    `data` is a JSON file with a list of Alpaca's records: `instruction`, `input` and `output`. The paper finds the root verb
    with a parser; here it is the first word. Instructions that begin with another kind of word are left out.
    """

    num_verbs: int = 20
    """Number of most frequent verbs that make a group."""

    def __post_init__(self) -> None:
        super(Instructions, self).__post_init__()
        check_least(self, num_verbs=2)
