"""A Transformers causal language model, its TempNet and its loss in one module whose forward returns the loss.

With DeepSpeed the loss must be computed inside the wrapped module's forward, because only there the output weight is
complete under every ZeRO stage. It is computed from the hidden states, without storing logits (`tempnet.softmax.linear`),
wherever model and TempNet allow it.

Shapes: B blocks, T tokens per block, d hidden size, V effective vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tempnet.headroom.profile import Profiles
from tempnet.models.output_head import OutputHead, StoredBase, find_output_head, output_weight
from tempnet.models.packing import packed_inputs, takes_document_mask
from tempnet.network import TempNet
from tempnet.oracle import optimal_temperature
from tempnet.softmax.config import TemperatureLossConfig
from tempnet.softmax.fold import FoldCache
from tempnet.softmax.linear import (
    LinearLoss,
    NetworkLoss,
    linear_language_model_losses,
    supports,
)
from tempnet.softmax.reference import IGNORE_INDEX, language_model_loss, token_slopes
from tempnet.statistics import TokenValues, token_statistics

_NUM_ORACLE_TOKENS = 256
NUM_PROFILED_LOGITS = 1 << 24
"""Number of logits from which profiles are computed at a time (float32: 64 MiB per copy, of which there are five)."""


NUM_LIKELIEST = 3
"""Number of the likeliest tokens of a prediction that are shown to a person."""


class CausalLMOutput(TypedDict):
    """Result of the forward pass; a plain dict, because DeepSpeed's ZeRO-3 hooks search dicts for tensors."""

    loss: Tensor
    """Sum of the losses over valid targets, divided by num_targets; a scalar."""
    tau: Tensor
    """Temperatures, detached: (B, T)."""
    slopes: Tensor
    """∂loss/∂τ of every token, detached, 0 where the target is ignored: (B, T)."""
    statistics: Tensor | None
    """Sums of `tempnet.statistics.TemperatureStatistics`; None if statistics were not requested."""
    entropy: Tensor | None
    """Entropies of the predictions at τ = 1 in nats: (B, T); None if statistics were not requested."""
    cross_entropy_tau: Tensor | None
    """Cross-entropies at τ in nats, 0 where the target is ignored: (B, T); None if statistics were not requested."""
    profiles: tuple[Tensor, Tensor, Tensor, Tensor] | None
    """Profiles of the N valid tokens (`tempnet.headroom.profile.Profiles`), values (N, J, 3) and targets (N,), and their
    three largest L − max L with the ids of these tokens, (N, 3) each; None if no nodes were requested."""


def empty_output(loss: Tensor, tau: Tensor, slopes: Tensor) -> CausalLMOutput:
    """Return the result of a forward pass without statistics."""
    return {
        "loss": loss,
        "tau": tau,
        "slopes": slopes,
        "statistics": None,
        "entropy": None,
        "cross_entropy_tau": None,
        "profiles": None,
    }


