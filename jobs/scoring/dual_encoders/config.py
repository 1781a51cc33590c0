"""The configuration of an evaluation of image-text models: which models, on which data, and with which workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pipelines.images.decoding import MAX_PIXELS

from jobs.engine.config import RunSection, TrackingSection
from jobs.engine.named_values import named_values, twice
from jobs.scoring.language_models.config import EvaluationWorkersSection


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateClipConfig:
    """Every model is evaluated on all data that is named; NAME is how a data set is called in the results."""

    models: tuple[str, ...]
    """Dual encoders as `train_clip` exports them, or directories of a Transformers CLIPModel with its tokenizer."""
    retrieval: tuple[str, ...] = ()
    """NAME=URI: images with captions, read as by `prepare_images`."""
    captions: tuple[str, ...] = ()
    """NAME=FILE: a json with the captions of a retrieval set (Karpathy's, or a list). Default: beside the images."""
    splits: tuple[str, ...] = ()
    """NAME=SPLIT,SPLIT: of a Karpathy json, only the images of these splits. Default: all of them."""
    zero_shot: tuple[str, ...] = ()
    """NAME=URI: a folder of images a class; a tar, a directory of tars, or a directory of folders."""
    templates: tuple[str, ...] = ("imagenet",)
    """imagenet (80 prompts), cifar (18), or a text file with a prompt a line in which {} is the class; NAME=… for one set."""
    class_names: tuple[str, ...] = ()
    """NAME=FILE: a json object, folder → name of the class; or cifar10, cifar100, for folders that are numbers. Default:
    the folders' names, with spaces for underscores."""
    max_bad_share: float = 0.01
    """Share of the images of a set that may be unreadable before the job fails; they are counted in the table."""
    max_pixels: int = MAX_PIXELS
    """Larger images are refused unread."""
    batch_size: int = 64
    """Images, or texts, in a forward pass."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of the encoders; embeddings are float32 and scores exact."""
    name: str = "clip-evaluation"
    """Name of the evaluation: its directory in storage keeps embeddings and the results."""
    storage: str = ""
    """Directory or URI that holds evaluations, prepared data and the MLflow store. Default: $TEMPNET_HOME, else ./runs."""
    workers: EvaluationWorkersSection = field(default_factory=EvaluationWorkersSection)
    tracking: TrackingSection = field(default_factory=lambda: TrackingSection(experiment="clip-evaluation"))

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("models is empty: name at least one")
        if again := twice(path.rstrip("/") for path in self.models):
            raise ValueError(f"models names {again!r} twice")
        if not (self.retrieval or self.zero_shot):
            raise ValueError("nothing to evaluate on: give retrieval or zero_shot, each as NAME=URI")
        retrieval, zero_shot = named_values("retrieval", self.retrieval), named_values("zero_shot", self.zero_shot)
        if both := sorted(retrieval.keys() & zero_shot.keys()):
            raise ValueError(f"retrieval and zero_shot both name a set {both[0]!r}: give them different names")
        for name, data in (("captions", retrieval), ("splits", retrieval), ("class_names", zero_shot)):
            _check_known(name, named_values(name, getattr(self, name)), data)
        _check_known(
            "templates", named_values("templates", [text for text in self.templates if "=" in text]), zero_shot
        )
        if sum("=" not in text for text in self.templates) > 1:
            raise ValueError(f"templates = {' '.join(self.templates)}: only one is for all sets, others are NAME=…")
        for name in ("max_pixels", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")
        if not 0.0 <= self.max_bad_share <= 1.0:
            raise ValueError(f"max_bad_share = {self.max_bad_share:g} must lie in [0, 1]")
        _ = self.run  # refuses names and storage that cannot be used

    @property
    def run(self) -> RunSection:
        """Name and storage with the rules of training runs."""
        run = RunSection(name=self.name, storage=self.storage)
        _ = run.resolved_storage
        return run

    def template_set(self, name: str) -> str:
        """The templates of a zero-shot set."""
        own = named_values("templates", [text for text in self.templates if "=" in text])
        shared = [text for text in self.templates if "=" not in text]
        return own.get(name) or (shared or ["imagenet"])[0]


def _check_known(field_name: str, named: dict[str, str], data: dict[str, str]) -> None:
    if unknown := sorted(named.keys() - data.keys()):
        there = ", ".join(data) or "none"
        raise ValueError(f"{field_name} names the set {unknown[0]!r}, which is not among those to evaluate on: {there}")
