"""Of which pairs to predict temperatures, with which model: the command line of `jobs.predict_temperatures --images`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jobs.scoring.temperatures.texts.config import PredictionWorkers


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictPairTemperaturesConfig:
    """A dual encoder, image-text pairs, and where the table goes."""

    model: str
    """A dual encoder, as `train_clip` exports it, or a Transformers CLIPModel: a directory."""
    tempnet: str = ""
    """Directory that holds `tempnet_image/` and `tempnet_text/`. Default: the model's."""
    images: str
    """A WebDataset tar as img2dataset writes it, a directory of such, or a directory of images; path or pyarrow URI."""
    captions: str = ""
    """A json with the captions, for images that come without: Karpathy's form, or a list of {"image", "caption"}."""
    splits: tuple[str, ...] = ()
    """Which splits of a Karpathy json. Empty: all of them."""
    output: str
    """Directory (or URI) of the table, one Parquet file a part; a second start goes on with the parts that are missing.
    Several machines need one that all of them reach."""
    with_embeddings: bool = False
    """Also write the embeddings of image and caption."""
    batch_size: int = 64
    """Images, or captions, in one forward pass."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of the encoders; projections, embeddings, TempNets and τ are float32."""
    part_pairs: int = 1_000
    """Pairs of a part; a part ends with its archive, too."""
    max_bad_share: float = 0.01
    """Share of samples that may be unreadable before the job fails."""
    workers: PredictionWorkers = field(default_factory=PredictionWorkers)

    def __post_init__(self) -> None:
        for name in ("batch_size", "part_pairs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be positive")
        for name in ("model", "images", "output"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty: it must name a directory")
        if not 0.0 <= self.max_bad_share <= 1.0:
            raise ValueError(f"max_bad_share = {self.max_bad_share:g} must lie in [0, 1]")
