"""Decoding rules: functions from the logits of a step to the distribution q that its token is drawn from.

    ConstantTemperature   τ                                             the best constant and MeanShift are such rules
    EntropyTemperature    τ = T₀·.8^(θ/H), H the entropy at τ = 1 in nats       EDT, Zhang et al., arXiv 2403.14541
    EntropyRange          τ = low + (high − low)·(H/log K)^e                    llama.cpp's dynamic temperature
    PredictedTemperature  c·τ(x) of a TempNet, c = 1 unless another level is wanted (as τ_max at inference: TempNet, §6.4)
    Warped                a warper of Transformers at some τ: top-p, min-p, top-k, typical, ε, top-H
    TopNSigma             the tokens with z ≥ max z − n·σ, σ the standard deviation of z   Tang et al., arXiv 2411.07641
    Mirostat              the tokens with −log₂ p ≤ μ; after a token with surprise s, μ ← μ − η·(s − target)
                                                                        Basu et al., arXiv 2007.14966
    Shuffled              what was predicted for another token, drawn at random: the control for "which token gets which"

The temperature comes before a truncation, as in Transformers; top-nσ keeps the same tokens at every τ. EDT and the dynamic
range raise τ with the entropy; constant-entropy decoding (mirostat, the papers' robust loss) lowers it. σ is that of the
population, and mirostat 2 (llama.cpp's `llama_sampler_init_mirostat_v2`) begins with μ at twice the target and takes the
surprise under q, in bits; the most probable token is always kept.

A rule has no side effects. What it remembers of a text (mirostat its bound) is a state with one entry per text, which the
caller passes on.

Shapes: … any leading dimensions, such as B texts or N tokens; T tokens of one text; V vocabulary, of which K tokens are not
banned; d hidden size; M pool.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessor

from tempnet.dro import at_least_float32
from tempnet.network import TempNet

# Smallest temperature that logits are divided by. Below it only the largest logits have a probability in float32.
_LEAST_TAU = 1e-6
# N of EDT, which the paper fixes, and η of mirostat.
_EDT_BASE, _MIROSTAT_RATE = 0.8, 0.1
# Multiplier and increment of the 64-bit congruential generator of Knuth (MMIX).
_MULTIPLIER, _INCREMENT = 6364136223846793005, 1442695040888963407


class Rule(ABC):
    """A decoding rule; its parameters are those of the object."""

    @property
    @abstractmethod
    def label(self) -> str:
        """Name of the rule with its parameters, for tables."""

    @abstractmethod
    def log_probabilities(self, logits: Tensor, hidden: Tensor | None = None, state: Tensor | None = None) -> Tensor:
        """Return log q (…, V) in float32, −inf for tokens that cannot be drawn.

        Args:
            logits: (…, V) logits as the model made them; −inf for tokens that do not belong to the vocabulary.
            hidden: (…, d) hidden states that the logits were computed from, for rules that read them.
            state: (…,) what :meth:`start` or :meth:`advance` returned; None for a rule without memory.
        """

    def start(self, num_texts: int, seed: int = 0) -> Tensor | None:
        """Return the state (B,) of texts that begin, or None without memory; the seed is for numbers that a rule draws."""
        return None

    def advance(self, state: Tensor | None, log_probabilities: Tensor, tokens: Tensor) -> Tensor | None:
        """Return the state (B,) after tokens (B,) were chosen under log q (B, V)."""
        return state


def teacher_forced(
    rule: Rule, logits: Tensor, tokens: Tensor, hidden: Tensor | None = None, *, seed: int = 0
) -> Tensor:
    """Return log q (T, V) of a rule for every position of one text, given the text's own tokens (T,).

    Logits are (T, V), hidden states (T, d); a rule with memory advances by the tokens, from the state of the seed.
    """
    state = rule.start(1, seed)
    if state is None:
        return rule.log_probabilities(logits, hidden)
    rows = []
    for step in range(len(tokens)):
        assert state is not None
        state, one = state.to(logits.device), slice(step, step + 1)
        rows.append(rule.log_probabilities(logits[one], None if hidden is None else hidden[one], state))
        state = rule.advance(state, rows[-1], tokens[one])
    return torch.cat(rows) if rows else logits.float()


def temper(logits: Tensor, tau: Tensor | float) -> Tensor:
    """Return log softmax(z/τ) (…, V) in float32 at least, for τ (…,) or one for all rows; τ below 1e-6 counts as 1e-6."""
    z = at_least_float32(logits)
    divisor = torch.as_tensor(tau, dtype=z.dtype, device=z.device).clamp(min=_LEAST_TAU)
    # The maximum is subtracted first, so that a small τ overflows to −inf and never to +inf.
    return torch.log_softmax((z - z.amax(-1, keepdim=True)) / divisor.unsqueeze(-1), dim=-1)


def entropy(log_probabilities: Tensor) -> Tensor:
    """Return H(q) (…,) in nats of log q (…, V)."""
    return torch.special.entr(log_probabilities.exp()).sum(-1)


def keep_only(log_probabilities: Tensor, kept: Tensor) -> Tensor:
    """Return log q (…, V) of q restricted to the tokens in `kept` (…, V) and normalised again."""
    return torch.log_softmax(log_probabilities.masked_fill(~kept, -math.inf), dim=-1)


def nucleus(log_probabilities: Tensor, share: Tensor) -> Tensor:
    """Return which tokens (…, V) top-p keeps, for a share P (…,) of every row.

    These are the tokens before which, from the most probable one, less than P of the probability lies.
    """
    ordered, order = log_probabilities.sort(dim=-1, descending=True, stable=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    # A cumulative sum may reach 1 by rounding before its last token.
    kept = (before < share.unsqueeze(-1)) | (share.unsqueeze(-1) >= 1.0)
    kept[..., 0] = True
    return torch.zeros_like(kept).scatter_(-1, order, kept)


class Temperature(Rule):
    """A rule whose distribution is softmax(z/τ)."""

    @abstractmethod
    def temperatures(self, logits: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Return τ (…,) in float32; the arguments are those of :meth:`log_probabilities`."""

    def log_probabilities(self, logits: Tensor, hidden: Tensor | None = None, state: Tensor | None = None) -> Tensor:
        return temper(logits, self.temperatures(logits, hidden))


