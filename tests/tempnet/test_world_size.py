"""World-size invariance: three gloo processes with their parts of a batch compute what one computes of the whole.

    python -m tests.tempnet.test_world_size <directory>

This program, which the tests start once, runs every contrastive loss and batch norm. Every rank writes
its results to `<directory>/rank-<r>.pt`. Whole runs on two ranks are compared with one in tests/jobs/tasks/test_training.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from tempnet.contrastive.config import LOSS_KINDS
from tempnet.contrastive.state import SampleState, World
from tempnet.contrastive.unimodal import UnimodalLoss
from tempnet.integrations import SentencePairLoss
from tempnet.models.batch_norm import SynchronizedBatchNorm
from tempnet.soft_triple import supervised_contrastive_loss
from tests.tempnet.contrastive.dense import NUM_SAMPLES, make_batch, make_config, make_loss, make_unimodal_loss, run

ROOT = Path(__file__).parents[2]
SIZE = 3
Values = dict[str, Tensor]
Ranks = tuple[Path, list[dict[str, Values]]]

LOSSES = (
    *LOSS_KINDS,
    *(f"unimodal {name}" for name, kind in LOSS_KINDS.items() if not kind.is_cyclic and kind.temperature != "given"),
)
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
# Unequal parts, one of a single row.
NORM_ROWS = [slice(0, 4), slice(4, 6), slice(6, 7)]


def loss_case(name: str, world: World, directory: Path) -> Values:
    """Return losses, this rank's embedding gradients, and averaged parameter gradients of two steps; save the state.

    Gradients times 1/W and summed over ranks are the gradients that an average over ranks, as of DDP, would give.
    """
    kind, _, base = name.rpartition(" ")
    make = make_unimodal_loss if kind else make_loss
    loss = make(make_config(base, tile_size=5), world=world).float()
    found: Values = {}
    for step in range(2):
        # 12 pairs with repeated ids and images, over the boundaries between ranks too.
        part = make_batch(12, seed=7 + step).to(torch.float32).part(world.part(12))
        loss.zero_grad()
        output = run(loss, part)
        found[f"loss {step}"] = output["loss"].detach()
        for key in ("tau", "log_u", "dual_gradient"):
            if output[key] is not None:  # type: ignore[literal-required]
                found[f"{key} {step}"] = output[key].T  # type: ignore[literal-required]
        found[f"image {step}"], found[f"text {step}"] = part.image.grad / world.size, part.text.grad / world.size
        for key, parameter in loss.named_parameters():
            found[f"parameter {key} {step}"] = world.sum(parameter.grad.clone()) / world.size
    state = loss.bimodal.state if isinstance(loss, UnimodalLoss) else loss.state
    if state is not None:
        state.save(directory / name)
    return found


def norm_case(name: str, rows: slice, reference: type[nn.Module] | None = None) -> Values:
    """Run three batches through one batch norm; return the last output, its gradients, and the final statistics.

    A reference has float64 arithmetic, and the same rounded inputs.
    """
    shape, shift, dtype, momentum, is_affine = NORMS[name]
    norm_class = reference or SynchronizedBatchNorm
    torch.manual_seed(0)
    norm = norm_class(shape[1], momentum=momentum, affine=is_affine)
    norm = norm.to(torch.float32 if dtype == torch.bfloat16 else dtype)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    norm = norm.double() if reference else norm
    for _ in range(3):
        spread = torch.arange(1.0, 6.0).view(-1, *[1] * (len(shape) - 2))
        x = (torch.randn(shape, dtype=torch.float64) * spread + shift).to(dtype)[rows]
        if name == "colours last":
            x = x.contiguous(memory_format=torch.channels_last)
        weight = torch.randn(shape, dtype=torch.float64).to(dtype)[rows]
        x, weight = (x.double(), weight.double()) if reference else (x, weight)
        norm.zero_grad()
        y = norm(x.requires_grad_())
        (y * weight + y.square()).sum().backward()
    values = {"y": y.detach(), "x.grad": x.grad, **{k: v for k, v in norm.state_dict().items() if "running" in k}}
    return values | {f"{key}.grad": parameter.grad for key, parameter in norm.named_parameters()}


def supervised_case(world: World) -> Values:
    """Return the supervised contrastive loss of 12 sentences in float64, and the gradient in this rank's."""
    x = torch.randn(12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))[world.part(12)]
    loss = supervised_contrastive_loss(x.requires_grad_(), torch.arange(12)[world.part(12)] % 5, 0.3, world)
    loss.backward()
    return {"loss": loss.detach(), "gradient": x.grad}


