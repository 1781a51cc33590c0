"""The tokens of a call of the logits-free loss: their temperatures, losses and gradients, in chunks or by kernels.

With p = softmax(L/τ), y the target and V the effective vocabulary:

    cross-entropy   log Σ exp(L/τ) − L_y/τ              ∂/∂L = (p − onehot(y))/τ      ∂/∂τ = (L_y − E_p[L])/τ²
    robust          τ·(cross-entropy + ρ − log V)       ∂/∂L = p − onehot(y)          ∂/∂τ = H(p) + ρ − log V
    proper          cross-entropy                       ∂/∂L = p − onehot(y)          ∂/∂τ = H(p) − cross-entropy

The proper score has the value of the cross-entropy, and the gradients of the robust loss with ρ = log V − cross-entropy.

In chunks, only the logits of one chunk exist at a time. They are overwritten in place, first by (L − max L)/τ and then by
their gradient. All memory is reused for the next chunk, because new memory would cause page faults. Losses that differ only
in their TempNets share the logits of a chunk, their norms and their maxima.

On a GPU, the Triton kernels of `kernels.py` process all tokens at once: the fold gives τ of every token before the
vocabulary is read, so that one pass yields all sums that the losses need.

Shapes: N tokens in a call, c of them in a chunk, d hidden size, V effective vocabulary, d1 width of TempNet's first layer, K
losses.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tempnet.network import TempNet
from tempnet.oracle import optimal_temperature
from tempnet.softmax.config import TemperatureLossConfig
from tempnet.softmax.fold import FoldCache
from tempnet.softmax.kernels import SoftmaxTerms, is_available, softmax_gradients, softmax_statistics
from tempnet.softmax.reference import IGNORE_INDEX

# A matrix product in another dtype than the sum it is added to is computed in parts of this many values (1 MiB in
# bfloat16), which fit in the cache, but of at least this many rows, because products of few rows are slow.
_NUM_VALUES_AT_A_TIME = 1 << 19
_MIN_NUM_ROWS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPlan:
    """What determines the loss of one network, apart from tensors.

    Fields without a text are arguments of `tempnet.softmax.linear.linear_language_model_losses`.
    """

    config: TemperatureLossConfig
    vocab_size: int
    tempnet: TempNet | None
    soft_cap: float | None
    folds: bool
    """Whether the TempNet reads W1·W and the hidden state, instead of the chunk's logits."""
    cache: FoldCache
    """Cache of matrices that follow from the weights."""
    chunk_size: int
    matmul_dtype: torch.dtype
    sum_dtype: torch.dtype
    """Dtype of losses and sums: float32 at least, because bfloat16 would lose small gradients over many chunks."""
    with_values: bool
    with_gradients: bool
    """Whether autograd is on. `ctx.needs_input_grad` does not tell, because it stays true under no_grad."""

    @property
    def reads_logits(self) -> bool:
        """Whether a TempNet reads the logits."""
        return self.tempnet is not None and self.tempnet.config.reads_logits

    @property
    def is_centred(self) -> bool:
        """Whether the network reads L − mean L, for which the fold uses centred matrices."""
        return self.tempnet is not None and self.tempnet.config.input_shift == "mean"

    @property
    def is_free_of_shifts(self) -> bool:
        """Whether a constant may be added to all logits of a token, as far as softmax and TempNet are concerned."""
        reads_them = self.tempnet is None or (self.reads_logits and self.tempnet.config.input_shift == "none")
        return self.soft_cap is None and not reads_them


class Prediction(NamedTuple):
    """What a TempNet predicts, with the autograd graph from W1 x to τ."""

    tau: Tensor
    """τ with its graph: (c,)."""
    product: Tensor
    """W1 x, a leaf of the graph: (c, d1)."""
    inverse_norm: Tensor
    """1/‖L‖, or 1 if the input is not normalised: (c,)."""
    unit: Tensor | None
    """L/‖L‖ if W1 is applied to the logits, else None: (c, V)."""
    state: Tensor | None
    """The normalised hidden states if the network reads them, else None: (c, d)."""


