"""Train a few steps of one contrastive loss after the other in a Ray Train worker, for `test_contrastive_worlds.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

NUM_STEPS = 8
"""Number of steps. With 100 pairs in batches of 16, they are one epoch and a part of the second."""
NUM_STEPS_BEFORE_ALL_ARE_VISITED = 4


def walk(settings: Mapping[str, Any]) -> None:
    """Train the task that every function of `tasks` (name → function) creates, with the project's engine.

    For each task, rank 0 writes `<directory>/<name>.pt`, which holds the losses (steps,), the weights, and Adam's first
    moments, which are weighted sums of gradients.
    """
    import ray.train

    from jobs.engine.checkpoint import SafeCheckpointEngine
    from jobs.engine.deepspeed_engine import start_engine, whole_parameters
    from jobs.engine.reshard import _parts, _whole_moments

    torch.set_num_threads(1)
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    for name, create_task in settings["tasks"].items():
        directory = Path(settings["directory"]) / name
        task = create_task(rank, world_size)
        config = task.config
        task.build(is_fresh=True)
        engine = start_engine(task.module, task.parameter_groups(), config)
        size = config.optimizer.batch_size
        losses = []
        # The rank reads in its own process, because starting nine streams takes long. Other tests check that a stream
        # is the same for any number of workers.
        for step, batch in enumerate(replace(task.stream, num_readers=0).batches(0, NUM_STEPS * size)):
            result = task.train_step(engine, batch, step=step, num_units=size, with_statistics=False)
            losses.append(task.module.loss.world.sum(result.loss.clone()))
            if task.module.loss.state is not None and step + 1 in (NUM_STEPS_BEFORE_ALL_ARE_VISITED, NUM_STEPS):
                (kept := directory / str(step + 1)).mkdir(parents=True, exist_ok=True)
                task.module.loss.state.save(kept)
        found = {"losses": torch.stack(losses)}
        found |= {f"weight {key}": value for key, value in whole_parameters(task.module, config.workers.zero_stage)}
        engine.checkpoint_engine = SafeCheckpointEngine()
        engine.save_checkpoint(str(directory), tag="engine", save_latest=False)
        task.module.loss.world.barrier()
        if rank == 0:
            files = _parts(directory / "engine", world_size)
            read = [engine.checkpoint_engine.load(str(file), map_location="cpu") for file in files]
            moments, _ = _whole_moments([part["optimizer_state_dict"] for part in read])
            found |= {f"gradients {key}": value["exp_avg"] for key, value in moments.items()}
            torch.save(found, directory.with_suffix(".pt"))
