"""The configurations, that is, the command lines, of `jobs.predict_temperatures`: for texts, and for pairs (`--images`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jobs.scoring.config import LanguageModelPool, PoolSection, check_least, check_named, check_precision, check_share

SUMMARY_FILE = "_summary.json"
"""Totals over all parts, beside them."""


@dataclass(frozen=True, kw_only=True)  # without slots, so that a class can inherit from other slotted ones too
class TextReadingConfig:
    """How the documents of a text are read by a language model."""

    context_length: int = 0
    """Number of positions that the language model reads at once. 0: all that it was built for."""
    stride: int = 0
    """Tokens between the starts of a long document's windows, 1 … context_length. Every token is predicted once;
    after the first window, with at least context_length − stride tokens of context. 0: half of context_length."""
    batch_size: int = 16
    """Number of windows per forward pass."""
    precision: Literal["fp32", "bf16", "int8", "fp8"] = "fp32"
    """Precision of the base model; int8, fp8: weights in eight bits, by torchao. TempNet, τ and entropy are float32."""
    text_field: str = "text"
    """Name of the field or column that contains the text."""
    max_documents: int = 0
    """Maximum number of documents read from each archive. 0: all."""
    part_characters: int = 1_000_000
    """Characters per part, which is scored, written and resumed as a unit. A part ends with the document that reaches this
    number, or at the end of its archive."""
    max_bad_share: float = 0.01
    """Largest share of records, in [0, 1], that may be unreadable before the job fails."""
    workers: LanguageModelPool = field(default_factory=LanguageModelPool)

    def __post_init__(self) -> None:
        check_least(self, batch_size=1, part_characters=1, context_length=0, stride=0, max_documents=0)
        check_precision("precision", self.precision)
        check_share("max_bad_share", self.max_bad_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictTemperaturesConfig(TextReadingConfig):
    """The model, the texts, and where the results go: tables (`output`), a page (`html`), or both."""

    model: str
    """Directory, URI or hub name of a Transformers causal LM, such as an export of `train_lm`."""
    tempnet: str = ""
    """Directory, URI or hub name of the TempNet. Default: `tempnet/` in the directory of the model."""
    text: str
    """A text archive (.jsonl, .jsonl.gz, .jsonl.zst, .tar of these, .parquet), a plain UTF-8 text (.txt, .md, .rst:
    one document per file), or a directory of archives or, if it has none, of plain texts; a path or pyarrow URI."""
    output: str = ""
    """Directory or URI of the tables, with one Parquet file per part. A repeated run writes only the missing parts.
    With several machines, all of them must be able to reach it. Empty: no tables."""
    html: str = ""
    """HTML file (path or URI) of the first documents, tokens coloured by τ. Default: temperatures.html if no output."""
    html_tokens: int = 4096
    """Maximum number of tokens on the page."""
    per_token: bool = False
    """Also write lists of token ids, τ and entropy, with one element per token."""
    with_entropy: bool = True
    """Also write the entropy of the predictions at τ = 1, in nats, and its rank correlation with τ. It needs logits."""

    def __post_init__(self) -> None:
        TextReadingConfig.__post_init__(self)
        check_least(self, html_tokens=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictPairTemperaturesConfig:
    """The dual encoder, the image-text pairs, and where the table goes."""

    model: str
    """Directory of the dual encoder: an export of `train_clip`, or a Transformers CLIPModel."""
    tempnet: str = ""
    """Directory that contains `tempnet_image/` and `tempnet_text/`. Default: the directory of the model."""
    images: str
    """A WebDataset tar as written by img2dataset, a directory of these, or one of images; a path or pyarrow URI."""
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
    compares τ with it, for captions their mean τ for each image. Needs `html`."""
    with_embeddings: bool = False
    """Also write the embeddings of every image and caption."""
    batch_size: int = 64
    """Number of images, or of captions, per forward pass."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision in which the encoders run. Projections, embeddings, TempNets and τ are float32."""
    part_pairs: int = 1_000
    """Number of pairs per part; the last part of an archive may have fewer."""
    key_dot: Literal["first", "last"] = "first"
    """Dot of a member's name in a tar at which the key of its sample ends: webdataset's is the first."""
    max_bad_share: float = 0.01
    """Largest share of samples, in [0, 1], that may be unreadable before the job fails."""
    workers: PoolSection = field(default_factory=PoolSection)

    def __post_init__(self) -> None:
        check_least(self, batch_size=1, part_pairs=1)
        check_named(self)
        check_share("max_bad_share", self.max_bad_share)
        if self.label and not self.html:
            raise ValueError(f"label = {self.label} is shown on the page only: html must name a file for it")