@dataclass(frozen=True, slots=True)
class ConstantTemperature(Temperature):
    """One temperature for all tokens."""

    tau: float = 1.0

    @property
    def label(self) -> str:
        return f"τ = {self.tau:.3g}"

    def temperatures(self, logits: Tensor, hidden: Tensor | None = None) -> Tensor:
        return torch.full(logits.shape[:-1], self.tau, device=logits.device)


@dataclass(frozen=True, slots=True)
class EntropyTemperature(Temperature):
    """EDT: τ = T₀·.8^(θ/H), which tends to T₀ on open contexts and to 0 on certain ones."""

    highest: float
    """T₀, the limit of τ for large entropies."""
    theta: float
    """θ, in nats: how fast τ falls as the entropy falls."""

    @property
    def label(self) -> str:
        return f"EDT, T₀ {self.highest:.3g}, θ {self.theta:.3g}"

    def temperatures(self, logits: Tensor, hidden: Tensor | None = None) -> Tensor:
        nats = entropy(temper(logits, 1.0)).float().clamp(min=0.0)
        return self.highest * torch.exp(math.log(_EDT_BASE) * self.theta / nats)


@dataclass(frozen=True, slots=True)
class EntropyRange(Temperature):
    """llama.cpp's dynamic temperature: τ rises from `low` to `high` with a power of the entropy relative to log K."""

    low: float
    """τ of a prediction that is certain."""
    high: float
    """τ of a uniform prediction."""
    exponent: float = 1.0
    """Power of the relative entropy."""

    @property
    def label(self) -> str:
        return f"dynatemp {self.low:.3g}–{self.high:.3g}, exponent {self.exponent:.3g}"

    def temperatures(self, logits: Tensor, hidden: Tensor | None = None) -> Tensor:
        log_k = torch.isfinite(logits).sum(-1).float().log()
        # A row with a single token has H = log K = 0; any τ gives it the probability 1.
        share = entropy(temper(logits, 1.0)).float() / log_k.clamp(min=1e-12)
        return self.low + (self.high - self.low) * share.clamp(0.0, 1.0) ** self.exponent


@dataclass(frozen=True, slots=True, eq=False)
class PredictedTemperature(Temperature):
    """The temperatures of a TempNet of a language model, which is in eval mode; it raises what the network raises."""

    network: TempNet
    name: str
    """What tables call it."""
    scale: float = 1.0
    """c."""

    @property
    def label(self) -> str:
        return self.name if self.scale == 1.0 else f"{self.name}, scale {self.scale:.3g}"

    @torch.no_grad()
    def temperatures(self, logits: Tensor, hidden: Tensor | None = None) -> Tensor:
        return self.scale * self.network(logits, hidden)


