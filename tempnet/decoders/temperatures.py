"""Rules that divide the logits by a temperature: a constant, a function of the entropy, or a predicted one.

    ConstantTemperature   τ                                             the best constant and MeanShift are such rules
    EntropyTemperature    τ = T₀·N^(θ/H), H the entropy at τ = 1 in nats, N = 0.8      EDT, Zhang et al., arXiv 2403.14541
    EntropyRange          τ = low + (high − low)·(H/log V)^e                           llama.cpp's dynamic temperature
    PredictedTemperature  c·τ(x) of a TempNet, c = 1 unless another level is wanted (as τ_max at inference: TempNet, §6.4)
    Shuffled              a τ that was predicted for another token, drawn at random: the control for "which token gets which"

EDT and the dynamic range raise τ with the entropy; constant-entropy decoding (mirostat, the papers' robust loss) lowers it.
llama.cpp has the range as a sampler (`llama_sampler_init_temp_ext`, low = max(0, temperature − range)); after other
samplers it replaces V by the number of tokens that they left, and here it is alone.

Shapes: those of `tempnet.decoders.rule`; M temperatures of a pool.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from tempnet.decoders.rule import Rule, check_positive, entropy, keep_only, temper
from tempnet.decoders.truncation import nucleus
from tempnet.network import TempNet

# Multiplier and increment of the 64-bit congruential generator of Knuth (MMIX).
_MULTIPLIER, _INCREMENT = 6364136223846793005, 1442695040888963407


class Temperature(Rule):
    """A rule whose distribution is softmax(z/τ)."""

    @abstractmethod
    def temperatures(self, logits: Tensor, hidden: Tensor | None = None, state: Tensor | None = None) -> Tensor:
        """Return τ (…,) in float32; the arguments are those of :meth:`log_probabilities`."""

    def log_probabilities(self, logits: Tensor, hidden: Tensor | None = None, state: Tensor | None = None) -> Tensor:
        """Return log softmax(z/τ) (…, V); see :meth:`Rule.log_probabilities`."""
        return temper(logits, self.temperatures(logits, hidden, state))


@dataclass(frozen=True, slots=True)
class ConstantTemperature(Temperature):
    """One temperature for all tokens.

    Raises:
        ValueError: if it is not positive.
    """

    tau: float = 1.0

    def __post_init__(self) -> None:
        check_positive("tau", self.tau)

    @property
    def label(self) -> str:
        """Name and temperature."""
        return f"τ = {self.tau:.3g}"

    def temperatures(self, logits: Tensor, hidden: Tensor | None = None, state: Tensor | None = None) -> Tensor:
        """Return τ for every row."""
        return torch.full(logits.shape[:-1], self.tau, device=logits.device)


@dataclass(frozen=True, slots=True)
class EntropyTemperature(Temperature):
    """EDT: τ = T₀·N^(θ/H), which tends to T₀ on open contexts and to 0 on certain ones.

    Raises:
        ValueError: if T₀ or θ is not positive, or N is not in (0, 1).
    """

    highest: float
    """T₀, the limit of τ for large entropies."""
    theta: float
    """θ, in nats: how fast τ falls as the entropy falls."""
    base: float = 0.8
    """N; the paper fixes it at 0.8."""

    def __post_init__(self) -> None:
        check_positive("highest", self.highest)
        check_positive("theta", self.theta)
        if not 0.0 < self.base < 1.0:
            raise ValueError(f"base = {self.base:g} must lie in (0, 1)")

    @property
    def label(self) -> str:
        """Name and parameters."""
        return f"EDT, T₀ {self.highest:.3g}, θ {self.theta:.3g}"

    def temperatures(self, logits: Tensor, hidden: Tensor | None = None, state: Tensor | None = None) -> Tensor:
        """Return T₀·N^(θ/H), 0 where the entropy is 0."""
        nats = entropy(temper(logits, 1.0)).float().clamp(min=0.0)
        return self.highest * torch.exp(math.log(self.base) * self.theta / nats)


@dataclass(frozen=True, slots=True)
class EntropyRange(Temperature):
    """llama.cpp's dynamic temperature: τ rises from `low` to `high` with a power of the entropy relative to log V.

    Raises:
        ValueError: if 0 ≤ low ≤ high does not hold, high is 0, or the exponent is not positive.
    """

    low: float
    """τ of a prediction that is certain."""
    high: float
    """τ of a uniform prediction."""
    exponent: float = 1.0
    """Power of the relative entropy."""

    def __post_init__(self) -> None:
        check_positive("high", self.high)
        check_positive("exponent", self.exponent)
        if not 0.0 <= self.low <= self.high:
            raise ValueError(f"low = {self.low:g} must lie in [0, high = {self.high:g}]")

    @property
    def label(self) -> str:
        """Name and parameters."""
        return f"dynatemp {self.low:.3g}–{self.high:.3g}, exponent {self.exponent:.3g}"

    def temperatures(self, logits: Tensor, hidden: Tensor | None = None, state: Tensor | None = None) -> Tensor:
        """Return low + (high − low)·(H/log K)^e with K the number of tokens of the row that are not banned."""
        log_k = torch.isfinite(logits).sum(-1).float().log()
        # A row with a single token has H = log K = 0; any τ gives it the probability 1.
        share = entropy(temper(logits, 1.0)).float() / log_k.clamp(min=1e-12)
        return self.low + (self.high - self.low) * share.clamp(0.0, 1.0) ** self.exponent


class PredictedTemperature(Temperature):
    """The temperatures of a TempNet.

    Args:
        network: the network, which is put into eval mode.
        name: what tables call it.
        scale: c.

    Raises:
        ValueError: if the network reads embeddings, or the scale is not positive.
    """

    def __init__(self, network: TempNet, name: str, scale: float = 1.0) -> None:
        check_positive("scale", scale)
        if network.config.kind == "embeddings":
            raise ValueError(f"{name} reads embeddings, not what a language model predicts a token from")
        self.network, self.name, self.scale = network.eval(), name, scale

    @property
    def label(self) -> str:
        """The given name, with the scale if it is not 1."""
        return self.name if self.scale == 1.0 else f"{self.name}, scale {self.scale:.3g}"

    @torch.no_grad()
    def temperatures(self, logits: Tensor, hidden: Tensor | None = None, state: Tensor | None = None) -> Tensor:
        """Return c·τ(x).

        Raises:
            ValueError: if the vocabulary is another one, or the network reads hidden states and there are none.
        """
        return self.scale * self.network(logits, hidden)


@dataclass(frozen=True, slots=True, eq=False)
class Shuffled(Rule):
    """The predictions of a learned rule in random order: each token gets those of another one, whatever its context.

    Its state is the 64-bit number of a congruential generator for each text, whose upper bits choose from the pool. So what
    the tokens of a text get depends on seed and position alone.

    Raises:
        ValueError: if the pool is empty, or the two pools differ in length.
    """

    pool: Tensor
    """(M,) temperatures."""
    name: str
    """Name of the rule that predicted them."""
    shares: Tensor | None = None
    """(M,) top-p that were predicted with the temperatures; None for a rule that truncates nothing."""

    def __post_init__(self) -> None:
        if not len(self.pool):
            raise ValueError("pool is empty: it must hold the temperatures of at least one token")
        if self.shares is not None and len(self.shares) != len(self.pool):
            raise ValueError(f"shares holds {len(self.shares)} values, and pool {len(self.pool)}")

    @property
    def label(self) -> str:
        """Name of the rule whose predictions these are."""
        return f"{self.name}, shuffled"

    def start(self, num_texts: int, seed: int = 0) -> Tensor:
        """Return the first numbers of B generators."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(-(2**63), 2**63 - 1, (num_texts,), generator=generator)

    def advance(self, state: Tensor | None, log_probabilities: Tensor, tokens: Tensor) -> Tensor:
        """Return the next number of every generator; integers wrap around."""
        assert state is not None
        return state * _MULTIPLIER + _INCREMENT

    def places(self, state: Tensor) -> Tensor:
        """Return which entries (B,) of the pool a state (B,) chooses."""
        # The upper 31 bits; the lower ones of such a generator have short periods.
        return ((state >> 33) & (2**31 - 1)) % len(self.pool)

    def log_probabilities(self, logits: Tensor, hidden: Tensor | None = None, state: Tensor | None = None) -> Tensor:
        """See :meth:`Rule.log_probabilities`."""
        assert state is not None, "shuffled predictions have a state: see start"
        places = self.places(state)
        whole = temper(logits, self.pool.to(logits.device)[places])
        if self.shares is None:
            return whole
        return keep_only(whole, nucleus(whole, self.shares.to(logits.device)[places]))
