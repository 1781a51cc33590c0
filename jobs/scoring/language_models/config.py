"""The configuration of an evaluation: which models, at which temperatures, on what, and with which workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from jobs.engine.config import RunSection, TrackingSection
from jobs.scoring.language_models.temperatures import Temperature

# The word that stands in `tempnets` for a model that is to be taken without one.
NO_TEMPNET = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationWorkersSection:
    """Processes and devices."""

    num_workers: int = 1
    """Ray actors, each holding one model at a time; no figure depends on their number."""
    use_gpu: bool = False
    """One GPU a worker."""
    cpus_per_worker: float = 1.0
    """CPUs that Ray reserves for a worker, and its number of PyTorch threads."""

    def __post_init__(self) -> None:
        for name in ("num_workers", "cpus_per_worker"):
            if not getattr(self, name) > 0:
                raise ValueError(f"workers.{name} = {getattr(self, name)} must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateConfig:
    """Every model is evaluated at every temperature on everything that is named."""

    models: tuple[str, ...]
    """Transformers causal LMs: exported directories or hub names."""
    tempnets: tuple[str, ...] = ()
    """The TempNet of each model, in their order; `none` for a model without. Default: `tempnet/` beside the model."""
    temperatures: tuple[str, ...] = ("one",)
    """one, fixed:VALUE, tempnet, or tempnet:TAU_MAX, which replaces τ_max at inference."""
    wikitext: str = ""
    """A text file whose word perplexity is wanted; headings `= Title =` of WikiText part it into documents."""
    detokenize: bool = True
    """Undo WikiText's tokenisation (`1 @,@ 000 ,`) before scoring, as the harness does. Words are counted before."""
    lambada: str = ""
    """A JSONL file with `text`, whose last word is to be predicted."""
    tasks: tuple[str, ...] = ()
    """Tasks, groups or tags of lm-evaluation-harness."""
    include_path: str = ""
    """A directory with task files (YAML) of one's own. Functions that they name are run: it must be trusted."""
    data_dir: str = ""
    """The directory that `data_files` of tasks on local files are relative to. Default: the working directory."""
    limit: int = 0
    """Documents of each task that are read, the first ones. 0: all."""
    num_fewshot: int = -1
    """Solved examples before each question of a harness task. -1: as the task says."""
    document_start: bool = True
    """Put the document-start token before every context, as in training. False: only where there is no context, or
    where the tokenizer does it by itself, which is how published figures of GPT-2 were made."""
    max_length: int = 0
    """Tokens that a model sees at a time. 0: as many as it has positions."""
    batch_size: int = 8
    """Sequences in a forward pass."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the base model. Softmax and TempNet are always float32."""
    trust_remote_code: bool = False
    """Let Transformers run code that comes with a model."""
    name: str = "evaluation"
    """Name of the evaluation: its directory in storage keeps finished parts and the results."""
    storage: str = ""
    """Directory or URI that holds evaluations and the MLflow store. Default: $TEMPNET_HOME, else ./runs."""
    workers: EvaluationWorkersSection = field(default_factory=EvaluationWorkersSection)
    tracking: TrackingSection = field(default_factory=lambda: TrackingSection(experiment="evaluation"))

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("models is empty: name at least one")
        if self.tempnets and len(self.tempnets) != len(self.models):
            raise ValueError(
                f"tempnets names {len(self.tempnets)} networks for {len(self.models)} models: "
                f"one a model is needed ({NO_TEMPNET!r} for a model without)"
            )
        if not (self.wikitext or self.lambada or self.tasks):
            raise ValueError("nothing to evaluate on: give wikitext, lambada or tasks")
        for name, lowest in (("limit", 0), ("num_fewshot", -1), ("max_length", 0), ("batch_size", 1)):
            if getattr(self, name) < lowest:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least {lowest}")
        for name in ("wikitext", "lambada"):
            if (path := getattr(self, name)) and not Path(path).is_file():
                raise ValueError(f"{name} = {path!r} is no file")
        for name in ("include_path", "data_dir"):
            if (path := getattr(self, name)) and not Path(path).is_dir():
                raise ValueError(f"{name} = {path!r} is no directory")
        if not self.temperatures:
            raise ValueError("temperatures is empty: name one, tempnet, fixed:VALUE or several")
        for name, values in (("temperatures", [one.name for one in self.columns]), ("tasks", self.tasks)):
            if len(set(values)) < len(values):
                raise ValueError(f"{name} = {' '.join(values)} names something twice")
        _ = self.run  # refuses names and storage that cannot be used

    @property
    def columns(self) -> list[Temperature]:
        """The temperatures, understood."""
        return [Temperature.parse(text) for text in self.temperatures]

    @property
    def run(self) -> RunSection:
        """Name and storage with the rules of training runs."""
        run = RunSection(name=self.name, storage=self.storage)
        _ = run.resolved_storage
        return run