@dataclass(frozen=True, slots=True, eq=False)
class Warped(Rule):
    """What one of Transformers' warpers keeps of softmax(z/τ)."""

    name: str
    """What tables call the warper and its parameter."""
    warper: LogitsProcessor
    tau: float = 1.0
    """Temperature before the warper."""

    @property
    def label(self) -> str:
        return self.name if self.tau == 1.0 else f"{self.name}, τ = {self.tau:.3g}"

    def log_probabilities(self, logits: Tensor, hidden: Tensor | None = None, state: Tensor | None = None) -> Tensor:
        whole = temper(logits, self.tau)
        rows = whole.reshape(-1, whole.shape[-1])
        # A warper of this kind does not look at the tokens so far.
        kept = self.warper(torch.empty(len(rows), 0, dtype=torch.long, device=rows.device), rows)
        return torch.log_softmax(kept, dim=-1).view_as(whole)


@dataclass(frozen=True, slots=True)
class TopNSigma(Rule):
    """Truncation by the distance from the largest logit, in standard deviations of the row's logits."""

    num_sigma: float
    """n."""
    tau: float = 1.0
    """Temperature of the tokens that are kept."""

    @property
    def label(self) -> str:
        return f"top-nσ {self.num_sigma:.3g}" + ("" if self.tau == 1.0 else f", τ = {self.tau:.3g}")

    def log_probabilities(self, logits: Tensor, hidden: Tensor | None = None, state: Tensor | None = None) -> Tensor:
        z = logits.float()
        known = torch.isfinite(z)
        number = known.sum(-1, keepdim=True)
        centred = (z - z.where(known, 0.0).sum(-1, keepdim=True) / number).where(known, 0.0)
        sigma = (centred.square().sum(-1, keepdim=True) / number).sqrt()
        return keep_only(temper(logits, self.tau), z >= z.amax(-1, keepdim=True) - self.num_sigma * sigma)


@dataclass(frozen=True, slots=True)
class Mirostat(Rule):
    """Mirostat 2: a bound on the surprise of a token that is steered so that surprises have a wanted mean.

    Its state is μ; a given token that could not be drawn counts as one at the bound.
    """

    target: float
    """Wanted mean surprise, in bits."""

    @property
    def label(self) -> str:
        return f"mirostat 2, {self.target:.3g} bits"

    def start(self, num_texts: int, seed: int = 0) -> Tensor:
        return torch.full((num_texts,), 2.0 * self.target)

    def advance(self, state: Tensor | None, log_probabilities: Tensor, tokens: Tensor) -> Tensor:
        assert state is not None
        surprise = -log_probabilities.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) / math.log(2.0)
        return state - _MIROSTAT_RATE * (surprise.where(surprise.isfinite(), state) - self.target)

    def log_probabilities(self, logits: Tensor, hidden: Tensor | None = None, state: Tensor | None = None) -> Tensor:
        assert state is not None, "mirostat has a state: see start"
        whole = temper(logits, 1.0)
        kept = whole >= -state.unsqueeze(-1) * math.log(2.0)
        return keep_only(whole, kept.scatter(-1, whole.argmax(-1, keepdim=True), True))


@dataclass(frozen=True, slots=True, eq=False)
class Shuffled(Rule):
    """The predictions of a learned rule in random order: each token gets those of another one, whatever its context.

    Its state is the number of a 64-bit congruential generator, whose upper bits choose from the pool.
    """

    pool: Tensor
    """(M,) temperatures of at least one token."""
    name: str
    """Name of the rule that predicted them."""
    shares: Tensor | None = None
    """(M,) top-p that were predicted with the temperatures; None for a rule that truncates nothing."""

    @property
    def label(self) -> str:
        return f"{self.name}, shuffled"

    def start(self, num_texts: int, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(-(2**63), 2**63 - 1, (num_texts,), generator=generator)

    def advance(self, state: Tensor | None, log_probabilities: Tensor, tokens: Tensor) -> Tensor:
        assert state is not None
        return state * _MULTIPLIER + _INCREMENT  # integers wrap around

    def places(self, state: Tensor) -> Tensor:
        """Return which entries (B,) of the pool a state (B,) chooses."""
        # The upper 31 bits; the lower ones of such a generator have short periods.
        return ((state >> 33) & (2**31 - 1)) % len(self.pool)

    def log_probabilities(self, logits: Tensor, hidden: Tensor | None = None, state: Tensor | None = None) -> Tensor:
        assert state is not None, "shuffled predictions have a state: see start"
        places = self.places(state)
        whole = temper(logits, self.pool.to(logits.device)[places])
        if self.shares is None:
            return whole
        return keep_only(whole, nucleus(whole, self.shares.to(logits.device)[places]))
