"""Recover from some logits the hidden state, and from it everything that a TempNet reads.

The logits are z = cap(W s + b) with s the (scaled) input of the output layer, and V > d of them determine s; so does
every subset of more than d rows of W. With C = 1 − 11ᵀ/n, which takes away a constant that was added to all logits, and
y = cap⁻¹(z) − b,

    s = (C W)⁺ y                       (C W)⁺ = G⁻¹ Wᵀ C,   G = Wᵀ C W (d, d)

is read from n = 1.25 d logits, in blocks spread evenly over the vocabulary, or from twice as many, and so on, until τ is
right. TempNet's first layer reads s/‖s‖, and, if z = W s, also z/‖z‖ from the same numbers: W1 z = (W1 W) s, and with the
eigenvectors U and eigenvalues λ of WᵀW, ‖z‖² = Σ λ_i t_i² for t = Uᵀ s, whose norm is that of s. Therefore t is computed, by
the matrix Uᵀ (C W)⁺ (d, n), which has two bytes a number unless the model is served in float32. A TempNet that reads logits
which are no product, because of a bias or a soft-cap, or their maximum, reads all of them itself.

The systems are solved in float64 by a Cholesky factorisation, once. Then τ is compared with the true one on random states
whose logits are computed in the dtype of W, and a TempNet that would be wrong by more than `MAX_TAU_ERROR` is refused.

Shapes: m rows of a batch, n logits that are read, V effective vocabulary, d hidden size, d1 width of TempNet's first layer.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tempnet.loading import check_vocabulary
from tempnet.models.output_head import StoredBase, find_output_head, output_weight
from tempnet.network import TempNet
from tempnet.softmax.fold import can_fold_network
from tempnet.weights import WeightFiles, check_weight

MAX_TAU_ERROR = 1e-2
"""Largest relative error of τ on random states with which a TempNet is served."""
_GOOD_TAU_ERROR = {torch.float32: 3e-6, torch.float16: 3e-4}
"""Error with which no more logits are read, by the dtype of the matrix."""
_MAX_CONDITION = 1e7  # squared in G, which float64 resolves to 1e16
_NUM_STATES = 64
_CHUNK = 8192  # rows of W that are converted to float64 at a time
_BLOCK = 32  # neighbouring logits, 128 bytes of a GPU's memory


class HiddenFromLogits:
    """Computes the τ of a TempNet, which is put into eval mode, from the logits of a base model, or of its output layer.

    `device` is that of the logits, by default that of the TempNet. `figures` are n, the largest relative error of τ on the
    random states, and the condition number of C W, as text.

    Raises:
        ValueError: if the logits of the base do not follow from its hidden state, or do not determine it, or τ would be
            wrong by more than `MAX_TAU_ERROR`; the message holds the figures. Also if a TempNet that reads only logits needs
            all of them.
    """

    @torch.no_grad()
    def __init__(
        self, tempnet: TempNet, base: PreTrainedModel | StoredBase, device: torch.device | str | None = None
    ) -> None:
        config = tempnet.config
        head = base.head if isinstance(base, StoredBase) else find_output_head(base)
        if head is None:
            raise ValueError(
                "the logits of the base model do not follow from its hidden state h as cap(scale·(W h + b)), so that they do "
                f"not determine it: use a TempNet that reads the logits (kind = {config.kind!r})"
            )
        check_vocabulary(base, tempnet)
        self.tempnet, self.vocab_size, self.soft_cap = tempnet.eval(), config.input_size, head.soft_cap
        device = next(tempnet.parameters()).device if device is None else device
        weight, bias = (part if part is None else part.detach().to(device) for part in output_weight(base))
        assert weight is not None
        weight = weight[: self.vocab_size]
        bias = None if bias is None else head.scale * bias[: self.vocab_size].float()
        is_product = self.soft_cap is None and bias is None
        self.folds = config.reads_logits and is_product and can_fold_network(tempnet)
        if not self.folds and not config.reads_state:
            raise ValueError("a TempNet on logits alone reads all of them, where they are not W h or do not fold")
        parts = [tempnet.state_weight.to(device).double()] if config.reads_state else []
        spectrum = rotation = None
        if self.folds:
            mean = weight.mean(0, dtype=torch.float64) if config.input_shift == "mean" else weight.new_zeros(1).double()
            if config.normalize_input:
                squares, rotation = torch.linalg.eigh(_gram(weight, mean))
                spectrum = squares.clamp(min=0.0).sqrt().float()
            first = tempnet.first_layer.weight.to(device).double()
            pairs = zip(first.split(_CHUNK, dim=-1), weight.split(_CHUNK), strict=True)
            parts.append(torch.stack([left @ (right.double() - mean) for left, right in pairs]).sum(0))
        spectra = [None] * config.reads_state + [spectrum] * self.folds
        self.readers = [
            ((part if rotation is None else part @ rotation).float(), one)
            for part, one in zip(parts, spectra, strict=True)
        ]
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(_NUM_STATES, weight.shape[1], generator=generator).to(weight)
        logits = head.logits(base, hidden.to(output_weight(base)[0].device), self.vocab_size).to(device).float()
        state, exact = head.scaled(hidden), logits
        if self.folds:  # as `generate` folds them, without the rounding of logits
            exact = torch.cat([F.linear(state.float(), part.float()) for part in weight.split(_CHUNK)], dim=-1)
        self._choose(weight, bias, rotation, logits, tempnet(exact, state))
        self.figures = (
            f"from {self.num_read} logits, relative error of τ {self.tau_error:.1e}, "
            f"condition number {self.condition:.1e}, {weight.dtype}"
        )
        if not self.tau_error <= MAX_TAU_ERROR:
            raise ValueError(
                f"the hidden state cannot be recovered from the logits exactly enough ({self.figures}; at most "
                f"{MAX_TAU_ERROR:g} is served): serve in float32, or use a TempNet that reads the logits"
            )

    def _choose(
        self, weight: Tensor, bias: Tensor | None, rotation: Tensor | None, logits: Tensor, true: Tensor
    ) -> None:
        """Read as many logits as τ needs, and keep the matrix."""
        # Half precision has 11 bits of mantissa there, because bfloat16 would add its rounding to that of the logits.
        dtype = torch.float32 if weight.dtype == torch.float32 else torch.float16
        self.num_read, self.tau_error = -(-5 * weight.shape[1] // 4), math.inf
        while True:
            self.index = spread_ids(self.num_read, self.vocab_size).to(weight.device)
            self.num_read = len(self.index)
            inverse, self.condition = _left_inverse(weight[self.index])
            if inverse is not None:
                self.bias = None if bias is None else bias[self.index]
                self.matrix = (inverse if rotation is None else rotation.T @ inverse).to(dtype)
                self.tau_error = float((self.temperatures(logits) / true - 1.0).abs().max())
            if self.tau_error <= _GOOD_TAU_ERROR[dtype]:
                return
            if self.num_read == self.vocab_size:
                break
            self.num_read *= 2
        if inverse is None:
            raise ValueError(
                f"the {self.num_read} logits do not determine the hidden state of {weight.shape[1]} numbers: the condition "
                f"number of the output weight is {self.condition:.1e}"
            )

    @torch.no_grad()
    def temperatures(self, logits: Tensor) -> Tensor:
        """Return τ (m,) in float32 of logits (m, V or more); NaN where one that is needed is −∞.

        A constant that was added to all logits of a row changes nothing of what is read of the hidden state.
        """
        logits, config = logits[:, : self.vocab_size], self.tempnet.config
        values = logits.index_select(-1, self.index).float()
        reads_all = config.reads_logits and not self.folds
        is_lost = (logits if reads_all else values).amin(-1).isneginf()
        if self.soft_cap is not None:
            inside = 1.0 - torch.finfo(torch.float32).eps
            values = self.soft_cap * torch.atanh((values / self.soft_cap).clamp(-inside, inside))
        if self.bias is not None:
            values = values - self.bias
        values = values - values.mean(-1, keepdim=True)
        state = F.linear(values.to(self.matrix.dtype), self.matrix).float()
        products = []
        for reader, spectrum in self.readers:
            product = F.linear(state, reader)
            if config.normalize_input:
                norm = (state if spectrum is None else state * spectrum).norm(dim=-1, keepdim=True)
                product = product / norm.clamp(min=1e-12)
            products.append(product)
        if reads_all:
            tau = self.tempnet(logits, state_product=products[0])
        else:
            tau = self.tempnet.from_first_product(sum(products[1:], start=products[0]))
        return tau.masked_fill(is_lost, math.nan)


def spread_ids(number: int, vocab_size: int) -> Tensor:
    """Return the ids of at least so many logits, in blocks spread evenly over the vocabulary; of all if half are needed."""
    if 2 * (number + _BLOCK) > vocab_size:
        return torch.arange(vocab_size)
    starts = torch.linspace(0, vocab_size - _BLOCK, -(-number // _BLOCK), dtype=torch.float64).long()
    return (starts.unsqueeze(-1) + torch.arange(_BLOCK)).flatten()


def _gram(weight: Tensor, mean: Tensor) -> Tensor:
    """Return (W − mean)ᵀ(W − mean) (d, d) in float64."""
    return sum(
        (part.T @ part for part in (chunk.double() - mean for chunk in weight.split(_CHUNK))), start=mean.new_zeros(())
    )


def _left_inverse(weight: Tensor) -> tuple[Tensor | None, float]:
    """Return (C W)⁺ (d, n) in float64, or None if C W has not d independent columns, and the condition number of C W."""
    mean = weight.mean(0, dtype=torch.float64)
    gram = _gram(weight, mean)
    values = torch.linalg.eigvalsh(gram)
    condition = float((values[-1] / values[0]).sqrt()) if values[0] > 0 else math.inf
    if not condition <= _MAX_CONDITION:
        return None, condition
    factor = torch.linalg.cholesky(gram)
    return torch.cat(
        [torch.cholesky_solve((part.double() - mean).T, factor) for part in weight.split(_CHUNK)], -1
    ), condition


def load_output_layer(
    source: str | Path, *, revision: str | None = None, dtype: torch.dtype | None = None
) -> StoredBase:
    """Read the output layer of a model without the rest of its weights.

    The source is a local directory or hub name (at a revision) of a Transformers causal LM with safetensors files; `dtype`
    is that in which it is served, by default that of the files. ValueError if the files hold no such weight, or the logits
    do not follow from the hidden state.
    """
    config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    if (head := find_output_head(base)) is None:
        raise ValueError(f"{source}: the logits of a {type(base).__name__} do not follow from its hidden state")
    # The server reads the same files of the hub, into the same cache.
    patterns = ["*.safetensors", "*.safetensors.index.json"]
    is_local = Path(source).is_dir()
    place = source if is_local else snapshot_download(str(source), revision=revision, allow_patterns=patterns)
    files = WeightFiles.find(place)
    tied = config.get_text_config().tie_word_embeddings
    names_of = {part: name for name, part in base.named_modules()}
    output = base.get_output_embeddings()
    layer = base.get_input_embeddings() if tied else output
    name = names_of[layer]
    names = [name, name.removeprefix(f"{base.base_model_prefix}.")]
    stored = [one for one in names if files is not None and f"{one}.weight" in files.files]
    if files is None or not stored:
        raise ValueError(f"{source} holds no safetensors file with {name}.weight, the output weight of its model")
    weight = files.read(f"{stored[0]}.weight")
    if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16) or weight.shape != layer.weight.shape:
        raise ValueError(
            f"{source}: {name}.weight is {weight.dtype} of {tuple(weight.shape)}, which is no output weight W"
        )
    check_weight(f"{name}.weight", weight, source)
    bias = None if getattr(output, "bias", None) is None else files.read(f"{names_of[output]}.bias")
    dtype = weight.dtype if dtype is None else dtype
    return StoredBase(weight.to(dtype), None if bias is None else bias.to(dtype), head)
