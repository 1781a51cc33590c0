"""The model that a language model learns from by the loss distil."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import PreTrainedModel

from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.language_model.distillation import DistillationSection
from pipelines.local_copy import local_copy
from tempnet.base_model import load_base
from tempnet.distillation import TeacherTemperature


def as_base(config: LanguageModelConfig) -> LanguageModelConfig:
    """Return the configuration of a run that trains the teacher itself, so that it can be checked like any base model."""
    return replace(
        config,
        model=replace(config.model, path=config.distillation.teacher, freeze=False),
        temperature=replace(config.temperature, loss="ce"),
        distillation=DistillationSection(),
    )


def load_teacher(config: LanguageModelConfig) -> PreTrainedModel:
    """Load the teacher; with bf16 precision in bfloat16."""
    is_half = config.workers.resolved_precision == "bf16"
    return load_base(
        local_copy(config.distillation.teacher),
        fetch=local_copy,
        dtype=torch.bfloat16 if is_half else torch.float32,
        trust_remote_code=config.model.trust_remote_code,
        attn_implementation=config.model.attention,
    )


def teacher_temperature(config: LanguageModelConfig, rho: float) -> TeacherTemperature:
    """Return the temperature of the teacher's predictions.

    Args:
        config: configuration of the run.
        rho: ρ of the run in nats.
    """
    settings = config.temperature
    if config.distillation.keep == "temperature":
        return TeacherTemperature(tau=settings.tau)
    tau_min, tau_max = settings.tau_range
    return TeacherTemperature(rho=rho, tau_min=tau_min, tau_max=tau_max)
