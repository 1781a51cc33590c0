"""Configuration of a TempNet: sizes, output range and ablation switches, with the papers' defaults.

The formulas that the fields belong to are in the docstring of `tempnet.network`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from tempnet.rho import check_rho

Config = TypeVar("Config", bound=Any)
PublishedHead = Literal["llama2", "llama1", "gpt2"]
# τ₀, τ_max and the input shift of the networks that the paper's authors trained. Their LLaMA-2 code passes logits
# minus their maximum to the network, both in training (`vocab_parallel_cross_entropy_temp`) and in generation; the
# others pass raw logits.
_PUBLISHED_HEADS: dict[PublishedHead, dict[str, Any]] = {
    "llama2": {"tau_min": 0.01, "tau_max": 1.2, "input_shift": "max"},
    "llama1": {"tau_min": 0.01, "tau_max": 2.0, "input_shift": "none"},
    "gpt2": {"tau_min": 0.5, "tau_max": 5.0, "input_shift": "none"},
}
_LEGAL: dict[str, tuple[Any, ...]] = {
    "kind": ("logits", "embeddings", "hidden", "both"),
    "input_shift": ("none", "mean", "max"),
    "pooling": ("parametric", "linear"),
    "activation": ("sigmoid", "relu"),
    "depth": (3, 4),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TempNetOptions:
    """Sizes and ablation switches of a TempNet: what the configuration of a training run lets its user choose."""

    hidden_size: int = 256
    """d1, the width of the TempNet's transform layer."""
    num_prototypes: int = 256
    """d2, the width of the TempNet's projection layer."""
    phi_init: float = 1.0
    """Initial value of φ, the temperature inside the TempNet's pooling layer. The parameter is log φ, so that φ stays
    positive."""
    input_shift: Literal["none", "mean", "max"] = "none"
    """What is subtracted from the logits before the TempNet reads them. none: nothing, as in the paper. mean: the mean of
    the row, which makes τ independent of a constant added to all logits and costs nothing, because it folds into the
    output weight. max: the maximum of the row, as in the training of the published LLaMA-2-Chat networks. A TempNet that
    reads embeddings accepts only none."""
    normalize_input: bool = True
    """Whether the TempNet divides its input by the L2 norm (ablation: Table 20)."""
    transform: bool = True
    """Whether the TempNet has the transform layer (ablation: Tables 19 and 20)."""
    projection: bool = True
    """Whether the TempNet has the projection layer (ablation: Tables 19 and 20)."""
    pooling: Literal["parametric", "linear"] = "parametric"
    """Pooling of the TempNet: parametrised, as in the paper, or one linear layer instead, s = (1/ρ)·[Σ_k w_k·u_k/d2 + b]
    (ablation: Tables 19 and 20)."""
    depth: Literal[3, 4] = 3
    """Depth of the TempNet; 4 adds a second transform layer (ablation: Tables 21 and 22)."""
    stop_gradient: bool = True
    """Whether the TempNet's input is detached, so that no gradient reaches the base model through it (ablation: Table 18)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TempNetConfig(TempNetOptions):
    """Input, output range, sizes and ablation switches of a TempNet; :meth:`for_logits` and others have the papers' defaults.

    A field outside its range, or fields that contradict each other, raise ValueError.
    """

    kind: Literal["logits", "embeddings", "hidden", "both"]
    """Input of the network: the logits of a language model, the embedding of an image or a text, the hidden state that a
    language model computes its logits from, or both logits and hidden state."""
    input_size: int
    """Input size d0: the effective vocabulary of a language model, whatever is read of it, or the dimension of the
    embedding."""
    state_size: int = 0
    """Dimension d of the hidden state, for kinds that read it; 0 for others."""
    rho: float
    """ρ of the robust loss, in nats; it also scales the pooling (with ρ = 0 the pooling is not scaled)."""
    tau_min: float = 0.001
    """Lower end τ₀ of the output range (exclusive)."""
    tau_max: float
    """Upper end τ_max of the output range in training (exclusive)."""
    tau_max_eval: float | None = None
    """τ_max at inference, which rescales the mean temperature (§6.4, Figure 9); None: the same as tau_max."""
    projection_bias: bool = False
    """Whether the projection has a bias (the published LLaMA-2 networks have one; the paper's formula has none)."""
    pool_by_rho: bool = True
    """Whether to divide the pooled score by ρ (the published LLaMA-2 networks do not)."""
    activation: Literal["sigmoid", "relu"] = "sigmoid"
    """Nonlinearity of the transform (AutoDeco's temperature heads have relu)."""
    dropout: float = 0.0
    """Dropout probability after the transform, in training only (the published LLaMA-2 networks: 0.5)."""

    @property
    def inference_tau_max(self) -> float:
        """τ_max outside training: `tau_max_eval`, or `tau_max` where it is None."""
        return self.tau_max if self.tau_max_eval is None else self.tau_max_eval

    def __post_init__(self) -> None:
        for name in ("input_size", "hidden_size", "num_prototypes"):
            if getattr(self, name) < 1:
                raise ValueError(f"TempNetConfig.{name} = {getattr(self, name)} must be at least 1")
        for name, legal in _LEGAL.items():
            if getattr(self, name) not in legal:
                raise ValueError(f"TempNetConfig.{name} = {getattr(self, name)!r} is none of {legal}")
        if self.reads_state != (self.state_size > 0):
            raise ValueError(
                f"TempNetConfig.state_size = {self.state_size} must be the dimension of the hidden state if kind is hidden "
                f"or both, and 0 for kind = {self.kind!r}"
            )
        if self.reads_state and not (self.transform and self.stop_gradient):
            raise ValueError(
                f"TempNetConfig.kind = {self.kind!r} needs transform = True and stop_gradient = True: a hidden state is read "
                "by the first layer only, without a gradient"
            )
        if self.input_shift != "none" and not self.reads_logits:
            raise ValueError(
                f"TempNetConfig.input_shift = {self.input_shift!r} shifts logits; a network on {self.kind} takes 'none' only"
            )
        if self.depth == 4 and not self.transform:
            raise ValueError("TempNetConfig.depth = 4 adds a second transform: it needs transform = True")
        if not 0.0 < self.tau_min < self.tau_max:
            raise ValueError(f"TempNetConfig: 0 < tau_min < tau_max does not hold: {self.tau_min:g}, {self.tau_max:g}")
        if self.tau_max_eval is not None and not self.tau_min < self.tau_max_eval < math.inf:
            raise ValueError(
                f"TempNetConfig.tau_max_eval = {self.tau_max_eval:g} is not above tau_min {self.tau_min:g} and finite"
            )
        if not self.phi_init > 0.0:
            raise ValueError(f"TempNetConfig.phi_init = {self.phi_init:g} must be positive")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"TempNetConfig.dropout = {self.dropout:g} must lie in [0, 1)")
        if self.projection_bias and not (self.projection and self.kind != "embeddings"):
            raise ValueError("TempNetConfig.projection_bias = True needs the projection of a language model's network")
        if not (self.rho >= 0.0 and math.isfinite(self.rho)):
            raise ValueError(f"TempNetConfig.rho = {self.rho:g} must be finite and not negative")
        if self.kind != "embeddings" and self.pool_by_rho:
            check_rho(self.rho, self.input_size)

    @property
    def reads_logits(self) -> bool:
        """Whether the network reads the logits of a language model."""
        return self.kind in ("logits", "both")

    @property
    def reads_state(self) -> bool:
        """Whether the network reads the hidden state of a language model."""
        return self.kind in ("hidden", "both")

    @classmethod
    def for_logits(cls, vocab_size: int, *, rho: float = 10.0, tau_max: float = 2.0, **changes: Any) -> TempNetConfig:
        """Return the configuration of a TempNet on the logits of a language model (TempNet §6.1: ρ = 10, τ_max = 2).

        `vocab_size` is the *effective* vocabulary of the model, without padding, and ρ is in nats.
        """
        return cls(kind="logits", input_size=vocab_size, **{"rho": rho, "tau_max": tau_max, **changes})

    @classmethod
    def for_hidden(
        cls,
        vocab_size: int,
        state_size: int,
        *,
        with_logits: bool,
        rho: float = 10.0,
        tau_max: float = 2.0,
        **changes: Any,
    ) -> TempNetConfig:
        """Return the configuration of a TempNet on hidden states of dimension d, with the logits or without.

        `vocab_size` and ρ are those of :meth:`for_logits`.
        """
        kind: Literal["both", "hidden"] = "both" if with_logits else "hidden"
        fields = {"rho": rho, "tau_max": tau_max, **changes}
        return cls(kind=kind, input_size=vocab_size, state_size=state_size, **fields)

    @classmethod
    def released(
        cls, vocab_size: int, *, head: PublishedHead = "llama2", hidden_size: int = 256, num_prototypes: int = 256
    ) -> TempNetConfig:
        """Return the configuration of the authors' networks: projection with bias, dropout, no 1/ρ (so ρ is unused).

        The head is "llama2" for the published LLaMA-2-Chat networks, with τ in (0.01, 1.2), on logits minus their maximum;
        "llama1" with τ in (0.01, 2) or "gpt2" with τ in (0.5, 5), both on raw logits.
        """
        return cls.for_logits(
            vocab_size,
            hidden_size=hidden_size,
            num_prototypes=num_prototypes,
            projection_bias=True,
            pool_by_rho=False,
            dropout=0.5,
            **_PUBLISHED_HEADS[head],
        )

    @classmethod
    def for_embeddings(cls, dim: int, *, rho: float = 8.0, tau_max: float = 0.05, **changes: Any) -> TempNetConfig:
        """Return the configuration of a TempNet on L2-normalised embeddings (TempNet §6.2: ρ ≈ 8 nats, τ_max = 0.05)."""
        return cls(kind="embeddings", input_size=dim, **{"rho": rho, "tau_max": tau_max, "phi_init": 0.01, **changes})


def read_fields(kind: type[Config], path: Path) -> Config:
    """Read the fields of a dataclass from a JSON file; another file, or unknown fields, raise ValueError."""
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in read_json(path).items()}
    if unknown := sorted(set(values) - {field.name for field in fields(kind)}):
        raise ValueError(f"{path}: unknown fields {unknown}; was it written by a newer version?")
    return kind(**values)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds; ValueError, which names the file, if it holds something else."""
    try:
        return dict(json.loads(path.read_text()))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is no JSON object: {error}") from error