class Encoder(nn.Linear):
    """Stands for a SentenceTransformer."""

    def get_embedding_dimension(self) -> int:
        return self.out_features

    def forward(self, column: dict[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        return {"sentence_embedding": super().forward(column["x"])}


def make_pair_loss(seed: int) -> SentencePairLoss:
    torch.manual_seed(seed)
    config = make_config("tempnet", gamma_schedule="cosine")
    return SentencePairLoss(Encoder(6, 6), config, num_samples=NUM_SAMPLES, num_steps=3)


def pair_case(loss: SentencePairLoss, world: World) -> Values:
    """Return losses of two steps and an evaluation after each, this rank's gradients, and its part of the state."""
    loss.model.load_state_dict({"weight": torch.eye(6) + 0.1, "bias": torch.arange(6.0)})
    found: Values = {}
    for step in range(2):
        part = make_batch(12, seed=7 + step).to(torch.float32).part(world.part(12))
        columns = [{"x": part.image.detach().repeat(1, 2)[:, :6]}, {"x": part.text.detach().repeat(1, 2)[:, :6]}]
        loss.zero_grad()
        value = loss(columns, part.ids)
        value.backward()
        with torch.no_grad():
            found |= {f"loss.{step}": value.detach(), f"loss.{step}, evaluated": loss(columns, part.ids + NUM_SAMPLES)}
        found |= {f"{step}.{key}": parameter.grad.clone() for key, parameter in loss.named_parameters()}
    assert loss.state is not None
    return found | {"state": loss.state.columns["log_u"]}


def work(rank: int, directory: Path) -> None:
    torch.set_num_threads(1)
    pair_loss = make_pair_loss(rank)  # before there is a process group, as scripts make it
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=SIZE)
    world = World.current()
    values: dict[str, Any] = {f"loss {name}": loss_case(name, world, directory) for name in LOSSES}
    values |= {f"norm {name}": norm_case(name, NORM_ROWS[rank]) for name in NORMS}
    values["supervised"] = supervised_case(world)
    values["pairs"] = pair_case(pair_loss, world)
    torch.save(values, directory / f"rank-{rank}.pt")
    # All ranks must see a wrong id, whoever has it: no rank may be left waiting in a collective.
    part = make_batch(12).part(world.part(12))
    if rank == 0:
        part.ids[0] = 1_000_000
    try:
        run(make_loss(make_config("sogclr"), world=world), part)
    except ValueError as error:
        (directory / f"error-{rank}.txt").write_text(str(error))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Return the results of the processes, and the directory of what they have saved."""
    directory = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.tempnet.test_world_size", str(directory)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return directory, [torch.load(directory / f"rank-{rank}.pt", weights_only=True) for rank in range(SIZE)]


@pytest.mark.parametrize("name", LOSSES)
def test_contrastive_losses(name: str, ranks: Ranks, tmp_path: Path) -> None:
    directory, parts = ranks
    alone = loss_case(name, World.alone(), tmp_path)
    found = [part[f"loss {name}"] for part in parts]
    assert all(set(part) == set(alone) for part in found)
    # A gradient of a single number may cancel: it is held to the scale of the others.
    scale = max([float(value.norm()) for key, value in alone.items() if key.startswith("parameter")], default=0.0)
    for key, value in alone.items():
        is_shared = key.startswith(("loss", "parameter"))
        ours = found[0][key] if is_shared else torch.cat([part[key] for part in found])
        floor = 0.1 * scale if key.startswith("parameter") else 0.0
        error = float((ours.double() - value.double()).norm()) / max(float(value.double().norm()), floor, 1e-12)
        assert error < (1e-6 if key.startswith("loss") else 1e-5), key
        # What all ranks share must be the same to the last bit: state is written from it.
        if key.startswith("loss"):
            assert all(torch.equal(part[key], ours) for part in found)
    if columns := make_config(name.rpartition(" ")[2]).state_columns:
        states = [SampleState(NUM_SAMPLES, columns) for _ in range(2)]
        states[0].load(tmp_path / name, num_writers=1)
        states[1].load(directory / name, num_writers=len(parts))
        for key in columns:
            torch.testing.assert_close(states[1].columns[key], states[0].columns[key], rtol=1e-5, atol=1e-5)


def test_the_supervised_contrastive_loss(ranks: Ranks) -> None:
    alone, found = supervised_case(World.alone()), [part["supervised"] for part in ranks[1]]
    torch.testing.assert_close(torch.stack([part["loss"] for part in found]).sum(), alone["loss"])
    torch.testing.assert_close(torch.cat([part["gradient"] for part in found]), alone["gradient"])


def test_the_loss_for_sentence_transformers(ranks: Ranks) -> None:
    alone, found = pair_case(make_pair_loss(0), World.alone()), [part["pairs"] for part in ranks[1]]
    for key, value in alone.items():
        if key == "state":
            for rank, part in enumerate(found):
                torch.testing.assert_close(part[key], value[:, rank::SIZE], rtol=1e-5, atol=1e-5)
        elif ".model." in key:  # the trainer averages the gradients of the encoder
            mean = torch.stack([part[key] for part in found]).mean(0)
            torch.testing.assert_close(mean, value, rtol=1e-4, atol=1e-6)
        else:
            assert all(torch.equal(part[key], found[0][key]) for part in found), key
            torch.testing.assert_close(found[0][key], value, rtol=1e-4, atol=1e-6, msg=key)


def test_a_wrong_id_stops_every_rank(ranks: Ranks) -> None:
    directory, parts = ranks
    for rank in range(len(parts)):
        assert "id 1000000 is not one of the 40 samples" in (directory / f"error-{rank}.txt").read_text()


@pytest.mark.parametrize("name", list(NORMS))
def test_batch_norm(name: str, ranks: Ranks) -> None:
    dtype = NORMS[name][2]
    theirs = norm_case(name, slice(None), nn.BatchNorm1d if len(NORMS[name][0]) == 2 else nn.BatchNorm2d)
    found = [part[f"norm {name}"] for part in ranks[1]]
    # At 3000 ± 3, x̂ in float32 has an error of 1e-4, that of nn.BatchNorm2d too.
    tolerance = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 2e-2}[dtype]
    tolerance = 1e-3 if name == "far from zero" else tolerance
    for key, value in theirs.items():
        if key in ("y", "x.grad"):
            ours = torch.cat([part[key] for part in found])
        elif key.endswith(".grad"):
            ours = torch.stack([part[key] for part in found]).sum(0)
        else:
            ours = found[0][key]
            assert all(torch.equal(part[key], ours) for part in found), key
        assert ours.dtype == (dtype if key in ("y", "x.grad") or dtype == torch.float64 else torch.float32)
        assert (ours.double() - value).abs().max() <= tolerance * value.abs().max().clamp(min=1.0), key


if __name__ == "__main__":
    # This process is fresh and has only imported: a fork of it spares every rank its own imports.
    mp.start_processes(work, args=(Path(sys.argv[1]),), nprocs=SIZE, start_method="fork")
