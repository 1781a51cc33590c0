"""The configuration, that is, the command line, of `jobs.analyse decoders`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jobs.scoring.analyses.config import Analysis
from jobs.scoring.config import PoolSection, check_least, check_share


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
    """Directories, URIs or hub names of TempNets to compare beside those that the job trains. Default: the one in the
    directory of the model, if there is one."""
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
        check_least(
            self,
            num_samples=2,
            max_new_tokens=2,
            prompt_tokens=1,
            max_prompts=0,
            max_documents=0,
            tokens_per_document=2,
            num_steps=1,
            k=1,
            batch_size=1,
        )
        check_share("max_bad_share", self.max_bad_share)
        if self.k > self.num_samples:
            raise ValueError(f"k = {self.k} must be at most num_samples = {self.num_samples}")
        if self.format != "text" and not self.prompts:
            raise ValueError(f"format = {self.format} needs prompts: the beginnings of documents have no answer")
