"""TempNet: a small network that predicts a temperature from logits or an embedding (arXiv 2404.04575 §5, Appendix D.1).

    shift       x ← x, x − mean x or x − max x      (logits only; the shift does not change the softmax)
    normalise   x ← x/‖x‖₂
    transform   v = sigmoid(W1 x + b1)                                W1 (d1, d0)
    project     u = W2 v                (logits)                      W2 (d2, d1)
                u = columns(W2)ᵀ v      (embeddings, unit columns)    W2 (d1, d2): the columns are prototypes
    pool        s = (1/ρ)·[Σ_k (softmax(u/φ)_k − 1/d2)·w3_k·u_k − b]
    output      τ = (τ_max − τ₀)·sigmoid(s) + τ₀

The pooling has the form of the optimality condition of the robust loss (Lemma 5.1). The input is detached
(stop-gradient), so that TempNet influences the base model only through τ in the loss. Everything is computed in
float32, whatever dtype the base model uses.

Shapes: N rows, d0 input size, d1 hidden size, d2 prototypes.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tempnet.dro import check_rho
from tempnet.weights import check_weight_files, check_weights

PublishedHead = Literal["llama2", "llama1", "gpt2"]
# τ₀, τ_max and the input shift of the networks that the paper's authors trained. Their LLaMA-2 code passes logits
# minus their maximum to the network, both in training (`vocab_parallel_cross_entropy_temp`) and in generation; the
# others pass raw logits.
_PUBLISHED_HEADS: dict[PublishedHead, dict[str, Any]] = {
    "llama2": {"tau_min": 0.01, "tau_max": 1.2, "input_shift": "max"},
    "llama1": {"tau_min": 0.01, "tau_max": 2.0, "input_shift": "none"},
    "gpt2": {"tau_min": 0.5, "tau_max": 5.0, "input_shift": "none"},
}
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
# Subdirectory for a TempNet inside the directory of the base model that it was trained with.
PAIRED_DIRECTORY = "tempnet"


@dataclass(frozen=True, slots=True, kw_only=True)
class TempNetConfig:
    """Sizes, output range and ablation switches of a TempNet.

    :meth:`for_logits` and :meth:`for_embeddings` create configurations with the papers' defaults for each kind.

    Raises:
        ValueError: if a field is outside its range, or fields contradict each other.
    """

    kind: Literal["logits", "embeddings"]
    """Input of the network: the logits of a language model, or the embedding of an image or a text."""
    input_size: int
    """Input size d0: the effective vocabulary, or the dimension of the embedding."""
    rho: float
    """ρ of the robust loss, in nats; it also scales the pooling (with ρ = 0 the pooling is not scaled)."""
    tau_min: float = 0.001
    """Lower end τ₀ of the output range (exclusive)."""
    tau_max: float
    """Upper end τ_max of the output range in training (exclusive)."""
    tau_max_eval: float | None = None
    """τ_max at inference, which rescales the mean temperature (§6.4, Figure 9); None: the same as tau_max."""
    hidden_size: int = 256
    """Width d1 of the transform."""
    num_prototypes: int = 256
    """Width d2 of the projection."""
    phi_init: float
    """Initial value of the temperature φ inside the pooling; the parameter is log φ, so that φ stays positive."""
    input_shift: Literal["none", "mean", "max"] = "none"
    """Value that is subtracted from the logits first. "none": nothing, as in the paper. "mean": the mean of the row,
    which makes τ independent of a constant added to all logits and costs nothing, because it folds into the output
    weight. "max": the maximum of the row, as in the training of the published LLaMA-2-Chat networks."""
    normalize_input: bool = True
    """Whether to divide the input by its L2 norm (ablation: Table 20)."""
    transform: bool = True
    """Whether to use the transform layer (ablation: Tables 19 and 20)."""
    projection: bool = True
    """Whether to use the projection layer (ablation: Tables 19 and 20)."""
    pooling: Literal["parametric", "linear"] = "parametric"
    """Kind of pooling: the parametrised one, or instead one linear layer, s = (1/ρ)·[Σ_k w_k·u_k/d2 + b] (ablation:
    Tables 19 and 20)."""
    depth: Literal[3, 4] = 3
    """Number of layers; 4 adds a second transform of width d1 (ablation: Tables 21 and 22)."""
    stop_gradient: bool = True
    """Whether to detach the input (ablation: Table 18)."""
    projection_bias: bool = False
    """Whether the projection has a bias (the published LLaMA-2 networks have one; the paper's formula has none)."""
    pool_by_rho: bool = True
    """Whether to divide the pooled score by ρ (the published LLaMA-2 networks do not)."""
    dropout: float = 0.0
    """Dropout probability after the transform, in training only (the published LLaMA-2 networks: 0.5)."""

    def __post_init__(self) -> None:
        for name in ("input_size", "hidden_size", "num_prototypes"):
            if getattr(self, name) < 1:
                raise ValueError(f"TempNetConfig.{name} = {getattr(self, name)} must be at least 1")
        if self.kind not in ("logits", "embeddings"):
            raise ValueError(f"TempNetConfig.kind = {self.kind!r} is neither 'logits' nor 'embeddings'")
        if self.input_shift not in ("none", "mean", "max"):
            raise ValueError(f"TempNetConfig.input_shift = {self.input_shift!r} is none of 'none', 'mean', 'max'")
        if self.input_shift != "none" and self.kind == "embeddings":
            raise ValueError(
                f"TempNetConfig.input_shift = {self.input_shift!r} shifts logits; a network on embeddings takes 'none' only"
            )
        if self.pooling not in ("parametric", "linear"):
            raise ValueError(f"TempNetConfig.pooling = {self.pooling!r} is neither 'parametric' nor 'linear'")
        if self.depth not in (3, 4):
            raise ValueError(f"TempNetConfig.depth = {self.depth!r} is neither 3 nor 4")
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
        if self.projection_bias and not (self.projection and self.kind == "logits"):
            raise ValueError("TempNetConfig.projection_bias = True needs the projection of a network on logits")
        if not (self.rho >= 0.0 and math.isfinite(self.rho)):
            raise ValueError(f"TempNetConfig.rho = {self.rho:g} must be finite and not negative")
        if self.kind == "logits" and self.pool_by_rho:
            check_rho(self.rho, self.input_size)

    @classmethod
    def for_logits(cls, vocab_size: int, *, rho: float = 10.0, tau_max: float = 2.0, **changes: Any) -> TempNetConfig:
        """Return the configuration of a TempNet on the logits of a language model (TempNet §6.1: ρ = 10, τ_max = 2).

        Args:
            vocab_size: *effective* vocabulary of the model, without padding.
            rho: ρ of the robust loss, in nats.
            tau_max: upper end τ_max of the output range.
            changes: values of other fields.
        """
        return cls(kind="logits", input_size=vocab_size, **{"rho": rho, "tau_max": tau_max, "phi_init": 1.0, **changes})

    @classmethod
    def released(
        cls, vocab_size: int, *, head: PublishedHead = "llama2", hidden_size: int = 256, num_prototypes: int = 256
    ) -> TempNetConfig:
        """Return the configuration of the authors' networks: projection with bias, dropout, no 1/ρ (so ρ is unused).

        Args:
            vocab_size: effective vocabulary of the base model.
            head: "llama2" for the published LLaMA-2-Chat networks, with τ in (0.01, 1.2), on logits minus their
                maximum; "llama1" with τ in (0.01, 2) or "gpt2" with τ in (0.5, 5), both on raw logits.
            hidden_size: d1.
            num_prototypes: d2.
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
        """Return the configuration of a TempNet on L2-normalised embeddings (TempNet §6.2: ρ ≈ 8, τ_max = 0.05).

        Args:
            dim: dimension of the embeddings.
            rho: ρ of the robust loss, in nats.
            tau_max: upper end τ_max of the output range.
            changes: values of other fields.
        """
        return cls(kind="embeddings", input_size=dim, **{"rho": rho, "tau_max": tau_max, "phi_init": 0.01, **changes})


class TempNet(nn.Module):
    """Network that predicts τ(x) from logits or embeddings x; the formula is in the docstring of this module.

    It has d0·d1 + d1 + d1·d2 + d2 + 2 parameters with the default switches (TempNet Table 13).
    """

    def __init__(self, config: TempNetConfig) -> None:
        super().__init__()
        self.config = config
        width = config.input_size
        self.transform: nn.Sequential | None = None
        if config.transform:
            widths = [width] + [config.hidden_size] * (config.depth - 2)
            self.transform = nn.Sequential()
            for size_in, size_out in itertools.pairwise(widths):
                linear = nn.Linear(size_in, size_out)
                nn.init.kaiming_uniform_(linear.weight)
                nn.init.zeros_(linear.bias)
                self.transform.extend([linear, nn.Sigmoid()])
            if config.dropout:
                self.transform.append(nn.Dropout(config.dropout))
            width = config.hidden_size
        self.projection: nn.Parameter | None = None
        if config.projection:
            shape = (config.num_prototypes, width) if config.kind == "logits" else (width, config.num_prototypes)
            self.projection = nn.Parameter(torch.empty(shape))
            nn.init.kaiming_uniform_(self.projection, mode="fan_in" if config.kind == "logits" else "fan_out")
            width = config.num_prototypes
        self.projection_bias = nn.Parameter(torch.zeros(width)) if config.projection_bias else None
        if config.pooling == "parametric":
            self.pool_weight = nn.Parameter(torch.ones(width))
            # Scalars are stored as one-element vectors, because DeepSpeed cannot broadcast zero-dimensional parameters.
            self.pool_bias = nn.Parameter(torch.zeros(1))
            self.log_phi = nn.Parameter(torch.full((1,), math.log(config.phi_init)))
        else:
            self.final = nn.Linear(width, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return temperatures (...,) in float32 for logits or embeddings (..., d0).

        They lie between τ₀ and τ_max, or τ_max_eval in eval mode.

        Raises:
            ValueError: if the input has another size than d0.
        """
        if inputs.shape[-1] != self.config.input_size:
            raise ValueError(
                f"TempNet reads {self.config.input_size} {self.config.kind}, the input has {inputs.shape[-1]}: "
                f"the base model's effective vocabulary (or embedding) is not the one that this TempNet was built for"
            )
        with torch.autocast(inputs.device.type, enabled=False):
            x = (inputs.detach() if self.config.stop_gradient else inputs).to(self._dtype)
            if (offset := self.input_offset(x)) is not None:
                x = x - offset
            if self.config.normalize_input:
                x = F.normalize(x, dim=-1)
            return self.temperature(self._pool(self.prototype_scores(self.hidden(x))))

    def input_offset(self, logits: Tensor) -> Tensor | None:
        """Return the value (..., 1) that `input_shift` subtracts from logits (..., V), or None for no shift."""
        if self.config.input_shift == "none":
            return None
        return logits.mean(-1, keepdim=True) if self.config.input_shift == "mean" else logits.amax(-1, keepdim=True)

    @property
    def first_layer(self) -> nn.Linear:
        """First layer of the transform, with weight W1 and bias b1."""
        assert self.transform is not None
        layer = self.transform[0]
        assert isinstance(layer, nn.Linear)
        return layer

    def from_first_product(self, product: Tensor) -> Tensor:
        """Return τ for W1 x (..., d1), which other code may have computed without x (`tempnet.softmax.linear`)."""
        assert self.transform is not None
        v = self.transform[1:](product + self.first_layer.bias)
        return self.temperature(self._pool(self.prototype_scores(v)))

    @property
    def _dtype(self) -> torch.dtype:
        """Dtype of the parameters: float32, unless a test has converted the module to float64."""
        return next(self.parameters()).dtype

    def hidden(self, x: Tensor) -> Tensor:
        """Return the transformed input v (..., d1)."""
        return x if self.transform is None else self.transform(x)

    def prototype_scores(self, v: Tensor) -> Tensor:
        """Return the prototypical logits u (..., d2)."""
        if self.projection is None:
            return v
        if self.config.kind == "logits":
            return F.linear(v, self.projection, self.projection_bias)
        return v @ F.normalize(self.projection, dim=0)

    def temperature(self, score: Tensor) -> Tensor:
        """Return τ = (τ_max − τ₀)·sigmoid(s) + τ₀ for scores s; in eval mode τ_max_eval takes the place of τ_max."""
        config = self.config
        tau_max = config.tau_max
        if not self.training and config.tau_max_eval is not None:
            tau_max = config.tau_max_eval
        return (tau_max - config.tau_min) * torch.sigmoid(score) + config.tau_min

    def _pool(self, u: Tensor) -> Tensor:
        if self.config.pooling == "linear":
            # Dividing by d2 gives a mean on the same scale as the parametric pooling, since both use the same
            # learning rate. A sum over the prototypes, which all change at once, would saturate the sigmoid after a
            # single step.
            pooled = self.final(u / u.shape[-1]).squeeze(-1)
        else:
            attention = torch.softmax(u * torch.exp(-self.log_phi), dim=-1) - 1.0 / u.shape[-1]
            pooled = (attention * self.pool_weight * u).sum(-1) - self.pool_bias
        return pooled / self.config.rho if self.config.pool_by_rho and self.config.rho > 0 else pooled

    @torch.no_grad()
    def init_prototypes(self, embeddings: Tensor) -> None:
        """Set the prototypes (columns of W2) to the transformed embeddings of d2 randomly chosen training samples.

        Args:
            embeddings: (d2, d0) L2-normalised embeddings of this network's own modality (TempNet Appendix D.1).

        Raises:
            ValueError: if the network does not read embeddings or has no projection, or the shape is wrong.
        """
        if self.config.kind != "embeddings" or self.projection is None:
            raise ValueError("init_prototypes is for a TempNet on embeddings with a projection layer")
        expected = (self.config.num_prototypes, self.config.input_size)
        if tuple(embeddings.shape) != expected:
            raise ValueError(
                f"embeddings has shape {tuple(embeddings.shape)}; {expected} is needed, one row a prototype"
            )
        self.projection.copy_(self.hidden(embeddings.float()).T)

    def set_tau_max_eval(self, tau_max_eval: float | None) -> None:
        """Set τ_max for inference; it is saved with the network. None restores the τ_max of training."""
        self.config = replace(self.config, tau_max_eval=tau_max_eval)

    def save_pretrained(self, directory: str | Path) -> None:
        """Write `config.json` and `model.safetensors` to the directory, which is created if necessary."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / CONFIG_FILE).write_text(json.dumps(asdict(self.config), indent=2) + "\n")
        save_file({name: value.contiguous() for name, value in self.state_dict().items()}, directory / WEIGHTS_FILE)

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> TempNet:
        """Read a network that :meth:`save_pretrained` wrote; it is returned in eval mode.

        Raises:
            FileNotFoundError: if one of the two files is missing; the message names the directory and the file.
            ValueError: if the configuration has unknown fields, or the weights are truncated or contain NaN.
        """
        directory = Path(directory)
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if not (directory / name).is_file():
                raise FileNotFoundError(f"{directory} holds no TempNet: {name} is missing")
        values = json.loads((directory / CONFIG_FILE).read_text())
        unknown = sorted(set(values) - {field.name for field in fields(TempNetConfig)})
        if unknown:
            raise ValueError(f"{directory / CONFIG_FILE}: unknown fields {unknown}; was it written by a newer version?")
        network = cls(TempNetConfig(**values))
        check_weight_files(directory / WEIGHTS_FILE)
        network.load_state_dict(load_file(directory / WEIGHTS_FILE))
        check_weights(network, directory)
        return network.eval()
