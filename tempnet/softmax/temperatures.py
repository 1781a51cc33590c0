"""The temperatures of tokens in the logits-free loss, with the autograd graph of a TempNet's prediction.

Shapes: c tokens, d hidden size, V effective vocabulary, d1 width of TempNet's first layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tempnet.network import TempNet
from tempnet.oracle import optimal_temperature
from tempnet.softmax.plan import LossInputs, LossPlan


@dataclass(frozen=True, slots=True)
class NetworkGraph:
    """Autograd graph from W1 x to τ, and the quantities that W1 x was computed from."""

    product: Tensor
    """W1 x, a leaf of the graph: (c, d1)."""
    tau: Tensor
    """τ with its graph: (c,)."""
    inverse_norm: Tensor
    """1/‖L‖, or 1 if the input is not normalised: (c,)."""
    unit: Tensor | None
    """L/‖L‖ if W1 is applied to the logits, else None: (c, V)."""
    state: Tensor | None
    """The normalised hidden states if the network reads them, else None: (c, d)."""


def temperatures_from_logits(
    plan: LossPlan, inputs: LossInputs, hidden: Tensor, logits: Tensor, *, with_graph: bool
) -> tuple[Tensor, NetworkGraph | None]:
    """Compute τ of the tokens of a chunk.

    Args:
        plan: plan of the call.
        inputs: tensors of the call.
        hidden: (c, d) hidden states of the chunk.
        logits: (c, V) logits of the chunk; they may be shifted in place, by one constant per row.
        with_graph: whether the prediction of a TempNet will be differentiated.

    Returns:
        τ (c,) and, if a TempNet predicts it, the graph of the prediction.
    """
    source, config, tempnet = plan.config.kind.temperature, plan.config, plan.tempnet
    if source == "oracle":
        return optimal_temperature(logits, config.rho, config.tau_min, config.tau_max), None
    if tempnet is None:
        return logits.new_full(logits.shape[:1], config.tau if source == "given" else 1.0), None
    shift_logits(tempnet, logits)
    inverse_norm = invert_norms(tempnet, logits)
    unit = logits * inverse_norm.unsqueeze(-1) if needs_unit(plan, inputs) else None
    return predict_temperatures(plan, inputs, hidden, inverse_norm, unit, with_graph=with_graph)


def shift_logits(tempnet: TempNet, logits: Tensor) -> None:
    """Shift logits (c, V) in place as a network reads them, which does not change the softmax."""
    if tempnet.config.reads_logits and (offset := tempnet.input_offset(logits)) is not None:
        logits.sub_(offset)


def invert_norms(tempnet: TempNet, logits: Tensor) -> Tensor:
    """Return 1/‖L‖ (c,) of shifted logits (c, V), or 1 if the network's input is not normalised."""
    if not (tempnet.config.reads_logits and tempnet.config.normalize_input):
        return torch.ones_like(logits[:, 0])
    return 1.0 / torch.linalg.vector_norm(logits, dim=-1).clamp(min=1e-12)


def needs_unit(plan: LossPlan, inputs: LossInputs) -> bool:
    """Return whether W1 is applied to the logits, and not folded."""
    return plan.tempnet is not None and plan.tempnet.config.reads_logits and inputs.folded is None


def predict_temperatures(
    plan: LossPlan,
    inputs: LossInputs,
    hidden: Tensor,
    inverse_norm: Tensor,
    unit: Tensor | None,
    *,
    with_graph: bool,
) -> tuple[Tensor, NetworkGraph]:
    """Predict τ (c,) from hidden states (c, d), 1/‖L‖ (c,) and, if :func:`needs_unit` says so, L/‖L‖ (c, V)."""
    product: Tensor | None = None
    if inputs.folded is not None:
        product = (hidden.to(plan.sum_dtype) @ inputs.folded.T) * inverse_norm.unsqueeze(-1)
    elif unit is not None:
        product = unit @ inputs.parameters[0].to(plan.sum_dtype).T
    return _predict(plan, hidden, product, inverse_norm, unit, with_graph=with_graph)


def temperatures_from_hidden(
    plan: LossPlan, inputs: LossInputs, *, with_graph: bool
) -> tuple[Tensor, NetworkGraph | None]:
    """Compute τ (N,) of all tokens without their logits, for losses whose τ is a constant or comes from the fold.

    The arguments and the result are those of :func:`temperatures_from_logits`.
    """
    hidden = inputs.hidden.to(plan.sum_dtype)
    if plan.tempnet is None:
        return hidden.new_full(
            hidden.shape[:1], plan.config.tau if plan.config.kind.temperature == "given" else 1.0
        ), None
    inverse_norm = torch.ones_like(hidden[:, 0])
    if not plan.tempnet.config.reads_logits:
        return _predict(plan, hidden, None, inverse_norm, None, with_graph=with_graph)
    assert plan.fold is not None
    assert inputs.folded is not None
    if plan.tempnet.config.normalize_input:
        gram = plan.fold.gram(inputs.weight, centred=plan.is_centred)
        squared_norm = torch.linalg.vecdot(hidden @ gram, hidden).clamp(min=0.0)
        inverse_norm = squared_norm.sqrt().clamp(min=1e-12).reciprocal()
    product = (hidden @ inputs.folded.T) * inverse_norm.unsqueeze(-1)
    return _predict(plan, hidden, product, inverse_norm, None, with_graph=with_graph)


def _predict(
    plan: LossPlan,
    hidden: Tensor,
    product: Tensor | None,
    inverse_norm: Tensor,
    unit: Tensor | None,
    *,
    with_graph: bool,
) -> tuple[Tensor, NetworkGraph]:
    """Return τ (c,) for W1 x (`product`; None if logits are not read), with the autograd graph from there to τ.

    What the network reads of the hidden states (c, d) is added to the product.
    """
    tempnet = plan.tempnet
    assert tempnet is not None
    with torch.set_grad_enabled(with_graph), torch.autocast(hidden.device.type, enabled=False):
        state: Tensor | None = None
        if tempnet.config.reads_state:
            with torch.no_grad():
                state = tempnet.normalize_state(hidden)
                part = tempnet.state_product(state)
                product = part if product is None else product.to(part.dtype) + part
        assert product is not None
        product = product.to(tempnet.first_layer.weight.dtype).detach().requires_grad_()
        tau = tempnet.from_first_product(product)
    return tau.detach().to(plan.sum_dtype), NetworkGraph(product, tau, inverse_norm, unit, state)
