"""DeepSpeed around the module: parameter groups with schedules of their own, ZeRO stage, and gathering the weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor, nn

from jobs.training.config import LanguageModelConfig
from jobs.training.schedules import cosine_with_warmup
from tempnet.models.causal_lm import TemperatureCausalLM

DEEPSPEED_CONFIGURATIONS = Path(__file__).parents[2] / "infra" / "deepspeed"


def deepspeed_config(config: LanguageModelConfig) -> dict[str, Any]:
    """The stage's file in infra/deepspeed with this run's batch arithmetic, clipping and offload."""
    workers = config.workers
    values = json.loads((DEEPSPEED_CONFIGURATIONS / f"zero{workers.zero_stage}.json").read_text())
    if workers.offload_optimizer:
        values["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    return values | {
        "train_batch_size": config.optimizer.batch_size,
        "train_micro_batch_size_per_gpu": config.micro_batch_size,
        "gradient_accumulation_steps": config.num_accumulation_steps,
        "gradient_clipping": config.optimizer.max_grad_norm,
        "steps_per_print": 1 << 60,
    }


def parameter_groups(module: TemperatureCausalLM, config: LanguageModelConfig) -> list[dict[str, Any]]:
    """Base and TempNet, each with and without weight decay (none for vectors and scalars: biases, norms, φ, b, w3)."""
    settings = config.optimizer
    groups = []
    for name, part, rate in (
        ("base", module.base, settings.learning_rate_base),
        ("tempnet", module.tempnet, settings.learning_rate_tempnet),
    ):
        parameters = [parameter for parameter in part.parameters() if parameter.requires_grad] if part else []
        for decay, members in (
            (settings.weight_decay, [parameter for parameter in parameters if parameter.ndim >= 2]),
            (0.0, [parameter for parameter in parameters if parameter.ndim < 2]),
        ):
            if members:
                groups.append({"name": name, "params": members, "lr": rate, "weight_decay": decay})
    return groups


def start_engine(module: TemperatureCausalLM, config: LanguageModelConfig) -> DeepSpeedEngine:
    """DeepSpeed with AdamW and one cosine schedule a group."""
    settings = config.optimizer
    groups = parameter_groups(module, config)
    optimizer = torch.optim.AdamW(groups, betas=(settings.beta1, settings.beta2), eps=settings.epsilon)
    factor = cosine_with_warmup(
        config.run.num_steps, warmup_share=settings.warmup_share, final_share=settings.final_share
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [factor] * len(groups))
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        config=deepspeed_config(config),
        dist_init_required=False,
    )
    return engine


def whole_parameters(module: nn.Module, stage: int) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer of the module by name, whole, on the CPU; under ZeRO-3 all ranks must take part."""
    for name, parameter in module.named_parameters():
        if stage == 3:
            with deepspeed.zero.GatheredParameters([parameter]):
                yield name, parameter.detach().cpu().clone()
        else:
            yield name, parameter.detach().cpu()
    for name, buffer in module.named_buffers():
        yield name, buffer.detach().cpu()
