"""The configuration of an evaluation of language models: models, temperatures, tasks and workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from jobs.engine.config import RunSection, TrackingSection
from jobs.scoring.language_models.temperatures import Temperature

# The value in `tempnets` for a model that is to be used without a TempNet.
NO_TEMPNET = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationWorkersSection:
    """Number and resources of the worker processes."""

    num_workers: int = 1
    """Number of Ray actors, each of which holds one model at a time. The results do not depend on it."""
    use_gpu: bool = False
    """Reserve one GPU for every worker. False: workers run on CPUs."""
    cpus_per_worker: float = 1.0
    """CPUs that Ray reserves for every worker; also its number of PyTorch threads."""

    def __post_init__(self) -> None:
        for name in ("num_workers", "cpus_per_worker"):
            if not getattr(self, name) > 0:
                raise ValueError(f"workers.{name} = {getattr(self, name)} must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateConfig:
    """The models, temperatures and tasks; every model is evaluated at every temperature on every task."""

    models: tuple[str, ...]
    """Transformers causal LMs: directories of exports, or hub names."""
    tempnets: tuple[str, ...] = ()
    """The TempNets of the models, in the same order; `none` for a model without one. Default: `tempnet/` in each
    model's directory."""
    temperatures: tuple[str, ...] = ("one",)
    """Temperatures: one (τ = 1), fixed:VALUE, tempnet, or tempnet:TAU_MAX, which replaces the TempNet's τ_max."""
    wikitext: str = ""
    """Text file to compute the word perplexity of; WikiText headings `= Title =` split it into documents. Empty:
    none."""
    detokenize: bool = True
    """Undo WikiText's tokenisation (`1 @,@ 000 ,`) before scoring, as the harness does. Words are counted before."""
    lambada: str = ""
    """JSONL file with a field `text`, whose last word is to be predicted. Empty: none."""
    tasks: tuple[str, ...] = ()
    """Names of tasks, groups or tags of lm-evaluation-harness."""
    include_path: str = ""
    """Directory with your own task files (YAML). It must be trusted: functions that the files name are run."""
    data_dir: str = ""
    """Directory that the `data_files` of tasks on local files are relative to. Default: the working directory."""
    limit: int = 0
    """Use only this many documents of each task, the first ones. 0: all."""
    num_fewshot: int = -1
    """Number of solved examples before each question of a harness task. -1: the task's own default."""
    document_start: bool = True
    """Put the document-start token before every context, as in training. False: only where the context is empty or
    the tokenizer adds it by itself, which is how published figures of GPT-2 were computed."""
    max_length: int = 0
    """Maximum number of tokens that a model reads at once. 0: all of its positions."""
    batch_size: int = 8
    """Number of sequences per forward pass."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type of the base model. The softmax and TempNet are always float32."""
    trust_remote_code: bool = False
    """Allow Transformers to run code that is shipped with a model."""
    name: str = "evaluation"
    """Name of the evaluation; also the name of its directory in storage, which keeps finished units and the results."""
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
        _ = self.run  # raises ValueError if the name or the storage cannot be used

    @property
    def columns(self) -> list[Temperature]:
        """The parsed temperatures."""
        return [Temperature.parse(text) for text in self.temperatures]

    @property
    def run(self) -> RunSection:
        """Name and storage as the section that training runs use, checked by the same rules."""
        run = RunSection(name=self.name, storage=self.storage)
        _ = run.resolved_storage
        return run
