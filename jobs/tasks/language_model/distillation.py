"""The section of a configuration that names a model to learn from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jobs.engine.fields import PATH, added_later

DISTIL = "distil"
"""Name of the loss with which a model learns from another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationSection:
    """The teacher of the loss distil (`tempnet.distillation`)."""

    teacher: str = field(default="", metadata=PATH | added_later(""))
    """Directory, URI or hub name of the Transformers causal LM to learn from. It has the tokenizer of the run."""
    keep: Literal["entropy", "temperature"] = field(default="entropy", metadata=added_later("entropy"))
    """What is the same for all predictions of the teacher. entropy: that of temperature.target_entropy, or log V − ρ of
    temperature.rho. temperature: temperature.tau; at 1 the teacher's predictions are used as they are."""

    def check(self, loss: str, *, has_entropy: bool, zero_stage: int) -> None:
        """Check that the section fits to the rest of the configuration.

        Args:
            loss: name of the loss.
            has_entropy: whether the entropy of the teacher's predictions is given.
            zero_stage: DeepSpeed's ZeRO stage.

        Raises:
            ValueError: if it does not; the message names the fields.
        """
        if (loss == DISTIL) != bool(self.teacher):
            raise ValueError(
                f"temperature.loss = {loss!r} and distillation.teacher = {self.teacher!r}: the loss {DISTIL} needs a teacher "
                "to learn from, and no other loss has one"
            )
        if loss != DISTIL:
            return
        if zero_stage == 3:
            raise ValueError(
                f"workers.zero_stage = 3 divides the model's weights, which the loss {DISTIL} reads in parts: choose 0, 1 or "
                "2"
            )
        if self.keep == "entropy" and not has_entropy:
            raise ValueError(
                "distillation.keep = 'entropy' needs temperature.target_entropy or temperature.rho: the entropy of the "
                "teacher's predictions"
            )
