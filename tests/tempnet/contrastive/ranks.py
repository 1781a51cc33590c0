"""Run two steps of every loss on W gloo processes, each with its part of the batch; test_world.py starts this program.

    python -m tests.tempnet.contrastive.ranks <number of ranks> <directory>

Every rank writes its results to `rank-<r>.pt`: gradients times 1/W and summed over ranks are the gradients that an
average over ranks, as of DDP, would give.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from tempnet.contrastive.unimodal import UnimodalLoss
from tempnet.contrastive.world import World
from tests.tempnet.contrastive.cases import (
    NAMES,
    UNIMODAL_NAMES,
    make_batch,
    make_config,
    make_loss,
    make_unimodal_loss,
    run,
)

NUM_PAIRS = 16
ALL_NAMES = (*NAMES, *(f"unimodal {name}" for name in UNIMODAL_NAMES))


def two_steps(name: str, world: World, directory: Path) -> dict[str, Any]:
    """Return losses, this rank's embedding gradients, and parameter gradients averaged over the ranks.

    A name may be that of a loss, or "unimodal" and the name.
    """
    kind, _, base = name.rpartition(" ")
    make = make_unimodal_loss if kind else make_loss
    loss = make(make_config(base, tile_size=5), world=world).float()
    found: dict[str, Any] = {}
    for step in range(2):
        # 16 pairs with repeated ids and images, over the boundaries between ranks too.
        whole = make_batch(NUM_PAIRS, seed=7 + step)
        part = whole.to(torch.float32).part(world.part(NUM_PAIRS))
        loss.zero_grad()
        output = run(loss, part)
        found[f"loss {step}"] = output["loss"].detach()
        for key in ("tau", "log_u", "dual_gradient"):
            if output[key] is not None:  # type: ignore[literal-required]
                found[f"{key} {step}"] = output[key].T  # type: ignore[literal-required]
        assert part.image.grad is not None
        assert part.text.grad is not None
        found[f"image {step}"], found[f"text {step}"] = part.image.grad / world.size, part.text.grad / world.size
        for key, parameter in loss.named_parameters():
            assert parameter.grad is not None
            found[f"parameter {key} {step}"] = world.sum(parameter.grad.clone()) / world.size
    state = loss.bimodal.state if isinstance(loss, UnimodalLoss) else loss.state
    if state is not None:
        state.save(directory / name)
    return found


def work(rank: int, size: int, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=size)
    world = World.current()
    torch.save({name: two_steps(name, world, directory) for name in ALL_NAMES}, directory / f"rank-{rank}.pt")
    # All ranks must see a wrong id, whoever has it: no rank may be left waiting in a collective.
    part = make_batch(NUM_PAIRS).part(world.part(NUM_PAIRS))
    if rank == 0:
        part.ids[0] = 1_000_000
    try:
        run(make_loss(make_config("sogclr"), world=world), part)
    except ValueError as error:
        (directory / f"error-{rank}.txt").write_text(str(error))
    dist.destroy_process_group()


def whole(name: str, parts: list[dict[str, dict[str, Tensor]]]) -> dict[str, Tensor]:
    """Combine the results of all ranks: rows in the order of ranks, and numbers that all ranks share once."""
    keys = parts[0][name]
    return {
        key: parts[0][name][key]
        if key.startswith(("loss", "parameter"))
        else torch.cat([part[name][key] for part in parts])
        for key in keys
    }


if __name__ == "__main__":
    num_ranks, target = int(sys.argv[1]), Path(sys.argv[2])
    # This process is fresh and has only imported: a fork of it spares every rank its own import of torch.
    mp.start_processes(work, args=(num_ranks, target), nprocs=num_ranks, start_method="fork")
