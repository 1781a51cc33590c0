"""The configuration of a classifier's cross-validation (what a person gives), and of its cells (what is trained).

A cell is one setting of the loss with one seed on one fold; it is a training run like any other.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field

from pipelines.sentences.senteval import TASK_NAMES, present_tasks
from tempnet.soft_triple import SoftTripleConfig

from jobs.engine.config import (
    EncoderSection,
    RunSection,
    TrackingSection,
    TrainingConfig,
    check_positive,
    check_share,
    with_absolute_fields,
)
from jobs.engine.named_values import twice


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledSection:
    """Labelled sentences."""

    directory: str = ""
    """A directory in SentEval's layout (MR/, CR/, SUBJ/, MPQA/, SST/, TREC/, MRPC/)."""
    tasks: tuple[str, ...] = ()
    """Of MR, CR, SUBJ, MPQA, SST2, TREC, MRPC; where one has a split, its training sentences are divided into folds.
    Empty: those that are there."""
    file: str = ""
    """One's own data instead: lines of label, tab, sentence and perhaps tab, second sentence."""
    classes: tuple[str, ...] = ()
    """The labels of `file`; lines with another are counted and left out. Empty: those that occur."""
    num_examples: int = 0
    """So many, drawn in proportion to the classes by `seed`, as in TREC-1k. 0: all."""
    seed: int = 0
    """Of that draw."""
    tokenizer: str = ""
    """A Transformers fast tokenizer: directory or hub name. Empty: that of model.path."""
    num_tokens: int = 128
    """Longer sentences are cut to these, and counted."""
    max_bad_share: float = 0.01
    """Share of lines that may be unreadable before the job fails."""

    def __post_init__(self) -> None:
        if bool(self.file) == bool(self.directory):
            raise ValueError("data: give either data.directory, in SentEval's layout, or data.file")
        if unknown := [name for name in self.tasks if name not in TASK_NAMES]:
            raise ValueError(f"data.tasks: {unknown[0]!r} is unknown: choose of {', '.join(TASK_NAMES)}")
        if again := twice(self.tasks):
            raise ValueError(f"data.tasks names {again!r} twice")
        if self.file and self.tasks:
            raise ValueError(f"data.tasks = {self.tasks} is for data.directory, and data.file is given")
        if self.classes and not self.file:
            raise ValueError("data.classes is for data.file: SentEval's tasks have their own")
        if self.num_examples < 0:
            raise ValueError(f"data.num_examples = {self.num_examples} must not be negative")
        check_positive("data", self, "num_tokens")
        check_share("data", self, "max_bad_share")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierModelSection(EncoderSection):
    """The model: weights to start from, or sizes to start at random."""

    path: str = ""
    """Any Transformers text model: directory or hub name; its classification head is made anew. Empty: a random RoBERTa."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CentersSection:
    """What all settings of TripleEntropy have in common (`tempnet.soft_triple`)."""

    learning_rate: float = 1e-2
    """Of the centres."""
    regularizer: float = 0.0
    """Weight of SoftTriple's own regulariser, by which centres of a class merge. 0: none."""
    with_padding: bool = False
    """Count padding as tokens of the sentence, as the authors' code does."""

    def __post_init__(self) -> None:
        check_positive("centers", self, "learning_rate")
        if not self.regularizer >= 0.0:
            raise ValueError(f"centers.regularizer = {self.regularizer:g} must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingSection:
    """One loss."""

    cross_entropy_alone: bool = False
    """Plain fine-tuning: the rest of this section is not read."""
    num_centers: int = 2000
    gamma: float = 0.1
    scale: float = 3.3
    margin: float = 0.3
    beta: float = 0.9

    @property
    def name(self) -> str:
        """`ce`, or the values that make a setting."""
        if self.cross_entropy_alone:
            return "ce"
        values = {"k": self.num_centers, "gamma": self.gamma, "scale": self.scale, "margin": self.margin}
        return "-".join(f"{name}{value:g}" for name, value in (values | {"beta": self.beta}).items())


@dataclass(frozen=True, slots=True, kw_only=True)
class GridSection:
    """Which settings of TripleEntropy are tried: every combination; and on what."""

    num_centers: tuple[int, ...] = (2000,)
    """K."""
    gamma: tuple[float, ...] = (0.1,)
    """γ, the temperature of the softmax over the centres of a class."""
    scale: tuple[float, ...] = (3.3,)
    """λ."""
    margin: tuple[float, ...] = (0.3,)
    """δ."""
    beta: tuple[float, ...] = (0.9,)
    """β, the share of the cross-entropy; 1 is cross-entropy alone."""
    with_baseline: bool = True
    """Also train by cross-entropy alone, on the same folds with the same seeds."""
    seeds: tuple[int, ...] = (2, 16, 128, 2048)
    """Of the folds, the weights, dropout and the order."""
    num_folds: int = 5
    """Of the cross-validation."""
    num_concurrent: int = 0
    """Cells that are trained at a time. 0: as many as the cluster has room for."""
    keep_models: bool = False
    """Keep the checkpoint and the exported classifier of every cell."""

    def __post_init__(self) -> None:
        for name in ("num_centers", "gamma", "scale", "margin", "beta", "seeds"):
            values = getattr(self, name)
            if not values:
                raise ValueError(f"grid.{name} is empty: give at least one value")
            if again := twice(map(str, values)):
                raise ValueError(f"grid.{name} names {again} twice")
        for setting in self.settings:
            if setting.cross_entropy_alone:
                continue
            try:
                _ = soft_triple_config(setting, CentersSection())
            except ValueError as error:
                raise ValueError(f"grid.{error}") from error
        if self.num_folds < 2:
            raise ValueError(f"grid.num_folds = {self.num_folds} must be at least 2")
        if self.num_concurrent < 0:
            raise ValueError(f"grid.num_concurrent = {self.num_concurrent} must not be negative")

    @property
    def settings(self) -> list[SettingSection]:
        """The baseline, if wanted, and every combination."""
        found = [
            SettingSection(num_centers=num_centers, gamma=gamma, scale=scale, margin=margin, beta=beta)
            for num_centers, gamma, scale, margin, beta in itertools.product(
                self.num_centers, self.gamma, self.scale, self.margin, self.beta
            )
        ]
        return [SettingSection(cross_entropy_alone=True)] * self.with_baseline + found


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldSection:
    """Which sentences of what are held out."""

    task: str
    """Of SentEval's; empty: the file's."""
    num_folds: int
    fold: int
    keep_model: bool
    """Whether the trained classifier is exported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierConfig(TrainingConfig):
    """A cell."""

    data: LabelledSection
    fold: FoldSection
    setting: SettingSection
    model: ClassifierModelSection
    centers: CentersSection

    def __post_init__(self) -> None:
        TrainingConfig.__post_init__(self)
        if self.optimizer.micro_batch_size:
            raise ValueError(
                f"optimizer.micro_batch_size = {self.optimizer.micro_batch_size}: the mean over the tokens of a batch is not "
                "that of its parts' means; choose 0, and more workers or a smaller optimizer.batch_size if memory is short"
            )
        if self.workers.zero_stage == 3:
            raise ValueError("workers.zero_stage = 3: classifiers are trained with 0, 1 or 2")
        if not self.tokenizer:
            raise ValueError("data.tokenizer is empty, and there is no model.path to take one from")

    @property
    def tokenizer(self) -> str:
        """Where the tokenizer comes from."""
        return self.data.tokenizer or self.model.path


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossValidationConfig(TrainingConfig):
    """Everything about the cross-validation of a classifier."""

    data: LabelledSection
    run: RunSection
    model: ClassifierModelSection = field(default_factory=ClassifierModelSection)
    grid: GridSection = field(default_factory=GridSection)
    centers: CentersSection = field(default_factory=CentersSection)
    tracking: TrackingSection = field(default_factory=lambda: TrackingSection(experiment="classifiers"))

    def __post_init__(self) -> None:
        TrainingConfig.__post_init__(self)
        if self.run.seed:
            raise ValueError(f"run.seed = {self.run.seed}: the seeds of a cross-validation are grid.seeds")
        # Refuses what no cell can have. It has no place of its own: the storage of a preset may not be usable until the
        # command line has named another.
        _ = self._cell(self.run, "", self.grid.settings[0], 0)

    @property
    def tasks(self) -> tuple[str, ...]:
        """What is cross-validated; one empty name for a file.

        Raises:
            FileNotFoundError: if there is none.
        """
        if self.data.file:
            return ("",)
        try:
            return self.data.tasks or present_tasks(self.data.directory)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"data.directory: {error}") from error

    def cells(self) -> list[ClassifierConfig]:
        """All cells; those that are compared follow each other.

        Raises:
            FileNotFoundError: as :attr:`tasks`.
        """
        grid = self.grid
        combinations = itertools.product(self.tasks, grid.seeds, range(grid.num_folds), grid.settings)
        return [self.cell(task, setting, seed, fold) for task, seed, fold, setting in combinations]

    def cell(self, task: str, setting: SettingSection, seed: int, fold: int) -> ClassifierConfig:
        """One cell, in a directory within that of the cross-validation, with absolute paths."""
        name = "-".join(filter(None, (task, setting.name, f"seed{seed}", f"fold{fold}")))
        run = dataclasses.replace(self.run, name=name, storage=self.run.directory, seed=seed)
        return self._cell(run, task, setting, fold)

    def _cell(self, run: RunSection, task: str, setting: SettingSection, fold: int) -> ClassifierConfig:
        return ClassifierConfig(
            data=with_absolute_fields(self.data, "directory", "file", "tokenizer"),
            run=run,
            fold=FoldSection(task=task, num_folds=self.grid.num_folds, fold=fold, keep_model=self.grid.keep_models),
            setting=setting,
            model=with_absolute_fields(self.model, "path"),
            centers=self.centers,
            optimizer=self.optimizer,
            workers=self.workers,
            validation=self.validation,
            tracking=self.tracking,
        )


def soft_triple_config(setting: SettingSection, centers: CentersSection) -> SoftTripleConfig:
    """The loss of a setting.

    Raises:
        ValueError: naming the field.
    """
    return SoftTripleConfig(
        num_centers=setting.num_centers,
        gamma=setting.gamma,
        scale=setting.scale,
        margin=setting.margin,
        beta=setting.beta,
        regularizer=centers.regularizer,
    )
