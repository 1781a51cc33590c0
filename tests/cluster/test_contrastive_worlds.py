"""Test every contrastive loss on Ray Train with DeepSpeed: two workers compute what one does from the same batches."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from clip_training_support import NUM_PAIRS, tiny_clip_config, write_smooth_tower, write_tiny_images
from contrastive_walk import NUM_STEPS, NUM_STEPS_BEFORE_ALL_ARE_VISITED, walk
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import Tensor

from jobs.engine.cluster import CPU_ENVIRONMENT, start_ray
from jobs.tasks.base import resolve_paths
from jobs.tasks.dual_encoder.config import ClipConfig
from jobs.tasks.dual_encoder.create import DataReference, create_task
from jobs.tasks.dual_encoder.data import prepare_split
from tempnet.contrastive.config import LOSS_KINDS, ContrastiveLossConfig
from tempnet.contrastive.state import SampleState

pytestmark = pytest.mark.cluster

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


@pytest.fixture(scope="module")
def walks(ray_head: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Train all losses in one worker group for each world size, and return world size → directory of the results."""
    directory = tmp_path_factory.mktemp("worlds")
    images = write_tiny_images(directory / "images")
    write_smooth_tower(directory / "smooth")
    given_tau = SMALLEST_TAU + 0.4 * torch.rand(2, NUM_PAIRS, generator=torch.Generator().manual_seed(0)).numpy()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_ADDRESS", "PATH"):
            patch.setenv(name, ray_head[name])
        start_ray()
        config = resolve_paths(configuration("sogclr", images, 1))
        train, validation = prepare_split(config, "train").directory, prepare_split(config, "validation").directory
        for size in WORLD_SIZES:
            tasks = {}
            for loss in LOSS_KINDS:
                config = resolve_paths(configuration(loss, images, size))
                given = given_tau if loss == "sogclr_given" else None
                data = DataReference(train=train, validation=validation, given_tau=given, towers=None, embeddings=None)
                tasks[loss] = partial(create_task, config, data)
            environment = {
                "PATH": os.environ["PATH"],
                "PYTHONPATH": str(Path(__file__).parent),
                "DS_ACCELERATOR": "cpu",
            }
            TorchTrainer(
                walk,
                train_loop_config={"tasks": tasks, "directory": str(directory / str(size))},
                scaling_config=ScalingConfig(num_workers=size, resources_per_worker={"CPU": 0.5}),
                run_config=RunConfig(
                    name=f"walk-{size}",
                    storage_path=str(directory / "ray"),
                    worker_runtime_env={"env_vars": environment | CPU_ENVIRONMENT},
                ),
            ).fit()
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
