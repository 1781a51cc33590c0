"""The configurations, that is, the command lines, of `jobs.analyse`."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Literal

from jobs.engine.config import TrackingSection
from jobs.engine.fields import find_duplicate
from jobs.scoring.config import LanguageModelPool, OutputConfig, PoolSection, check_least, check_share


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis(OutputConfig):
    """Where the results of an analysis go."""

    tracking: TrackingSection = field(default_factory=lambda: TrackingSection(experiment="analyses"))

    def __post_init__(self) -> None:
        OutputConfig.__post_init__(self)
        for name in ("runs", "models"):  # one that counted twice would narrow the interval over seeds
            if again := find_duplicate(path.rstrip("/") for path in getattr(self, name, ())):
                raise ValueError(f"{name} names {again!r} twice")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextAnalysis(Analysis):
    """The language model and the texts of an analysis of groups of texts."""

    model: str
    """Directory, URI or hub name of a Transformers causal LM, such as an export of `train_lm`."""
    tempnet: str = ""
    """Directory, URI or hub name of the TempNet. Default: `tempnet/` in the directory of the model."""
    data: str
    """The records; a path or URI."""
    context_length: int = 0
    """Number of positions that the model reads at once. 0: all that it was built for."""
    batch_size: int = 16
    """Number of windows per forward pass."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision in which the base model runs. TempNet and τ are float32."""
    max_bad_share: float = 0.01
    """Largest share of records, in [0, 1], that may be unreadable before the job fails."""
    workers: LanguageModelPool = field(default_factory=LanguageModelPool)

    def __post_init__(self) -> None:
        Analysis.__post_init__(self)
        check_least(self, batch_size=1, context_length=0)
        check_share("max_bad_share", self.max_bad_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subjectivity(TextAnalysis):
    """Compare the mean τ of questions and answers with how subjective they are (SubjQA; TempNet, Figure 6 left).

    `data` is a CSV file of SubjQA, or a directory that is searched for them. Records without an answer are left out.
    """

    by: Literal["question", "answer"] = "question"
    """Whose subjectivity makes the five groups: 1 is the most subjective in the files, and 5 the least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instructions(TextAnalysis):
    """Compare the mean τ of instructions and answers by the verb that they begin with (TempNet, Figure 6 right).

    `data` is a JSON file with a list of Alpaca's records: `instruction`, `input` and `output`. The paper finds the root verb
    with a parser; here it is the first word. Instructions that begin with another kind of word are left out.
    """

    num_verbs: int = 20
    """Number of most frequent verbs that make a group."""

    def __post_init__(self) -> None:
        TextAnalysis.__post_init__(self)
        check_least(self, num_verbs=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Openness(Analysis):
    """Show how τ comes to follow the openness of a context along the training of a language model.

    The openness of a context is the entropy of its next token at τ = 1; shown is Spearman's rank correlation of τ with it at
    every validation.
    """

    runs: tuple[str, ...]
    """Directories or URIs of finished runs of `train_lm` that differ by their seed only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TauMax(Analysis):
    """Compare perplexities of a text at several values of τ_max at inference (TempNet, Figure 9)."""

    models: tuple[str, ...]
    """Directories, URIs or hub names of language models with TempNets that differ by the seed of their training only."""
    wikitext: str
    """Text file; WikiText headings `= Title =` split it into documents."""
    tau_max: tuple[float, ...] = (0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0)
    """The values of τ_max, which rescale all temperatures of a TempNet."""
    batch_size: int = 8
    """Number of sequences per forward pass."""
    workers: LanguageModelPool = field(default_factory=LanguageModelPool)

    def __post_init__(self) -> None:
        Analysis.__post_init__(self)
        check_least(self, batch_size=1)
        values = self.tau_max
        is_rising = all(low < high for low, high in itertools.pairwise(values))
        if len(values) < 2 or not is_rising or not all(0.0 < value < math.inf for value in values):
            text = " ".join(f"{value:g}" for value in values)
            raise ValueError(f"tau_max = {text} must be at least two rising positive numbers")


@dataclass(frozen=True, slots=True, kw_only=True)
class PairAnalysis(Analysis):
    """The image–text pairs of an analysis."""

    images: str
    """Archives or a directory of images with captions, as for `predict_temperatures`."""
    label: str
    """Field with a number in the JSON files beside the images, such as `concept_frequency` of the sample data."""
    batch_size: int = 64
    """Number of images, or of captions, per forward pass."""
    workers: PoolSection = field(default_factory=PoolSection)

    def __post_init__(self) -> None:
        Analysis.__post_init__(self)
        check_least(self, batch_size=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase(PairAnalysis):
    """Compare the rank correlation of τ with a number beside the images, such as the frequency of a concept, over ρ.

    Where ρ is small, frequent concepts get a high τ; beyond log(K − 1) for K contrasts that are equally close, the lowest
    (docs/method.md).
    """

    sweep: str
    """Directory or URI of a sweep of `temperature.rho` over dual encoders, made by `jobs.sweep`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise(PairAnalysis):
    """Compare the temperatures of pairs whose captions are as they were with those of pairs whose captions got noise.

    In a noisy caption one word is deleted or replaced by the word "random" (TempNet, §6, Figure 8).
    """

    model: str
    """Directory or URI of a dual encoder with its TempNets, such as an export of `train_clip`."""
    label: str
    """Field with a number in the JSON files beside the images; noisy pairs above its median make a group of their own."""
    share: float = 0.15
    """Probability, in (0, 1), that a caption gets noise."""
    seed: int = 42
    """Seed of the noise; with the seed and the share of a training run on the same images the noise is the same."""

    def __post_init__(self) -> None:
        PairAnalysis.__post_init__(self)
        check_least(self, seed=0)
        if not 0.0 < self.share < 1.0:
            raise ValueError(f"share = {self.share:g} must lie in (0, 1)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoders(Analysis):
    """Compare decoders: likelihood and calibration on text, quality and diversity of what they write for prompts.

    One half of the documents and prompts chooses the parameters of every decoder and trains the learned ones. All figures
    come from the other half.
    """

    model: str
    """Directory, URI or hub name of a Transformers causal LM, such as an export of `train_lm`."""
    text: str
    """Text that the model was not trained on: an archive or plain text, or a directory of these; a path or URI."""
    prompts: str = ""
    """The prompts to continue; a path or URI. Default: the beginnings of the documents of `text`."""
    format: Literal["text", "gsm8k"] = "text"
    """Format of the prompts, as in `jobs.generate`. gsm8k has a verifier: then answers are checked too."""
    tempnets: tuple[str, ...] = ()
    """Directories, URIs or hub names of further TempNets. Default: the one in the directory of the model, if any."""
    num_samples: int = 8
    """Number of texts for every prompt."""
    max_new_tokens: int = 64
    """Maximum number of new tokens per text."""
    prompt_tokens: int = 16
    """Number of tokens of a document that make a prompt, if no prompts are given."""
    max_prompts: int = 64
    """Maximum number of prompts, half of which choose; 0: all."""
    max_documents: int = 200
    """Maximum number of documents read from each archive; 0: all."""
    tokens_per_document: int = 256
    """Number of tokens of a document that are scored, from its beginning; at most the context of the model."""
    num_steps: int = 300
    """Number of training steps of each of the networks that the job trains."""
    k: int = 4
    """k of pass@k and maj@k, in texts of τ = 1: a decoder whose texts are twice as long gets half as many."""
    seed: int = 0
    """Seed of the trained networks and of the texts. All decoders use the same random numbers."""
    batch_size: int = 8
    """Number of prompts, or of documents, that the model reads at once."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision in which the model runs."""
    text_field: str = "text"
    """Name of the field or column that contains the text."""
    max_bad_share: float = 0.01
    """Largest share of records, in [0, 1], that may be unreadable before the job fails."""
    workers: PoolSection = field(default_factory=PoolSection)

    def __post_init__(self) -> None:
        super(Decoders, self).__post_init__()
        check_least(self, num_samples=2, max_new_tokens=2, tokens_per_document=2, max_prompts=0, max_documents=0)
        check_least(self, prompt_tokens=1, num_steps=1, k=1, batch_size=1)
        check_share("max_bad_share", self.max_bad_share)
        if self.k > self.num_samples:
            raise ValueError(f"k = {self.k} must be at most num_samples = {self.num_samples}")
        if self.format != "text" and not self.prompts:
            raise ValueError(f"format = {self.format} needs prompts: the beginnings of documents have no answer")
