"""Compute what one rank of W computes of a batch that all ranks share, for `test_contrastive_ranks.py`."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tempnet import TempNet, TempNetConfig
from tempnet.contrastive.losses import LOSS_KINDS, ContrastiveLoss, ContrastiveLossConfig
from tempnet.contrastive.state import SampleState
from tempnet.contrastive.world import World
from tempnet.models.batch_norm import SynchronizedBatchNorm
from tempnet.models.temperature_dual_encoder import TemperatureDualEncoder
from tests.tempnet.models.tiny_towers import random_batch, tiny_encoder

NUM_PAIRS, NUM_STEPS = 8, 2
DTYPES = {"float32": torch.float32, "float64": torch.float64}
LOSSES = [(name, dtype) for name in ("clip", "sogclr", "tempnet") for dtype in DTYPES]
# Shape, shift of the input (far from 0, where sums of squares lose everything), dtype, momentum, affine.
NORMS = {
    "rows": ((7, 5), 0.0, torch.float64, 0.1, True),
    "images": ((7, 5, 3, 2), 0.0, torch.float32, 0.1, True),
    "far from zero": ((7, 5, 3, 2), 3000.0, torch.float32, 0.1, True),
    "running average": ((7, 5, 3, 2), 1.0, torch.float64, None, True),
    "without weights": ((7, 5, 3, 2), 1.0, torch.float64, 0.1, False),
    "bfloat16": ((7, 5, 3, 2), 1.0, torch.bfloat16, 0.1, True),
    "colours last": ((7, 5, 3, 2), 1.0, torch.float32, 0.1, True),
}


def norm_case(name: str, rows: slice, norm_class: type[nn.Module] = SynchronizedBatchNorm) -> dict[str, Tensor]:
    """Run three batches through one batch norm; return the last output, its gradients, and the final statistics."""
    shape, shift, dtype, momentum, is_affine = NORMS[name]
    torch.manual_seed(0)
    norm = norm_class(shape[1], momentum=momentum, affine=is_affine)
    norm = norm.to(torch.float32 if dtype == torch.bfloat16 else dtype)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    for _ in range(3):
        whole = (
            torch.randn(shape, dtype=torch.float64) * torch.arange(1.0, 6.0).view(-1, *[1] * (len(shape) - 2))
        ) + shift
        x = whole.to(dtype)[rows].requires_grad_()
        if name == "colours last":
            x = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
        weight = torch.randn(shape, dtype=torch.float64).to(dtype)[rows]
        norm.zero_grad()
        y = norm(x)
        (y * weight + y.square()).sum().backward()
    values = {"y": y.detach(), "x.grad": x.grad, **{k: v for k, v in norm.state_dict().items() if "running" in k}}
    return values | {f"{key}.grad": parameter.grad for key, parameter in norm.named_parameters()}


def make_module(name: str, dtype: torch.dtype, world: World, *, freeze_encoder: bool = False) -> TemperatureDualEncoder:
    encoder = tiny_encoder()
    config = ContrastiveLossConfig.for_name(name, rho=1.2)
    tempnets = {}
    if LOSS_KINDS[name].temperature == "tempnet":
        settings = TempNetConfig.for_embeddings(6, rho=1.2, hidden_size=5, num_prototypes=4)
        tempnets = {f"{modality}_tempnet": TempNet(settings) for modality in ("image", "text")}
    state = SampleState(20, config.state_columns, world=world) if config.state_columns else None
    loss = ContrastiveLoss(config, **tempnets, state=state, world=world)
    module = TemperatureDualEncoder(encoder, loss, freeze_encoder=freeze_encoder)
    if tempnets:
        module.init_prototypes(*nn.functional.normalize(torch.randn(2, 4, 6), dim=-1))
    return module.to(dtype)


def pairs(step: int, rows: slice) -> dict[str, Tensor]:
    """Return the pairs in these rows; two of the pairs share their image."""
    ids = (torch.arange(NUM_PAIRS) * 3 + step) % 20
    batch = {**random_batch(NUM_PAIRS, seed=step), "ids": ids, "image_ids": torch.where(ids == ids[1], ids[0], ids)}
    return {key: value[rows] for key, value in batch.items()}


def loss_case(name: str, dtype: str, world: World) -> dict[str, Tensor]:
    """Run two steps without an optimizer between them; return losses, gradients and buffers."""
    module = make_module(name, DTYPES[dtype], world)
    values = {}
    for step in range(NUM_STEPS):
        module.zero_grad()
        output = module(**pairs(step, world.part(NUM_PAIRS)), gamma=0.7)
        output["loss"].backward()
        values |= {f"loss.{step}": output["loss"].detach(), f"tau.{step}": output["tau"]}
    values |= {f"buffer.{key}": value for key, value in module.named_buffers()}
    return values | {f"grad.{key}": parameter.grad for key, parameter in module.named_parameters()}


def run_rank(rank: int, size: int, directory: str) -> None:
    """Run all cases on one rank, and write the results to `<directory>/<rank>.pt`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=size)
    rows = [slice(0, 5), slice(5, 7)][rank]  # unequal parts
    values: dict[str, dict[str, Tensor]] = {name: norm_case(name, rows) for name in NORMS}
    for name, dtype in LOSSES:
        values[f"{name} {dtype}"] = loss_case(name, dtype, World.current())
    torch.save(values, Path(directory) / f"{rank}.pt")
    dist.destroy_process_group()
