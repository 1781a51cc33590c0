"""The configuration of an evaluation of image-text models: the models, the data and the workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jobs.engine.config import TrackingSection
from jobs.engine.fields import find_duplicate, named_values
from jobs.scoring.config import EvaluationConfig, check_least, check_share
from pipelines.images.decoding import MAX_PIXELS


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateClipConfig(EvaluationConfig):
    """The models and the data; every model is evaluated on every data set. NAME is the name of a set in the results."""

    models: tuple[str, ...]
    """Directories of the models: exports of `train_clip`, or Transformers CLIPModels with their tokenizers."""
    retrieval: tuple[str, ...] = ()
    """Retrieval sets as NAME=URI: images with captions, in any form that `prepare_images` reads."""
    captions: tuple[str, ...] = ()
    """Captions of a retrieval set as NAME=FILE: JSON in Karpathy's form, or a list. Default: those beside the images."""
    splits: tuple[str, ...] = ()
    """NAME=SPLIT,SPLIT: use only these splits of the retrieval set's Karpathy JSON. Default: all splits."""
    zero_shot: tuple[str, ...] = ()
    """Zero-shot sets as NAME=URI with a folder of images per class: a tar, a directory of tars, or one of folders."""
    templates: tuple[str, ...] = ("imagenet",)
    """Prompt templates: imagenet (80 prompts), cifar (18), or a text file with one prompt per line and {} for the
    class. NAME=… sets those of one data set."""
    class_names: tuple[str, ...] = ()
    """Class names of a zero-shot set as NAME=FILE: a JSON object of folder → class name, or cifar10 or cifar100 for
    folders named by numbers. Default: the folders' names, with spaces for underscores."""
    key_dot: Literal["first", "last"] = "first"
    """Dot of a member's name in a tar at which the key of its sample ends: webdataset's is the first."""
    max_bad_share: float = 0.01
    """Largest share of a set's images, in [0, 1], that may be unreadable before the job fails. They are counted."""
    max_pixels: int = MAX_PIXELS
    """Maximum number of pixels of an image; larger images are not decoded and count as unreadable."""
    batch_size: int = 64
    """Number of images, or of texts, per forward pass."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision in which the encoders run. Embeddings are float32, and scores are computed exactly from them."""
    name: str = "clip-evaluation"
    """Name of the evaluation; also the name of its directory in storage, which keeps embeddings and the results."""
    tracking: TrackingSection = field(default_factory=lambda: TrackingSection(experiment="clip-evaluation"))

    def __post_init__(self) -> None:
        EvaluationConfig.__post_init__(self)
        if again := find_duplicate(path.rstrip("/") for path in self.models):
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
        check_least(self, max_pixels=1, batch_size=1)
        check_share("max_bad_share", self.max_bad_share)

    def template_set(self, name: str) -> str:
        """Returns the name or file of the templates of a zero-shot set."""
        own = named_values("templates", [text for text in self.templates if "=" in text])
        shared = [text for text in self.templates if "=" not in text]
        return own.get(name) or (shared or ["imagenet"])[0]


def _check_known(field_name: str, named: dict[str, str], data: dict[str, str]) -> None:
    if unknown := sorted(named.keys() - data.keys()):
        there = ", ".join(data) or "none"
        raise ValueError(f"{field_name} names the set {unknown[0]!r}, which is not among those to evaluate on: {there}")
