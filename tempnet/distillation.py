"""Distillation from a teacher whose predictions are given one entropy: the loss of a language model that learns from it.

The student q = softmax(z_S) learns from the teacher p_τ = softmax(z_T/τ) by

    KL(p_τ ‖ q) = Σ_v p_τ(v)·(log p_τ(v) − log q(v)),

with one temperature for each context. A *constant-entropy teacher* takes τ*(z_T), the temperature at which the entropy of
every p_τ is H₀ = log V − ρ (the oracle of TempNet, Baseline2), so that all contexts teach equally much; a constant τ is the
usual distillation (Hinton et al., arXiv 1503.02531, here with the student at τ = 1, whose own predictions are wanted).

Shapes: N tokens, V effective vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from tempnet.models.causal_lm import CausalLMOutput, TemperatureCausalLM, empty_output
from tempnet.oracle import optimal_temperature
from tempnet.softmax.config import TemperatureLossConfig
from tempnet.softmax.reference import IGNORE_INDEX

_NUM_LOGITS_PER_CHUNK = 1 << 22
"""Logits of the student, and as many of the teacher, that are computed at once (16 MiB each)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherTemperature:
    """The temperature of a teacher's predictions: neither or both of ρ and a positive τ raise ValueError."""

    rho: float | None = None
    """ρ = log V − H₀ in nats: every prediction gets the entropy H₀. None: the temperature is constant."""
    tau: float | None = None
    """The constant temperature; 1: the teacher's own predictions. None: the entropy is constant."""
    tau_min: float = 0.001
    """Lower bound τ₀ of the temperature at a constant entropy."""
    tau_max: float = 2.0
    """Upper bound τ_max of the temperature at a constant entropy."""

    def __post_init__(self) -> None:
        if (self.rho is None) == (self.tau is None):
            raise ValueError(f"rho = {self.rho} and tau = {self.tau}: give one of them")
        if self.tau is not None and not self.tau > 0.0:
            raise ValueError(f"tau = {self.tau:g} must be positive")

    def of(self, logits: Tensor) -> Tensor:
        """Return τ (n,) for the teacher's logits (n, V)."""
        if self.tau is not None:
            return torch.full(logits.shape[:-1], self.tau, dtype=logits.dtype, device=logits.device)
        assert self.rho is not None
        return optimal_temperature(logits, self.rho, self.tau_min, self.tau_max)


def teacher_divergence(student_logits: Tensor, teacher_logits: Tensor, tau: Tensor) -> Tensor:
    """Return KL(softmax(z_T/τ) ‖ softmax(z_S)) in nats for every row (n,), from z_S and z_T (n, V) and τ (n,).

    The teacher's logits and temperatures get no gradient.
    """
    log_p = torch.log_softmax(teacher_logits.detach() / tau.detach().unsqueeze(-1), dim=-1)
    log_q = torch.log_softmax(student_logits, dim=-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def distillation_loss(
    student_contexts: Tensor,
    teacher_contexts: Tensor,
    targets: Tensor,
    *,
    student_logits: Callable[[Tensor], Tensor],
    teacher_logits: Callable[[Tensor], Tensor],
    temperature: TeacherTemperature,
    vocab_size: int,
    num_targets: Tensor | float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return Σ KL(p_τ ‖ q) over the tokens that count, divided by their number, and the teacher's temperatures (N,).

    A chunk of logits exists at a time; the backward pass computes the student's again.

    Args:
        student_contexts, teacher_contexts: (N, …) what each computes its logits from, the teacher's without a graph.
        targets: (N,), IGNORE_INDEX for tokens that do not count.
        student_logits, teacher_logits: contexts (n, …) → logits (n, V) in float32.
        temperature, vocab_size: temperature of the teacher, and V.
        num_targets: divisor of the sum, if it is another.
    """
    num_rows = max(1, _NUM_LOGITS_PER_CHUNK // vocab_size)
    is_valid = targets != IGNORE_INDEX
    total = torch.zeros((), device=targets.device)
    temperatures = []

    def add_up(contexts: Tensor, logits: Tensor, tau: Tensor, counts: Tensor) -> Tensor:
        return torch.where(counts, teacher_divergence(student_logits(contexts), logits, tau), 0.0).sum()

    chunks = (part.split(num_rows) for part in (student_contexts, teacher_contexts, is_valid))
    for contexts, of_teacher, counts in zip(*chunks, strict=True):
        with torch.no_grad():
            logits = teacher_logits(of_teacher)
            tau = temperature.of(logits)
        temperatures.append(tau)
        total = total + checkpoint(add_up, contexts, logits, tau, counts, use_reentrant=False)
    divisor = is_valid.sum().clamp(min=1) if num_targets is None else num_targets
    return total / divisor, torch.cat(temperatures)


class DistilledCausalLM(TemperatureCausalLM):
    """Causal language model `base`, the student, whose loss in training mode is KL(teacher at τ ‖ base).

    In evaluation mode it is the cross-entropy at τ = 1 (`loss_config`, which also gives ρ and the range of τ for
    statistics). The teacher, a causal LM over the same tokens, is frozen and not a submodule: it is neither trained nor
    saved. Other arguments and errors are those of `TemperatureCausalLM`.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        teacher: PreTrainedModel,
        temperature: TeacherTemperature,
        loss_config: TemperatureLossConfig,
        *,
        vocab_size: int,
        attend_across_documents: bool = False,
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        common: dict[str, Any] = {
            "vocab_size": vocab_size,
            "attend_across_documents": attend_across_documents,
            "autocast_dtype": autocast_dtype,
        }
        super().__init__(base, None, loss_config, **common)
        self.temperature = temperature
        # In a tuple, so that it is no submodule.
        self._teacher = (TemperatureCausalLM(teacher, None, loss_config, freeze_base=True, **common).eval(),)

    @property
    def teacher(self) -> TemperatureCausalLM:
        """The teacher."""
        return self._teacher[0]

    def forward(
        self, input_ids: Tensor | None, position_ids: Tensor | None, targets: Tensor, **options: Any
    ) -> CausalLMOutput:
        """Compute the loss of one micro-batch; arguments and result are those of `TemperatureCausalLM.forward`.

        In training mode `tau` are the temperatures of the teacher; the statistics are those of the student.
        """
        assert input_ids is not None
        assert position_ids is not None
        if not self.training:
            return super().forward(input_ids, position_ids, targets, **options)
        teacher = self.teacher.to(input_ids.device)
        contexts = self.contexts(input_ids, position_ids).flatten(0, 1)
        with torch.no_grad():
            teacher_contexts = teacher.contexts(input_ids, position_ids).flatten(0, 1)
        loss, tau = distillation_loss(
            contexts,
            teacher_contexts,
            targets.flatten(),
            student_logits=self.context_logits,
            teacher_logits=teacher.context_logits,
            temperature=self.temperature,
            vocab_size=self.vocab_size,
            num_targets=options.get("num_targets"),
        )
        output = empty_output(loss, tau.view_as(targets), torch.zeros_like(tau).view_as(targets))
        if options.get("with_statistics"):
            with torch.no_grad():
                plain = super().forward(input_ids, position_ids, targets, with_statistics=True)
            output["statistics"], output["entropy"] = plain["statistics"], plain["entropy"]
            output["cross_entropy_tau"] = plain["cross_entropy_tau"]
        return output