class TemperatureCausalLM(nn.Module):
    """Causal language model `base` with the loss of `loss_config`; `tempnet` predicts τ if the loss needs it.

    Args:
        base: any Transformers causal LM in which packed documents can be kept apart (`tempnet.models.packing`), or its
            output layer, if the forward pass gets stored hidden states.
        tempnet: the temperature network; None for losses without one.
        loss_config: which loss, ρ, and the range of τ.
        vocab_size: the effective vocabulary V; logits of padding beyond it are removed.
        freeze_base: whether the base stays in eval mode (its dropout would add noise to TempNet's input), runs without a
            graph, and is not trained.
        attend_across_documents: whether a token may attend to the packed documents before its own.
        autocast_dtype: dtype of the base's matrix products; parameters, TempNet and loss stay in float32.
        materialize: whether to compute and store all logits even where that is not necessary, as the reference.

    `fold_cache` is None, or a cache that keeps W1·W over the micro-batches of a step; the code that sets it must clear it
    after every step. Vocabularies of base, TempNet and tokenizer that do not fit together, a missing TempNet, and one
    that needs all logits although only hidden states are stored, raise ValueError.
    """

    def __init__(
        self,
        base: PreTrainedModel | StoredBase,
        tempnet: TempNet | None,
        loss_config: TemperatureLossConfig,
        *,
        vocab_size: int,
        freeze_base: bool = False,
        attend_across_documents: bool = False,
        autocast_dtype: torch.dtype | None = None,
        materialize: bool = False,
    ) -> None:
        super().__init__()
        num_logits = base.get_output_embeddings().weight.shape[0]
        if vocab_size > num_logits:
            raise ValueError(
                f"the tokenizer has {vocab_size} tokens, more than the {num_logits} logits of the base model"
            )
        if tempnet is not None and tempnet.config.input_size != vocab_size:
            raise ValueError(
                f"the TempNet was built for a vocabulary of {tempnet.config.input_size}, "
                f"the base model's effective vocabulary is {vocab_size}"
            )
        if loss_config.kind.temperature == "tempnet" and tempnet is None:
            raise ValueError(f"the loss {loss_config.name!r} needs a TempNet")
        self.base: Any = base  # a model or its output layer
        self.tempnet = tempnet
        self.loss_config = loss_config
        self.vocab_size = vocab_size
        self.freeze_base = freeze_base
        self.attend_across_documents = attend_across_documents
        self.takes_mask = not isinstance(base, StoredBase) and not attend_across_documents and takes_document_mask(base)
        self.autocast_dtype = autocast_dtype
        self.fold_cache: FoldCache | None = None
        is_linear = tempnet is None or supports(tempnet)
        self.head: OutputHead | None = None
        if isinstance(base, StoredBase):
            if not is_linear or materialize:
                raise ValueError(
                    "stored hidden states (model.features) need a TempNet with a transform layer and a detached input"
                )
            self.head = base.head
        elif is_linear and not materialize:
            self.head = find_output_head(base)
        if tempnet is not None and tempnet.config.reads_state and self.head is None:
            raise ValueError(
                f"this TempNet reads hidden states (kind = {tempnet.config.kind!r}), which needs a base model whose logits "
                "are computed from its last hidden state, and no materialised logits: let it read the logits"
            )
        if freeze_base:
            base.requires_grad_(False)
        self.train()

    def train(self, mode: bool = True) -> TemperatureCausalLM:
        super().train(mode)
        if self.freeze_base:
            self.base.eval()
        return self

    def logits(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Return logits (B, T, V) of tokens and positions (B, T); positions restart at 0 with every document."""
        return self._run(self.base, input_ids, position_ids).logits[..., : self.vocab_size]

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        targets: Tensor,
        *,
        hidden: Tensor | None = None,
        num_targets: Tensor | float | None = None,
        with_statistics: bool = False,
        oracle_rows: Tensor | None = None,
        num_profile_nodes: int = 0,
    ) -> CausalLMOutput:
        """Compute the loss of one micro-batch.

        Args:
            input_ids: (B, T) input tokens; None with `hidden`.
            position_ids: (B, T) positions, which restart at 0 with every document; None with `hidden`.
            targets: (B, T) targets, already shifted; IGNORE_INDEX for tokens without one.
            hidden: (B, T, d) stored hidden states; None: the base computes them.
            num_targets: divisor of the sum over tokens, which should be the number of valid targets of the global
                batch. By default it is the number of valid targets of this call.
            with_statistics: whether to return statistics.
            oracle_rows: (B, T) bool, the valid tokens for which the statistics contain the optimal τ*; None: the first 256.
            num_profile_nodes: J, the number of nodes of the tokens' profiles; 0: without profiles. Needs statistics.
        """
        [output] = _outputs(
            [self],
            input_ids,
            position_ids,
            targets,
            [num_profile_nodes],
            hidden=hidden,
            num_targets=num_targets,
            with_statistics=with_statistics,
            oracle_rows=oracle_rows,
        )
        return output

    def _losses(
        self,
        modules: Sequence[TemperatureCausalLM],
        contexts: Tensor,
        targets: Tensor,
        num_targets: Tensor | float | None,
        with_values: bool,
    ) -> list[LinearLoss]:
        """Compute the losses of modules on this base from hidden states (N, d) or, as the reference, from logits (N, V)."""
        if self.head is None:
            losses = []
            for one in modules:
                loss, tau = language_model_loss(
                    contexts, targets, one.loss_config, one.tempnet, num_targets=num_targets
                )
                values = TokenValues.from_logits(contexts, targets, tau) if with_values else None
                losses.append(LinearLoss(loss, tau, values, token_slopes(contexts, targets, tau, one.loss_config)))
            return losses
        weight, bias = output_weight(self.base)  # after the body, which frees a tied weight under ZeRO-3
        if isinstance(self.base, StoredBase):
            contexts = contexts.to(weight.dtype)
        return linear_language_model_losses(
            self.head.scaled(contexts),
            weight,
            targets,
            [NetworkLoss(one.loss_config, one.tempnet, one.fold_cache) for one in modules],
            vocab_size=self.vocab_size,
            bias=bias if bias is None or self.head.scale == 1.0 else bias * self.head.scale,
            soft_cap=self.head.soft_cap,
            num_targets=num_targets,
            with_values=with_values,
            matmul_dtype=self.autocast_dtype,
        )

    @torch.no_grad()
    def profiles(self, contexts: Tensor, targets: Tensor, num_nodes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return `CausalLMOutput.profiles` of N tokens, from some of their logits at a time."""
        is_valid = targets != IGNORE_INDEX
        size = max(1, NUM_PROFILED_LOGITS // self.vocab_size)
        parts = []
        for some, wanted in zip(contexts[is_valid].split(size), targets[is_valid].split(size), strict=True):
            logits = self.context_logits(some)
            top, ids = logits.topk(min(NUM_LIKELIEST, self.vocab_size))
            profiles = Profiles.of_logits(logits, wanted, num_nodes=num_nodes)
            parts.append((profiles.values, profiles.target, top - top[:, :1], ids))
        values, target, top, ids = map(torch.cat, zip(*parts, strict=True))
        return values, target, top, ids

    def contexts(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Return hidden states (B, T, d) or materialised logits (B, T, V), from which :meth:`context_logits` computes."""
        if self.head is None:
            return self.logits(input_ids, position_ids)
        hidden: Tensor = self._run(self.base.base_model, input_ids, position_ids)[0]
        return hidden

    def context_logits(self, contexts: Tensor) -> Tensor:
        """Return logits (n, V) in float32 for n representations from :meth:`contexts`, (n, d or V)."""
        if self.head is None:
            return contexts.float()
        with self._autocast(contexts.device.type):
            return self.head.logits(self.base, contexts, self.vocab_size).float()

    def _autocast(self, device: str) -> torch.autocast:
        # A weight is used once in a forward pass. Autocast's cache would hold copies of all weights to its end, even where
        # activation checkpointing and ZeRO 3 keep those of one layer only.
        is_half = self.autocast_dtype is not None
        return torch.autocast(device, dtype=self.autocast_dtype, enabled=is_half, cache_enabled=False)

    def _run(self, part: nn.Module, input_ids: Tensor, position_ids: Tensor) -> Any:
        """Run the base, or its body (which ends at the hidden states), with masks or positions for packed documents."""
        inputs: dict[str, Any] = {"attention_mask": None}
        if self.attend_across_documents:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        else:
            inputs = packed_inputs(position_ids, self.base.config._attn_implementation, takes_mask=self.takes_mask)
        graph = torch.no_grad() if self.freeze_base else contextlib.nullcontext()
        with self._autocast(input_ids.device.type), graph:
            return part(input_ids=input_ids, position_ids=position_ids, use_cache=False, **inputs)


class SideBySideCausalLM(nn.ModuleList):
    """Modules :class:`TemperatureCausalLM` with the same frozen base, and a TempNet and a loss of their own.

    The hidden states and the logits of a micro-batch are computed once for all of them.
    """

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        targets: Tensor,
        *,
        num_profile_nodes: Sequence[int] = (),
        **options: Any,
    ) -> list[CausalLMOutput]:
        """Return the output of every module; the arguments are those of one, with a number of nodes for each."""
        modules: Any = self
        nodes = num_profile_nodes or [0] * len(modules)
        return _outputs(modules, input_ids, position_ids, targets, nodes, **options)


def _outputs(
    modules: Sequence[TemperatureCausalLM],
    input_ids: Tensor | None,
    position_ids: Tensor | None,
    targets: Tensor,
    nodes: Sequence[int],
    *,
    hidden: Tensor | None = None,
    num_targets: Tensor | float | None = None,
    with_statistics: bool = False,
    oracle_rows: Tensor | None = None,
) -> list[CausalLMOutput]:
    """Return the output of every module on a base, with a number of nodes for each; see `TemperatureCausalLM.forward`."""
    first, flat, outputs = modules[0], targets.flatten(), []
    if hidden is None:
        assert input_ids is not None
        assert position_ids is not None
        hidden = first.contexts(input_ids, position_ids)
    contexts = hidden.flatten(0, 1)
    losses = first._losses(modules, contexts, flat, num_targets, with_statistics)
    if with_statistics:
        is_valid = flat != IGNORE_INDEX
        chosen = is_valid & (is_valid.cumsum(0) <= _NUM_ORACLE_TOKENS) if oracle_rows is None else oracle_rows.flatten()
        with torch.no_grad():
            logits = first.context_logits(contexts[chosen])
        profiles = {number: first.profiles(contexts, flat, number) for number in {*nodes} - {0}}
        oracle = functools.cache(optimal_temperature)  # every ρ and range is solved once
    for module, found, number in zip(modules, losses, nodes, strict=True):
        tau, config = found.tau.detach(), module.loss_config
        output = empty_output(found.loss, tau.view_as(targets), found.slopes.view_as(targets))
        if (values := found.values) is not None:
            output["statistics"] = token_statistics(
                values,
                flat,
                tau,
                vocab_size=module.vocab_size,
                rho=config.rho,
                tau_min=config.tau_min,
                tau_max=config.tau_max,
                oracle_rows=chosen,
                oracle_logits=logits,
                oracle=oracle,
            ).sums
            output["entropy"] = values.entropy.view_as(targets)
            output["cross_entropy_tau"] = values.cross_entropy_tau.view_as(targets)
            output["profiles"] = profiles.get(number)
        outputs.append(output)
    return outputs


def compile_blocks(model: PreTrainedModel, *, backend: str = "inductor") -> nn.ModuleList:
    """Compile the `forward` of every transformer block in place by `torch.compile`, and return the blocks.

    They are the model's largest `nn.ModuleList`; a model without one raises ValueError. Names and types of the modules stay
    the same, so that checkpoints and exports do. The blocks share one graph, because TorchDynamo takes the weights of a
    module as inputs: only the first block of the first step is compiled, once for training and once for validation. Hooks of
    a block stay outside of the graph. Losses, embeddings and the output layer are not compiled: the losses have kernels of
    their own.
    """
    lists = [module for module in model.base_model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise ValueError(
            f"a model of type {model.config.model_type!r} has no list of transformer blocks to compile: set "
            "workers.compile = 'off'"
        )
    blocks = max(lists, key=lambda blocks: sum(parameter.numel() for parameter in blocks.parameters()))
    for block in blocks:
        block.forward = torch.compile(block.forward, dynamic=False, backend=backend)
    return blocks
