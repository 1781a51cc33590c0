"""A causal language model that learns from another one, its teacher, in one module whose forward returns the loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tempnet.distillation import TeacherTemperature, distillation_loss
from tempnet.models.causal_lm import CausalLMOutput, TemperatureCausalLM
from tempnet.softmax.config import TemperatureLossConfig


class DistilledCausalLM(TemperatureCausalLM):
    """Causal language model `base` whose loss in training mode is KL(teacher at τ ‖ base), see `tempnet.distillation`.

    In evaluation mode it is the cross-entropy at τ = 1. The teacher is not a submodule: it is neither trained nor saved, and
    every process holds all of it.

    Args:
        base: the student.
        teacher: a causal LM over the same tokens, which is frozen.
        temperature: temperature of the teacher.
        loss_config: the loss in evaluation mode, and ρ and the range of τ for statistics.
        vocab_size: the effective vocabulary V.
        attend_across_documents: whether a token may attend to the packed documents before its own.
        autocast_dtype: dtype of the matrix products.

    Raises:
        ValueError: if the vocabularies do not fit together.
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
        """Compute the loss of one micro-batch; arguments and result are those of `TemperatureCausalLM.forward`.

        In training mode `tau` are the temperatures of the teacher; the statistics are those of the student.
        """
        assert input_ids is not None
        assert position_ids is not None
        if not self.training:
            return super().forward(
                input_ids,
                position_ids,
                targets,
                num_targets=num_targets,
                with_statistics=with_statistics,
                oracle_rows=oracle_rows,
                num_profile_nodes=num_profile_nodes,
            )
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
            num_targets=num_targets,
        )
        output: CausalLMOutput = {
            "loss": loss,
            "tau": tau.view_as(targets),
            "slopes": torch.zeros_like(tau).view_as(targets),
            "statistics": None,
            "entropy": None,
            "cross_entropy_tau": None,
            "profiles": None,
        }
        if with_statistics:
            with torch.no_grad():
                plain = super().forward(input_ids, position_ids, targets, with_statistics=True)
            output["statistics"], output["entropy"] = plain["statistics"], plain["entropy"]
            output["cross_entropy_tau"] = plain["cross_entropy_tau"]
        return output
