"""Sets up DeepSpeed: parameter groups with their own schedules, the ZeRO stage, and gathering of partitioned weights."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeAlias

import deepspeed
import torch
from accelerate import init_empty_weights
from deepspeed import DeepSpeedEngine
from deepspeed.utils import set_z3_leaf_module
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from jobs.engine.config import TrainingConfig
from jobs.engine.task import ParameterGroup, with_and_without_decay
from tempnet.weights import WeightFiles

# DeepSpeed would compile this extension for every process group on CPUs, although only its inference uses it. Compiling
# takes a minute, and a process killed meanwhile leaves a lock that all later runs would silently wait for.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

DEEPSPEED_CONFIGURATIONS = Path(__file__).parents[2] / "infra" / "deepspeed"


def deepspeed_config(config: TrainingConfig) -> dict[str, Any]:
    """Return the ZeRO stage's file of infra/deepspeed with this run's batch sizes, gradient clipping and offload."""
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


Part: TypeAlias = tuple[list[ParameterGroup], TrainingConfig]
"""The parameters of a run, and the configuration that its optimizer settings are taken from."""


def start_engine(module: nn.Module, parts: Sequence[Part], config: TrainingConfig) -> DeepSpeedEngine:
    """Start DeepSpeed with AdamW for a run, or under ZeRO 0 for several whose gradients are clipped by themselves."""
    optimizer, scheduler = make_optimizer(parts)
    # Ray has started the workers, whatever its own processes were started by: DeepSpeed would take these for its ranks.
    for name in [name for name in os.environ if name.startswith("OMPI_COMM_WORLD_")]:
        del os.environ[name]
    settings = deepspeed_config(config)
    is_whole = config.workers.zero_stage == 0
    if is_whole:  # clipped here, because DeepSpeed does not tell the norm
        settings["gradient_clipping"] = 0.0
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=optimizer, lr_scheduler=scheduler, config=settings, dist_init_required=False
    )
    if is_whole:

        def clip(*_: Any) -> None:
            engine.norms_of_runs = [
                nn.utils.clip_grad_norm_(
                    [parameter for group in groups for parameter in group["parameters"]],
                    own.optimizer.max_grad_norm or math.inf,
                )
                for groups, own in parts
            ]

        optimizer.register_step_pre_hook(clip)
    return engine


def gradient_norms(engine: Any) -> list[Any]:
    """Return the L2 norm of the gradient of every run in the last step, before clipping; empty if it is unknown."""
    if hasattr(engine, "norms_of_runs"):
        return list(engine.norms_of_runs)
    norm = engine.get_global_grad_norm()
    return [] if norm is None else [norm]


def make_optimizer(parts: Sequence[Part]) -> tuple[AdamW, LambdaLR]:
    """Return AdamW with the given groups, and the schedules of their learning rates."""
    groups: list[dict[str, Any]] = []
    schedules = []
    for number, (own, config) in enumerate(parts):
        settings = config.optimizer
        for group in with_and_without_decay(own, settings.weight_decay):
            groups.append({**group, "run": number, "betas": (settings.beta1, settings.beta2), "eps": settings.epsilon})
            is_own = group["name"] == "tempnet"
            warmup = settings.warmup_share_tempnet if is_own else None
            schedules.append(
                decay_with_warmup(
                    config.run.num_steps,
                    decay=settings.decay,
                    warmup_share=settings.warmup_share if warmup is None else warmup,
                    final_share=settings.final_share,
                    rest_share=settings.rest_share_tempnet if is_own else 0.0,
                )
            )
    # On CPUs, fused AdamW takes a tenth of the time of the default, which passes over memory a dozen times.
    optimizer = AdamW(groups, fused=True)
    return optimizer, LambdaLR(optimizer, schedules)


def whole_parameters(module: nn.Module, stage: int) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and buffer by name, whole and on the CPU; under ZeRO 3 all ranks must iterate."""
    for name, parameter in module.named_parameters():
        if stage == 3:
            with deepspeed.zero.GatheredParameters([parameter]):
                yield name, parameter.detach().cpu().clone()
        else:
            yield name, parameter.detach().cpu()
    for name, buffer in module.named_buffers():
        yield name, buffer.detach().cpu()


