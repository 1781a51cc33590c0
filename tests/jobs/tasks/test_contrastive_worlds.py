"""Every contrastive loss with towers and DeepSpeed: two processes compute what one does from the same batches.

Gradients are compared by Adam's first moments: its steps alone would hide a gradient that is too large by a factor.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from task_support import NUM_PAIRS, tiny_clip_config, write_smooth_tower, write_tiny_images
from torch import Tensor

from jobs.tasks.base import DataReference, create_task, resolve_paths
from jobs.tasks.dual_encoder.config import ClipConfig
from jobs.tasks.dual_encoder.data import prepare_split
from tempnet.contrastive.config import LOSS_KINDS, ContrastiveLossConfig
from tempnet.contrastive.state import SampleState
from tests.local_training import Call

NUM_STEPS = 8
"""Number of steps. With 100 pairs in batches of 16, they are one epoch and a part of the second."""
NUM_STEPS_BEFORE_ALL_ARE_VISITED = 4
WORLD_SIZES = (1, 2)
SMALLEST_TAU = 0.1
COSINE_TOLERANCE = 5e-6
"""Allowed difference of a cosine: rounding errors of its products, and of the weights after a few steps of Adam. The
losses and their state multiply it by 1/τ."""
ROUNDING_OF_GRADIENTS = 1e-5
"""Allowed difference of a gradient, relative to the largest gradient. Runs on one machine differed by 1e-6 to 3e-6."""


def configuration(loss: str, images: Path, num_workers: int) -> ClipConfig:
    """Return a configuration in which wrong gradients show, and rounding errors do not grow.

    Gradients are not clipped, because clipping would hide a gradient that is too large in all parameters.
    """
    return tiny_clip_config(
        images,
        images.parent,
        "walk",
        run={"num_steps": NUM_STEPS},
        temperature={
            "loss": loss,
            "target_tau": 0.2 if loss == "tempnet" else None,
            "tau": SMALLEST_TAU,
            "tau_min": 0.05,
            "tau_max": 0.5,
            "table": str(images) if loss == "sogclr_given" else "",
        },
        model={"image_path": str(images.parent / "smooth")},
        optimizer={"max_grad_norm": 0.0, "learning_rate_base": 3e-4, "learning_rate_tempnet": 1e-3},
        workers={"num_workers": num_workers},
    )


def walk(rank: int, world_size: int, tasks: dict[str, Any], target: Path) -> None:
    """Train the task that every function of `tasks` (name → function) creates, with the project's engine.

    For each task, rank 0 writes `<target>/<name>.pt`, which holds the losses (steps,), the weights, and Adam's first
    moments, which are weighted sums of gradients.
    """
    from jobs.engine.checkpoint import SafeCheckpointEngine, _parts, _whole_moments
    from jobs.engine.deepspeed_engine import start_engine, whole_parameters

    for name, create in tasks.items():
        directory = target / name
        task = create(rank, world_size)
        config = task.config
        task.build(is_fresh=True)
        engine = start_engine(task.module, [(task.parameter_groups(), config)], config)
        size = config.optimizer.batch_size
        losses = []
        for step, batch in enumerate(task.stream.batches(0, NUM_STEPS * size)):
            result = task.train_step(engine, batch, step=step, num_units=size, with_statistics=False)
            losses.append(task.module.loss.world.sum(result.loss.clone()))
            if task.module.loss.state is not None and step + 1 in (NUM_STEPS_BEFORE_ALL_ARE_VISITED, NUM_STEPS):
                (kept := directory / str(step + 1)).mkdir(parents=True, exist_ok=True)
                task.module.loss.state.save(kept)
        found = {"losses": torch.stack(losses)}
        found |= {f"weight {key}": value for key, value in whole_parameters(task.module, config.workers.zero_stage)}
        engine.checkpoint_engine = SafeCheckpointEngine()
        engine.save_checkpoint(str(directory), tag="engine", save_latest=False)
        task.module.loss.world.sum(torch.zeros(1))  # a barrier
        if rank == 0:
            files = _parts(directory / "engine", world_size)
            read = [engine.checkpoint_engine.load(str(file), map_location="cpu") for file in files]
            moments, _ = _whole_moments([part["optimizer_state_dict"] for part in read])
            found |= {f"gradients {key}": value["exp_avg"] for key, value in moments.items()}
            torch.save(found, directory.with_suffix(".pt"))


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory, alone: Call, together: Call) -> dict[int, Path]:
    """Train all losses with each number of processes, and return number → directory of the results."""
    directory = tmp_path_factory.mktemp("worlds")
    images = write_tiny_images(directory / "images")
    write_smooth_tower(directory / "smooth")
    given_tau = SMALLEST_TAU + 0.4 * torch.rand(2, NUM_PAIRS, generator=torch.Generator().manual_seed(0)).numpy()
    config = resolve_paths(configuration("sogclr", images, 1))
    train, validation = prepare_split(config, "train").directory, prepare_split(config, "validation").directory
    for size in WORLD_SIZES:
        tasks = {}
        for loss in LOSS_KINDS:
            config = resolve_paths(configuration(loss, images, size))
            given = given_tau if loss == "sogclr_given" else None
            data = DataReference(train=train, validation=validation, given_tau=given)
            tasks[loss] = partial(create_task, "jobs.tasks.dual_encoder.task:ClipTask", config, data)
        (alone if size == 1 else together)(walk, tasks, directory / str(size))
    return {size: directory / str(size) for size in WORLD_SIZES}


def sample_state(loss: str, directory: Path, size: int) -> dict[str, Tensor]:
    """Return the columns of the samples' state, joined over the ranks, in the order of the samples' IDs."""
    state = SampleState(NUM_PAIRS, ContrastiveLossConfig.for_name(loss).state_columns)
    state.load(directory, size)
    return state.columns


@pytest.mark.parametrize("loss", LOSS_KINDS)
def test_two_workers_compute_what_one_does(walks: dict[int, Path], loss: str) -> None:
    alone, shared = (torch.load(walks[size] / f"{loss}.pt", weights_only=True) for size in WORLD_SIZES)
    assert shared.keys() == alone.keys()
    torch.testing.assert_close(shared.pop("losses"), losses := alone.pop("losses"), rtol=1e-6, atol=1e-5)
    assert len(losses) == NUM_STEPS
    largest = max(value.norm() for key, value in alone.items() if key.startswith("gradients"))
    for key, value in alone.items():
        if key.startswith("gradients"):
            # Some gradients, such as those of an attention's key biases, are only rounding errors, and others are sums of
            # terms that cancel, such as those of φ.
            assert (shared[key] - value).norm() < 1e-4 * value.norm() + ROUNDING_OF_GRADIENTS * largest, key
        else:
            torch.testing.assert_close(shared[key], value, rtol=1e-5, atol=1e-5, msg=key)

    if not ContrastiveLossConfig.for_name(loss).state_columns:
        return
    for step in (NUM_STEPS_BEFORE_ALL_ARE_VISITED, NUM_STEPS):
        one, two = (sample_state(loss, walks[size] / loss / str(step), size) for size in WORLD_SIZES)
        assert torch.isneginf(one["log_u"]).any() == (step < NUM_STEPS)
        for name in one:
            torch.testing.assert_close(
                two[name],
                one[name],
                rtol=0,
                atol=COSINE_TOLERANCE / SMALLEST_TAU,
                msg=lambda difference, name=name, step=step: f"{name} after {step} steps: {difference}",
            )