class TokenLoss:
    """One loss of N tokens: the tensors that it reads, its results, and the sums of its gradients.

    Results are (N,), and 0 where the target is ignored. A sum is None, or empty, if it is not needed. `parameters` are those
    of the TempNet (:func:`network_parameters`), and `needs` says which of (hidden, weight, bias, _, _, *parameters) need a
    gradient.
    """

    def __init__(
        self,
        plan: LossPlan,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        parameters: tuple[Tensor, ...],
        needs: Sequence[bool],
    ) -> None:
        dtype, used = plan.matmul_dtype, weight[: plan.vocab_size]
        self.plan, self.parameters = plan, parameters
        self.hidden = hidden.to(dtype)
        self.weight = (plan.cache.centre(used, dtype) if plan.is_free_of_shifts else used).to(dtype)
        self.bias = None if bias is None else bias[: plan.vocab_size].to(dtype)
        self.folded: Tensor | None = None
        if plan.folds:
            folded = plan.cache.first(parameters[0], self.weight, centred=plan.is_centred, matmul_dtype=dtype)
            self.folded = folded.to(plan.sum_dtype)

        zeros = [hidden.new_zeros(len(hidden), dtype=plan.sum_dtype) for _ in range(6 if plan.with_values else 3)]
        self.losses, self.tau, self.slopes, self.values = zeros[0], zeros[1], zeros[2], zeros[3:]

        self.hidden_grad = torch.empty_like(hidden) if needs[0] else None
        self.weight_grad = torch.empty_like(weight, dtype=plan.sum_dtype) if needs[1] else None
        if self.weight_grad is not None:
            # The first chunk writes the gradient and the others add to it, which saves setting a large matrix to zero.
            self.weight_grad[plan.vocab_size if len(hidden) else 0 :] = 0.0
        self.bias_grad = torch.zeros_like(bias, dtype=plan.sum_dtype) if bias is not None and needs[2] else None
        trained = parameters if any(needs[5:]) else ()
        # With a fold, the gradient of W1 is that of the folded matrix until the end.
        self.parameter_grads = [
            torch.empty_like(parameter) if number == 0 and plan.folds else torch.zeros_like(parameter)
            for number, parameter in enumerate(trained)
        ]
        self.folded_grad = torch.zeros_like(self.folded) if trained and self.folded is not None else None

    @property
    def needs_logits_grad(self) -> bool:
        """Whether the gradient of the logits is needed."""
        return not (self.hidden_grad is None and self.weight_grad is None and self.bias_grad is None)

    def write_logits(self, part: slice, out: Tensor) -> Tensor | None:
        """Write the logits (c, V) of tokens to `out`; return the soft-cap's derivative (c, V) if it is needed."""
        hidden = self.hidden[part]
        if hidden.dtype == out.dtype and self.bias is None:
            torch.mm(hidden, self.weight.T, out=out)
        else:
            out.copy_(F.linear(hidden, self.weight, self.bias))
        slope, cap = None, self.plan.soft_cap
        if cap is not None:
            out.div_(cap).tanh_()
            slope = 1 - out.square() if self.needs_logits_grad else None
            out.mul_(cap)
        return slope

    def constant(self, like: Tensor) -> Tensor:
        """Return the constant τ (c,) of a loss whose temperatures are neither predicted nor optimal."""
        config = self.plan.config
        return like.new_full(like.shape[:1], config.tau if config.kind.temperature == "given" else 1.0)

    def predict(self, hidden: Tensor, inverse_norm: Tensor, unit: Tensor | None) -> Prediction:
        """Predict τ from hidden states (c, d), 1/‖L‖ (c,) and, where logits are read without a fold, L/‖L‖ (c, V)."""
        tempnet, product, state = self.plan.tempnet, None, None
        assert tempnet is not None
        if self.folded is not None:
            product = (hidden.to(self.plan.sum_dtype) @ self.folded.T) * inverse_norm.unsqueeze(-1)
        elif unit is not None:
            product = unit @ self.parameters[0].to(self.plan.sum_dtype).T
        with torch.set_grad_enabled(bool(self.parameter_grads)), torch.autocast(hidden.device.type, enabled=False):
            if tempnet.config.reads_state:
                with torch.no_grad():
                    state = tempnet.normalize_state(hidden)
                    part = tempnet.state_product(state)
                    product = part if product is None else product.to(part.dtype) + part
            assert product is not None
            product = product.to(tempnet.first_layer.weight.dtype).detach().requires_grad_()
            tau = tempnet.from_first_product(product)
        return Prediction(tau, product, inverse_norm, unit, state)

    def add(
        self,
        part: slice,
        targets: Tensor,
        tau: Tensor,
        prediction: Prediction | None,
        at_tau: SoftmaxTerms,
        at_one: SoftmaxTerms | None,
    ) -> Tensor:
        """Write the results of the tokens in `part`, and add the gradients of the TempNet.

        Returned are the factors of p − onehot(y) in the gradient of the logits. Targets, temperatures and the result are
        (c,). `at_one`, the terms at τ = 1, are needed only with `with_values`.
        """
        losses, slopes, logits_scale = evaluate_objective(self.plan, targets, tau, at_tau)
        self.losses[part], self.tau[part], self.slopes[part] = losses, tau, slopes
        if self.values:
            assert at_one is not None
            is_valid = targets != IGNORE_INDEX
            self.values[0][part] = at_one.cross_entropy.where(is_valid, 0.0)
            self.values[1][part] = at_tau.cross_entropy.where(is_valid, 0.0)
            self.values[2][part] = at_one.entropy
        if prediction is not None and self.parameter_grads:
            self._add_network_gradient(self.hidden[part], prediction, slopes)
        return logits_scale

    def _add_network_gradient(self, hidden: Tensor, prediction: Prediction, tau_grad: Tensor) -> None:
        """Add what follows from ∂loss/∂τ (c,) of tokens whose hidden states (c, d) are given."""
        product_grad, *gradients = torch.autograd.grad(
            prediction.tau,
            [prediction.product, *self.parameters[1:]],
            tau_grad.to(prediction.tau.dtype),
            allow_unused=True,
        )
        for total, gradient in zip(self.parameter_grads[1:], gradients, strict=True):
            if gradient is not None:
                total += gradient
        if prediction.state is not None:
            assert self.plan.tempnet is not None
            of_state = self.plan.tempnet.state_weight
            place = [parameter is of_state for parameter in network_parameters(self.plan.tempnet)].index(True)
            self.parameter_grads[place].add_(product_grad.T @ prediction.state.to(product_grad.dtype))
        if self.folded_grad is not None:
            scaled = product_grad.to(self.folded_grad.dtype) * prediction.inverse_norm.unsqueeze(-1)
            self.folded_grad.addmm_(scaled.T, hidden.to(self.folded_grad.dtype))
        elif prediction.unit is not None:
            self.parameter_grads[0].add_(product_grad.T @ prediction.unit.to(product_grad.dtype))

    def add_logits_gradient(self, part: slice, gradient: Tensor) -> None:
        """Add what follows from ∂loss/∂L (c, V) of the tokens in `part`, the first of which is token 0 in the first call."""
        hidden, vocab_size = self.hidden[part], len(self.weight)
        if self.bias_grad is not None:
            self.bias_grad[:vocab_size] += gradient.sum(0)
        gradient = gradient.to(hidden.dtype)
        if self.hidden_grad is not None:
            _multiply_into(self.hidden_grad[part], gradient, self.weight)
        if self.weight_grad is not None:
            _multiply_into(self.weight_grad[:vocab_size], gradient.T, hidden, add=part.start > 0)

    def gradients(self, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden, weight and bias (the latter two in `dtype`) and of all parameters."""
        if self.folded_grad is not None:
            # No other term contributes to this gradient, so it is written and not added. The product has the same dtype
            # as the others with the output weight; under autocast the gradient of W1 is as precise as that of other
            # matrices.
            first = self.parameter_grads[0]
            _multiply_into(first, self.folded_grad.to(self.weight.dtype), self.weight.T)
            if self.plan.is_centred:
                first.sub_(first.mean(-1, keepdim=True))
        weight = None if self.weight_grad is None else self.weight_grad.to(dtype)
        bias = None if self.bias_grad is None else self.bias_grad.to(dtype)
        parameters: Sequence[Tensor | None] = self.parameter_grads or [None] * len(self.parameters)
        return self.hidden_grad, weight, bias, *parameters


def network_parameters(tempnet: TempNet) -> tuple[Tensor, ...]:
    """Return the network's parameters, W1 first and the others in the order of `parameters()`.

    Each is read as an attribute of its module, because under ZeRO-3 this makes DeepSpeed gather it.
    """
    first = tempnet.first_layer.weight
    parameters = (
        getattr(module, name) for module in tempnet.modules() for name, _ in module.named_parameters(recurse=False)
    )
    return first, *(parameter for parameter in parameters if parameter is not first)


def evaluate_objective(
    plan: LossPlan, targets: Tensor, tau: Tensor, softmax: SoftmaxTerms
) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses, slopes ∂loss/∂τ, and factors of p − onehot(y) in the gradient of the logits of tokens, (c,) each.

    The formulas are in the docstring of this module. Targets, temperatures and the terms of softmax(L/τ) are (c,); where the
    target is ignored, all results are 0.
    """
    is_valid = targets != IGNORE_INDEX
    cross_entropy, entropy, excess = softmax
    scale = is_valid.to(plan.sum_dtype)
    if plan.config.kind.objective == "robust":
        offset = plan.config.rho - math.log(plan.vocab_size)
        losses, slopes = tau * (cross_entropy + offset), entropy + offset
    elif plan.config.kind.objective == "proper":
        losses, slopes = cross_entropy, excess
    else:
        losses, slopes, scale = cross_entropy, excess / tau, scale / tau
    return losses.where(is_valid, 0.0), slopes.where(is_valid, 0.0), scale


def add_tokens_in_chunks(losses: Sequence[TokenLoss], targets: Tensor) -> None:
    """Compute the results of all tokens (N,) and add their gradients, for losses of the same hidden states and output weight.

    There is one loss, or several that need no gradient of the logits, and whose networks read these with the same shift.
    """
    first, with_values = losses[0], losses[0].plan.with_values
    # A network that reads the logits as they are needs those of the weight as it is, which suit the others too.
    base = next((loss for loss in losses if not loss.plan.is_free_of_shifts), first)
    num_tokens, size = len(targets), first.plan.chunk_size
    buffers = first.losses.new_empty(min(len(losses), 2) + 1, min(size, num_tokens), first.plan.vocab_size)
    for start in range(0, num_tokens, size):
        part = slice(start, min(start + size, num_tokens))
        logits, work, *spare = buffers[:, : part.stop - start]
        cap_slope = base.write_logits(part, logits)
        predicted = _temperatures(losses, first.hidden[part], logits)
        safe_targets = targets[part].where(targets[part] != IGNORE_INDEX, 0).unsqueeze(-1)
        # The maximum is subtracted before the division, because L/τ would lose the digits of small differences at small τ.
        shifted = logits.sub_(logits.amax(-1, keepdim=True))
        at_one = _compute_softmax(shifted.clone(), safe_targets, work) if with_values else None
        if len(losses) == 1:
            terms = [_compute_softmax(shifted.div_(predicted[0][0].unsqueeze(-1)), safe_targets, work)]
        else:
            divided = (torch.div(shifted, tau.unsqueeze(-1), out=spare[0]) for tau, _ in predicted)
            terms = [_compute_softmax(one, safe_targets, work) for one in divided]
        for loss, (tau, prediction), at_tau in zip(losses, predicted, terms, strict=True):
            logits_scale = loss.add(part, targets[part], tau, prediction, at_tau, at_one)
            if loss.needs_logits_grad:
                gradient = work  # The probabilities p.
                # Saves a pass over the logits on CPUs; on a GPU the answer would have to be waited for.
                if logits_scale.is_cuda or not bool((logits_scale == 1).all()):
                    gradient.mul_(logits_scale.unsqueeze(-1))
                gradient.scatter_add_(-1, safe_targets, -logits_scale.unsqueeze(-1))
                if cap_slope is not None:
                    gradient.mul_(cap_slope)
                loss.add_logits_gradient(part, gradient)


def _temperatures(
    losses: Sequence[TokenLoss], hidden: Tensor, logits: Tensor
) -> list[tuple[Tensor, Prediction | None]]:
    """Return τ (c,) and its prediction for every loss; the logits (c, V) may be shifted in place."""
    readers = [loss.plan.tempnet for loss in losses if loss.plan.tempnet and loss.plan.reads_logits]
    if readers and (offset := readers[0].input_offset(logits)) is not None:
        logits.sub_(offset)

    @functools.cache
    def inverse_norm(is_normalised: bool) -> Tensor:
        if not is_normalised:
            return torch.ones_like(logits[:, 0])
        return 1.0 / torch.linalg.vector_norm(logits, dim=-1).clamp(min=1e-12)

    @functools.cache
    def unit(is_normalised: bool) -> Tensor:
        return logits * inverse_norm(is_normalised).unsqueeze(-1)

    found: list[tuple[Tensor, Prediction | None]] = []
    for loss in losses:
        plan, config = loss.plan, loss.plan.config
        if config.kind.temperature == "oracle":
            found.append((optimal_temperature(logits, config.rho, config.tau_min, config.tau_max), None))
        elif plan.tempnet is None:
            found.append((loss.constant(logits), None))
        else:
            kind = plan.reads_logits and plan.tempnet.config.normalize_input
            prediction = loss.predict(
                hidden, inverse_norm(kind), unit(kind) if plan.reads_logits and not plan.folds else None
            )
            found.append((prediction.tau.detach().to(plan.sum_dtype), prediction))
    return found


def _compute_softmax(scores: Tensor, targets: Tensor, out: Tensor) -> SoftmaxTerms:
    """Write the probabilities p (c, V) to `out`, and return their cross-entropy, entropy and its excess, for targets (c, 1).

    The scores (c, V), whose row maxima are 0, are overwritten. The largest p is 1/Σ exp(s), which gives the partition
    function without another pass. On CPUs, a product in place and its sum is several times faster than `vecdot`.
    """
    positive = scores.gather(-1, targets).squeeze(-1)
    torch.softmax(scores, dim=-1, out=out)
    log_partition = -out.amax(-1).log()
    mean = scores.mul_(out).sum(-1)
    return SoftmaxTerms(log_partition - positive, log_partition - mean, positive - mean)


def can_fuse(plan: LossPlan, hidden: Tensor) -> bool:
    """Return whether the kernels can process a call: they must run on the device, and τ must not need the logits."""
    is_known = plan.folds if plan.reads_logits else plan.config.kind.temperature != "oracle"
    return is_known and is_available(hidden.new_empty(0, dtype=plan.matmul_dtype))


def add_tokens_by_kernels(loss: TokenLoss, targets: Tensor) -> None:
    """Compute the results of all tokens and their gradients; the arguments are those of :func:`add_tokens_in_chunks`."""
    if not len(loss.hidden):
        return  # A kernel cannot be launched on an empty input; all sums are already 0.
    plan, hidden = loss.plan, loss.hidden.to(loss.plan.sum_dtype)
    prediction, inverse_norm = None, torch.ones_like(hidden[:, 0])
    if plan.tempnet is None:
        tau = loss.constant(hidden)
    else:
        if plan.reads_logits and plan.tempnet.config.normalize_input:
            gram = plan.cache.gram(loss.weight, centred=plan.is_centred)
            squared_norm = torch.linalg.vecdot(hidden @ gram, hidden).clamp(min=0.0)
            inverse_norm = squared_norm.sqrt().clamp(min=1e-12).reciprocal()
        prediction = loss.predict(hidden, inverse_norm, None)
        tau = prediction.tau.detach().to(plan.sum_dtype)
    layer: dict[str, Any] = {"bias": loss.bias, "soft_cap": plan.soft_cap}
    statistics = softmax_statistics(loss.hidden, loss.weight, targets, tau, with_unit=plan.with_values, **layer)
    logits_scale = loss.add(slice(None), targets, tau, prediction, statistics.at_tau, statistics.at_one)
    if not loss.needs_logits_grad:
        return
    totals = loss.hidden_grad, loss.weight_grad, loss.bias_grad
    needs = loss.hidden_grad is not None, loss.weight_grad is not None, loss.bias_grad is not None
    gradients = softmax_gradients(
        loss.hidden, loss.weight, targets, tau, statistics, logits_scale, needs=needs, **layer
    )
    for total, gradient in zip(totals, gradients, strict=True):
        if total is not None and gradient is not None:
            total[: len(gradient)].copy_(gradient)


def _multiply_into(total: Tensor, left: Tensor, right: Tensor, *, add: bool = False) -> None:
    """Write the matrix product left·right to `total`, or add it: (m, k)·(k, n) → (m, n).

    If the product has another dtype than `total`, it is computed in blocks of rows in one small buffer, because
    copying a matrix as large as the output weight for every chunk would cost more than the product.
    """
    if left.dtype == total.dtype:
        total.addmm_(left, right, beta=1.0 if add else 0.0)
        return
    num_rows = max(_MIN_NUM_ROWS, _NUM_VALUES_AT_A_TIME // total.shape[1])
    product = left.new_empty(min(num_rows, len(total)), total.shape[1])
    for total_rows, left_rows in zip(total.split(num_rows), left.split(num_rows), strict=True):
        part = torch.mm(left_rows, right, out=product[: len(total_rows)])
        if add:
            total_rows.add_(part)
        else:
            total_rows.copy_(part)
