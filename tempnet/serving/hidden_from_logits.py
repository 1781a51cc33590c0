"""Recover from logits the hidden state that a TempNet reads, where a server passes on logits alone.

The logits are z = cap(W s + b) with s the (scaled) input of the output layer, and V > d of them determine s. With
C = 1 − 11ᵀ/V, which takes away a constant that was added to all logits, and y = cap⁻¹(z) − b,

    s = (C W)⁺ y                       (C W)⁺ = G⁻¹ Wᵀ C,   G = Wᵀ C W (d, d)

A TempNet multiplies s, or s/‖s‖, by its first matrix S (d1, d) (`tempnet.network`). Therefore only the product S (C W)⁺ is
kept, a matrix (d1, V). The norm needs s itself. Every subset of more than d rows of W determines it, so that it is
read from about 2 d logits, spread evenly over the vocabulary. Rounding of the logits enters the norm in second order
only. Together this is d1·V + 2·d² numbers in the place of d·V.

Both are solved in float64 by a Cholesky factorisation, once. Then τ is compared with the true one on random states
whose logits are computed in the dtype of W, and a TempNet that would be wrong by more than `MAX_TAU_ERROR` is refused.

Shapes: n rows, V effective vocabulary, d hidden size, d1 width of TempNet's first layer.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tempnet.loading import check_vocabulary
from tempnet.models.output_head import OutputHead, StoredBase, find_output_head, output_weight
from tempnet.network import TempNet
from tempnet.weights import WeightFiles, check_weight

MAX_TAU_ERROR = 1e-2
"""Largest relative error of τ on random states with which a TempNet is served."""
_GOOD_TAU_ERROR = 1e-3
"""Error beyond which the norm is read from all logits."""
_MAX_CONDITION = 1e7  # squared in G, which float64 resolves to 1e16
_NUM_STATES = 64
_CHUNK = 8192  # rows of W that are converted to float64 at a time


class HiddenFromLogits:
    """Computes what the hidden state adds to the first layer of a TempNet, from the logits of a base model.

    Attributes:
        condition: condition number of C W.
        tau_error: largest relative error of τ on the random states.
        figures: both as text.

    Args:
        tempnet: the temperature network, of the kind hidden or both; it is put into eval mode.
        base: the base model, or its output layer (:func:`load_output_layer`).
        device: device of the logits; by default that of the TempNet.

    Raises:
        ValueError: if the logits of the base do not follow from its hidden state, or do not determine it, or τ would be
            wrong by more than `MAX_TAU_ERROR`; the message holds the figures.
    """

    @torch.no_grad()
    def __init__(
        self, tempnet: TempNet, base: PreTrainedModel | StoredBase, device: torch.device | str | None = None
    ) -> None:
        head = base.head if isinstance(base, StoredBase) else find_output_head(base)
        if head is None:
            raise ValueError(
                "the logits of the base model do not follow from its hidden state h as cap(scale·(W h + b)), so that they do "
                f"not determine it: use a TempNet that reads the logits (kind = {tempnet.config.kind!r})"
            )
        check_vocabulary(base, tempnet)
        self.tempnet, self.vocab_size, self.soft_cap = tempnet.eval(), tempnet.config.input_size, head.soft_cap
        device = next(tempnet.parameters()).device if device is None else device
        weight, bias = (part if part is None else part.detach().to(device) for part in output_weight(base))
        assert weight is not None
        weight = weight[: self.vocab_size]
        self.bias = None if bias is None else head.scale * bias[: self.vocab_size].float()
        self.matrix, self.condition = _left_inverse(weight, tempnet.state_weight.to(device))
        self.matrix, self.stride = self.matrix.float(), max(1, self.vocab_size // (2 * weight.shape[1]))
        self.norm_matrix: Tensor | None = None
        if tempnet.config.normalize_input:
            self.norm_matrix = _left_inverse(weight[:: self.stride])[0].float()
        self.tau_error = self._measure(base, head, weight)
        if self.norm_matrix is not None and self.stride > 1 and self.tau_error > _GOOD_TAU_ERROR:
            self.stride, self.norm_matrix = 1, _left_inverse(weight)[0].float()
            self.tau_error = self._measure(base, head, weight)
        figures = f"relative error of τ {self.tau_error:.1e}, condition number {self.condition:.1e}, {weight.dtype}"
        if not self.tau_error <= MAX_TAU_ERROR:
            raise ValueError(
                f"the hidden state cannot be recovered from the logits exactly enough ({figures}; at most "
                f"{MAX_TAU_ERROR:g} is served): serve in float32, or use a TempNet that reads the logits"
            )
        self.figures = figures

    def product(self, logits: Tensor) -> Tensor:
        """Return S s or S s/‖s‖, (n, d1), of logits (n, V or more) that may differ from the model's by a constant."""
        values = logits[:, : self.vocab_size].float()
        if self.soft_cap is not None:
            inside = 1.0 - torch.finfo(torch.float32).eps
            values = self.soft_cap * torch.atanh((values / self.soft_cap).clamp(-inside, inside))
        if self.bias is not None:
            values = values - self.bias
        product = F.linear(values, self.matrix)
        if self.norm_matrix is None:
            return product
        norm = F.linear(values[:, :: self.stride], self.norm_matrix).norm(dim=-1, keepdim=True)
        return product / norm.clamp(min=1e-12)

    @torch.no_grad()
    def temperatures(self, logits: Tensor) -> Tensor:
        """Return τ (n,) in float32 of logits (n, V or more)."""
        return self.tempnet(logits[:, : self.vocab_size], state_product=self.product(logits))

    def _measure(self, base: PreTrainedModel | StoredBase, head: OutputHead, weight: Tensor) -> float:
        """Return the largest relative error of τ on random states, whose logits are computed in the dtype of W."""
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(_NUM_STATES, weight.shape[1], generator=generator).to(weight)
        logits = head.logits(base, hidden.to(output_weight(base)[0].device), self.vocab_size).to(weight.device).float()
        true = self.tempnet(logits, head.scaled(hidden))
        return float((self.temperatures(logits) / true - 1.0).abs().max())