def decay_with_warmup(
    num_steps: int,
    *,
    decay: Literal["cosine", "linear"] = "cosine",
    warmup_share: float,
    final_share: float = 0.0,
    rest_share: float = 0.0,
) -> Callable[[int], float]:
    """Return a schedule: factor 0 during the rest, a linear warm-up to 1, then a decay to `final_share` at `num_steps`.

    The decay is half a cosine (TempNet Table 5) or linear (the slanted triangle of arXiv 1801.06146, as in DeCLUTR). In
    the warm-up, step s, counted from the end of the rest, has the factor (s + 1)/(number of warm-up steps).
    """
    num_rest, num_warmup = round(rest_share * num_steps), round(warmup_share * num_steps)
    num_decay = max(1, num_steps - num_rest - num_warmup)

    def factor(step: int) -> float:
        step -= num_rest
        if step < 0:
            return 0.0
        if step < num_warmup:
            return (step + 1) / num_warmup
        progress = min(1.0, (step - num_warmup) / num_decay)
        left = 1.0 - progress if decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return final_share + (1.0 - final_share) * left

    return factor


@contextmanager
def keeping_settings(optimizer: Any, schedule: LambdaLR) -> Iterator[None]:
    """Keep learning rates, weight decay and all other settings while the block loads moments and the schedule's step.

    A checkpoint holds the settings of the run that wrote it. The rates become those of the loaded step.
    """
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    peaks = list(schedule.base_lrs)
    yield
    schedule.base_lrs = peaks
    rates = [peak * factor(schedule.last_epoch) for peak, factor in zip(peaks, schedule.lr_lambdas, strict=True)]
    for group, own, rate in zip(optimizer.param_groups, settings, rates, strict=True):
        group.update(own, lr=rate)


# ---- a pretrained model under ZeRO 3 ---------------------------------------------------------------------------------
#
# The model is built on the device meta. Then rank 0 reads one weight after the other, and DeepSpeed sends it to all ranks,
# which keep their part of it, so that no process ever holds more than its part and one whole weight. `deepspeed.zero.Init` as
# a context would divide parameters as soon as they are made, and lose what Transformers writes into them later.


def base_without_weights(place: str | Path, *, trust_remote_code: bool = False, **options: Any) -> PreTrainedModel:
    """Return a base model whose parameters are on the device meta; its buffers have their values."""
    config = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code)
    with init_empty_weights(include_buffers=False):
        base: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, **options)
    base.tie_weights()  # every parameter was replaced by one of its own
    with suppress(OSError):
        base.generation_config = GenerationConfig.from_pretrained(place)
    return base.eval()


def gather_together(blocks: Iterable[nn.Module]) -> None:
    """Have ZeRO 3 gather all weights of a block before its `forward`; hooks of the layers in it would break its graph."""
    for block in blocks:
        set_z3_leaf_module(block, True)


def load_partitioned(
    model: PreTrainedModel, files: WeightFiles, deepspeed_config: dict[str, Any], *, rank: int
) -> None:
    """Give the parameters of a model on the device meta the values of files, divided among all ranks, which all call this."""
    # Until DeepSpeed knows the process group, the configuration that `zero.Init` reads takes the world to be one process.
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    names = files.match(model)
    if names is None:
        raise ValueError(f"{files.directory} lacks weights of the model, or has them in other shapes")
    stored = {id(parameter): names[name] for name, parameter in model.named_parameters()}
    filled: dict[int, nn.Parameter] = {}
    empty = list(model.parameters())  # kept, because the ids of dropped objects may be given to others
    # One place for all whole weights, one after the other: otherwise the parts that are kept would lie between those that are
    # freed, and the allocator could give hardly any memory back.
    place = torch.empty(max(value.numel() * value.element_size() for value in empty), dtype=torch.uint8)
    for part in list(model.modules()):
        for name, parameter in list(part._parameters.items()):
            if parameter is None or id(parameter) not in stored:
                continue
            if id(parameter) not in filled:
                size = parameter.numel() * parameter.element_size()
                whole = place[:size].view(parameter.dtype).view(parameter.shape)
                if rank == 0:
                    files.read_into(stored[id(parameter)], whole)
                filled[id(parameter)] = _divide(parameter, whole, deepspeed_config)
            part.register_parameter(name, filled[id(parameter)])
    del empty
    for name, buffer in model.named_buffers():
        if name in files.files:
            buffer.copy_(files.read(name))


def _divide(parameter: nn.Parameter, whole: Tensor, deepspeed_config: dict[str, Any]) -> nn.Parameter:
    """Return a parameter of ZeRO 3 with the value of rank 0; `whole` is free again afterwards."""
    holder = nn.Module()
    holder.weight = nn.Parameter(whole, requires_grad=parameter.requires_grad)
    deepspeed.zero.Init(module=holder, config_dict_or_path=deepspeed_config)
    divided: nn.Parameter = holder.weight
    return divided
