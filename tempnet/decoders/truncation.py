"""Rules that leave out improbable tokens: top-p, min-p, top-nσ and mirostat 2.

With p = softmax(z/τ):

    TopP        the fewest most probable tokens whose p add up to at least P     Holtzman et al., arXiv 1904.09751
    MinP        the tokens with p ≥ m·max p                                      Nguyen et al., arXiv 2407.01082
    TopNSigma   the tokens with z ≥ max z − n·σ, σ the standard deviation of z   Tang et al., arXiv 2411.07641
    Mirostat    the tokens with −log₂ p ≤ μ; after a token with surprise s, μ ← μ − η·(s − target)
                                                                                  Basu et al., arXiv 2007.14966

The temperature comes first, as in Transformers; top-nσ keeps the same tokens at every τ. σ is that of the population, as in
llama.cpp; some implementations divide by V − 1. Mirostat 2 is llama.cpp's (`llama_sampler_init_mirostat_v2`): μ begins
at twice the target, everything is in bits, and s is the surprise under q, the distribution that is left and normalised. The
most probable token is always kept.

Shapes: those of `tempnet.decoders.rule`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tempnet.decoders.rule import Rule, check_positive, keep_only, temper


def nucleus(log_probabilities: Tensor, share: Tensor | float) -> Tensor:
    """Return which tokens (…, V) top-p keeps: those before which less than `share` of the probability lies.

    Args:
        log_probabilities: (…, V).
        share: P, (…,) or one for all rows; 1 keeps all tokens.
    """
    ordered, order = log_probabilities.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.exp()
    before = probabilities.cumsum(-1) - probabilities
    least = torch.as_tensor(share, dtype=before.dtype, device=before.device).unsqueeze(-1)
    # A cumulative sum may reach 1 by rounding before its last token.
    kept = (before < least) | (least >= 1.0)
    kept[..., 0] = True
    return torch.zeros_like(kept).scatter_(-1, order, kept)


@dataclass(frozen=True, slots=True)
class TopP(Rule):
    """Nucleus sampling.

    Raises:
        ValueError: if P is not in (0, 1], or τ is not positive.
    """

    share: float
    """P, the share of the probability that is kept at least."""
    tau: float = 1.0
    """Temperature before the truncation."""

    def __post_init__(self) -> None:
        check_positive("tau", self.tau)
        if not 0.0 < self.share <= 1.0:
            raise ValueError(f"share = {self.share:g} must lie in (0, 1]")

    @property
    def label(self) -> str:
        """Name and parameters."""
        return f"top-p {self.share:.3g}{_at(self.tau)}"

    def log_probabilities(self, logits: Tensor, hidden: Tensor | None = None, state: Tensor | None = None) -> Tensor:
        """See :meth:`Rule.log_probabilities`."""
        whole = temper(logits, self.tau)
        return keep_only(whole, nucleus(whole, self.share))


@dataclass(frozen=True, slots=True)
class MinP(Rule):
    """Truncation relative to the most probable token.

    Raises:
        ValueError: if m is not in [0, 1], or τ is not positive.
    """

    ratio: float
    """m, the least ratio to the largest probability; 0 keeps all tokens."""
    tau: float = 1.0
    """Temperature before the truncation."""

    def __post_init__(self) -> None:
        check_positive("tau", self.tau)
        if not 0.0 <= self.ratio <= 1.0:
            raise ValueError(f"ratio = {self.ratio:g} must lie in [0, 1]")

    @property
    def label(self) -> str:
        """Name and parameters."""
        return f"min-p {self.ratio:.3g}{_at(self.tau)}"

    def log_probabilities(self, logits: Tensor, hidden: Tensor | None = None, state: Tensor | None = None) -> Tensor:
        """See :meth:`Rule.log_probabilities`."""
        whole = temper(logits, self.tau)
        if self.ratio == 0.0:
            return whole
        return keep_only(whole, whole >= whole.amax(-1, keepdim=True) + math.log(self.ratio))


@dataclass(frozen=True, slots=True)
class TopNSigma(Rule):
    """Truncation by the distance from the largest logit, in standard deviations of the row's logits.

    Raises:
        ValueError: if n or τ is not positive.
    """

    num_sigma: float
    """n."""
    tau: float = 1.0
    """Temperature of the tokens that are kept."""

    def __post_init__(self) -> None:
        check_positive("num_sigma", self.num_sigma)
        check_positive("tau", self.tau)

    @property
    def label(self) -> str:
        """Name and parameters."""
        return f"top-nσ {self.num_sigma:.3g}{_at(self.tau)}"

    def log_probabilities(self, logits: Tensor, hidden: Tensor | None = None, state: Tensor | None = None) -> Tensor:
        """See :meth:`Rule.log_probabilities`."""
        z = logits.float()
        known = torch.isfinite(z)
        number = known.sum(-1, keepdim=True)
        centred = (z - z.where(known, 0.0).sum(-1, keepdim=True) / number).where(known, 0.0)
        sigma = (centred.square().sum(-1, keepdim=True) / number).sqrt()
        return keep_only(temper(logits, self.tau), z >= z.amax(-1, keepdim=True) - self.num_sigma * sigma)


@dataclass(frozen=True, slots=True)
class Mirostat(Rule):
    """Mirostat 2: a bound on the surprise of a token that is steered so that surprises have a wanted mean.

    Raises:
        ValueError: if the target or η is not positive.
    """

    target: float
    """Wanted mean surprise, in bits."""
    rate: float = 0.1
    """η, the step of the bound."""

    def __post_init__(self) -> None:
        check_positive("target", self.target)
        check_positive("rate", self.rate)

    @property
    def label(self) -> str:
        """Name and target."""
        return f"mirostat 2, {self.target:.3g} bits"

    def start(self, num_texts: int, seed: int = 0) -> Tensor:
        """Return μ = twice the target for every text."""
        return torch.full((num_texts,), 2.0 * self.target)

    def advance(self, state: Tensor | None, log_probabilities: Tensor, tokens: Tensor) -> Tensor:
        """Return μ (B,) after the tokens; a given token that could not be drawn counts as one at the bound."""
        assert state is not None
        surprise = -log_probabilities.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) / math.log(2.0)
        return state - self.rate * (surprise.where(surprise.isfinite(), state) - self.target)

    def log_probabilities(self, logits: Tensor, hidden: Tensor | None = None, state: Tensor | None = None) -> Tensor:
        """See :meth:`Rule.log_probabilities`."""
        assert state is not None, "mirostat has a state: see start"
        whole = temper(logits, 1.0)
        kept = whole >= -state.unsqueeze(-1) * math.log(2.0)
        return keep_only(whole, kept.scatter(-1, whole.argmax(-1, keepdim=True), True))


def _at(tau: float) -> str:
    return "" if tau == 1.0 else f", τ = {tau:.3g}"