def _left_inverse(weight: Tensor, left: Tensor | None = None) -> tuple[Tensor, float]:
    """Return (C W)⁺ (d, rows), or S (C W)⁺ for a matrix S (d1, d), in float64, and the condition number of C W.

    Raises:
        ValueError: if C W has not d independent columns.
    """
    mean = weight.mean(0, dtype=torch.float64)
    gram = mean.new_zeros(len(mean), len(mean))
    for chunk in weight.split(_CHUNK):
        gram += (chunk.double() - mean).T @ (chunk.double() - mean)
    values = torch.linalg.eigvalsh(gram)
    condition = float((values[-1] / values[0]).sqrt()) if values[0] > 0 else float("inf")
    if not condition <= _MAX_CONDITION:
        raise ValueError(
            f"the {len(weight)} logits do not determine the hidden state of {weight.shape[1]} numbers: the condition number "
            f"of the output weight is {condition:.1e}"
        )
    identity = torch.eye(len(gram), dtype=torch.float64, device=gram.device)
    solved = torch.cholesky_solve(identity if left is None else left.double().T, torch.linalg.cholesky(gram)).T
    return torch.cat([solved @ (chunk.double() - mean).T for chunk in weight.split(_CHUNK)], dim=-1), condition


def load_output_layer(
    source: str | Path, *, revision: str | None = None, dtype: torch.dtype | None = None
) -> StoredBase:
    """Read the output layer of a model without the rest of its weights.

    Args:
        source: local directory or hub name of a Transformers causal LM with safetensors files.
        revision: commit or branch on the hub.
        dtype: dtype that the model is served in; by default that of the files.

    Raises:
        ValueError: if the files hold no such weight, or the logits do not follow from the hidden state.
    """
    config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    if (head := find_output_head(base)) is None:
        raise ValueError(f"{source}: the logits of a {type(base).__name__} do not follow from its hidden state")
    # The server reads the same files of the hub, into the same cache.
    patterns = ["*.safetensors", "*.safetensors.index.json"]
    place = (
        source if Path(source).is_dir() else snapshot_download(str(source), revision=revision, allow_patterns=patterns)
    )
    files = WeightFiles.find(place)
    tied = config.get_text_config().tie_word_embeddings
    layer = base.get_input_embeddings() if tied else base.get_output_embeddings()
    name = next(name for name, part in base.named_modules() if part is layer)
    names = [name, name.removeprefix(f"{base.base_model_prefix}.")]
    stored = [one for one in names if files is not None and f"{one}.weight" in files.files]
    if files is None or not stored:
        raise ValueError(f"{source} holds no safetensors file with {name}.weight, the output weight of its model")
    weight = files.read(f"{stored[0]}.weight")
    if not weight.is_floating_point() or weight.shape != layer.weight.shape:
        raise ValueError(
            f"{source}: {name}.weight is {weight.dtype} of {tuple(weight.shape)}, which is no output weight W"
        )
    check_weight(f"{name}.weight", weight, source)
    has_bias = getattr(base.get_output_embeddings(), "bias", None) is not None
    bias_name = next(name for name, part in base.named_modules() if part is base.get_output_embeddings())
    bias = files.read(f"{bias_name}.bias") if has_bias else None
    dtype = weight.dtype if dtype is None else dtype
    return StoredBase(weight.to(dtype), None if bias is None else bias.to(dtype), head)
