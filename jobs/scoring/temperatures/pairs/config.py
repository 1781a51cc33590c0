"""The configuration, that is, the command line, of `jobs.predict_temperatures --images`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jobs.scoring.config import PoolSection, check_least, check_share


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictPairTemperaturesConfig:
    """The dual encoder, the image-text pairs, and where the table goes."""

    model: str
    """Directory of the dual encoder: an export of `train_clip`, or a Transformers CLIPModel."""
    tempnet: str = ""
    """Directory that contains `tempnet_image/` and `tempnet_text/`. Default: the directory of the model."""
    images: str
    """A WebDataset tar as written by img2dataset, a directory of such tars, or a directory of images; a path or
    pyarrow URI."""
    captions: str = ""
    """JSON file with captions for images that come without: in Karpathy's form, or a list of {"image", "caption"}."""
    splits: tuple[str, ...] = ()
    """Use only these splits of a Karpathy JSON. Empty: all splits."""
    output: str
    """Directory or URI of the table, with one Parquet file per part. A repeated run writes only the missing parts.
    With several machines, all of them must be able to reach it."""
    html: str = ""
    """File, as a path or URI, for a page that shows the images and captions with the lowest and the highest τ."""
    label: str = ""
    """Field with a number in the JSON files beside the images, such as `concept_frequency` of the sample data. The page
    compares τ with it. Needs `html`."""
    with_embeddings: bool = False
    """Also write the embeddings of every image and caption."""
    batch_size: int = 64
    """Number of images, or of captions, per forward pass."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision in which the encoders run. Projections, embeddings, TempNets and τ are float32."""
    part_pairs: int = 1_000
    """Number of pairs per part; the last part of an archive may have fewer."""
    max_bad_share: float = 0.01
    """Largest share of samples, in [0, 1], that may be unreadable before the job fails."""
    workers: PoolSection = field(default_factory=PoolSection)

    def __post_init__(self) -> None:
        check_least(self, batch_size=1, part_pairs=1)
        for name in ("model", "images", "output"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty: it must name a directory")
        check_share("max_bad_share", self.max_bad_share)
        if self.label and not self.html:
            raise ValueError(f"label = {self.label} is shown on the page only: html must name a file for it")
