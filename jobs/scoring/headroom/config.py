"""The configurations, that is, the command lines, of `jobs.calibrate headroom`: for likelihood, and for rewards."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

from jobs.engine.config import TrackingSection
from jobs.scoring.config import OutputConfig, check_least, check_named
from jobs.scoring.reward.config import RewardedTexts
from jobs.scoring.temperatures.config import TextReadingConfig

_OF_TEXT = (
    "tokens_per_document", "end_of_document", "max_documents", "context_length", "stride", "text_field", "part_characters",
)  # fmt: skip
_OF_IMAGES = ("key_dot", "captions", "splits", "gallery_images", "gallery_seed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom(TextReadingConfig, OutputConfig):
    """Measure what a temperature per token, image or caption could gain over the best constant; nothing is trained.

    With --verifier.name the gain is one of reward, on --prompts: --verifier.name NAME --help lists these options.
    """

    model: str
    """Directory, URI or hub name of a Transformers causal LM, for `text`; for `images`, directory or URI of an
    image–text model: an export of `train_clip`, or a Transformers CLIPModel."""
    text: str = ""
    """Text that the model was not trained on: an archive or plain text, or a directory of these; a path or URI. The
    interval is over its documents, of which there must be at least as many as folds."""
    images: str = ""
    """Image–text pairs that the model was not trained on, in the place of text: a WebDataset tar as written by
    img2dataset, a directory of such tars, or a directory of images; a path or URI. The interval is over images."""
    captions: str = ""
    """JSON file with captions for images that come without: in Karpathy's form, or a list of {"image", "caption"}."""
    splits: tuple[str, ...] = ()
    """Use only these splits of a Karpathy JSON. Empty: all splits."""
    gallery_images: int = 1000
    """Number of images, with their captions, among which a caption's image and an image's caption are looked for, at
    least 3. Images are dealt out to galleries at random; fewer images form one gallery."""
    gallery_seed: int = 0
    """Seed that deals out the images to galleries."""
    output: str = "headroom"
    """Directory or URI of headroom.json, reliability.png and what was measured. A repeated run measures only what is
    missing. A token, image or caption takes 170 bytes and two for each unit of the hidden state or embedding, before
    compression; the embeddings of images and captions are kept, too."""
    folds: int = 5
    """Number of folds of documents, or images, at least 3: each is judged by what was fitted to other folds."""
    least_gain: float = 1.0
    """Gain, in thousandths of a nat per token or pair, that is worth it if the whole interval lies above."""
    tokens_per_document: int = 1024
    """Number of tokens of a document that are measured, from its beginning."""
    end_of_document: Literal["measured", "target", "ignored"] = "measured"
    """Whether the end-of-text token after every document counts, as in training (data.end_of_document). measured: if the
    model gives it a probability of 1 % or more, geometric mean over the ends of the documents."""
    batch_size: int = 16
    """Number of windows, or of images or captions, per forward pass."""
    precision: Literal["fp32", "bf16", "int8", "fp8"] = "fp32"
    """Precision of the model; int8, fp8: weights of a language model in eight bits, products in bfloat16, by torchao."""
    part_characters: int = 200_000
    """Characters per part of the text. A part is measured, written and resumed as a unit."""
    key_dot: Literal["first", "last"] = "first"
    """Dot of a member's name in a tar at which the key of its sample ends: webdataset's is the first."""
    tracking: TrackingSection = field(default_factory=lambda: TrackingSection(experiment="headroom"))

    def __post_init__(self) -> None:
        self._check_data()
        TextReadingConfig.__post_init__(self)
        check_least(self, folds=3, gallery_images=3, gallery_seed=0, tokens_per_document=1, least_gain=0)
        OutputConfig.__post_init__(self)

    def _check_data(self) -> None:
        """Check that there is one kind of data, and that no field is set that only the other kind reads (ValueError)."""
        check_named(self)
        if bool(self.text) == bool(self.images):
            raise ValueError(
                f"text = {self.text!r} and images = {self.images!r}: give one of them, text for a language model, or images "
                "for an image–text model"
            )
        here, other = ("text", _OF_IMAGES) if self.text else ("images", _OF_TEXT)
        for item in fields(self):
            if item.name in other and getattr(self, item.name) != item.default:
                raise ValueError(f"{item.name} = {getattr(self, item.name)} has no meaning with {here}: leave it out")
        if self.images and self.precision in ("int8", "fp8"):
            raise ValueError(f"precision = {self.precision} is for language models: choose fp32 or bf16 with images")
        if self.images and self.workers.device_map:
            raise ValueError(
                f"workers.device_map = {self.workers.device_map} spreads language models only: leave it out with images"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardHeadroom(RewardedTexts, OutputConfig):
    """Measure what temperatures could gain of a verifier's reward over the best constant; nothing is trained.

    The interval is over prompts.
    """

    output: str = "headroom"
    """Directory or URI of headroom.json and what was measured. A repeated run measures only what is missing."""
    least_gain: float = 1.0
    """Gain of reward, in hundredths, that the verdict calls worth it if the whole interval lies above."""
    texts_per_prompt: int = 16
    """Number of texts of every prompt at each of 35 temperatures, even, at least 4."""
    tracking: TrackingSection = field(default_factory=lambda: TrackingSection(experiment="headroom"))

    def __post_init__(self) -> None:
        OutputConfig.__post_init__(self)
        check_least(self, texts_per_prompt=4, max_new_tokens=1, seed=0, limit=0, prompts_at_a_time=1, least_gain=0)
        if self.texts_per_prompt % 2:
            raise ValueError(f"texts_per_prompt = {self.texts_per_prompt} must be even: one half chooses for the other")
