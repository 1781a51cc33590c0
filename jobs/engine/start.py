"""A run that starts from a checkpoint of another run (`run.start_from`) and goes on with values of its own.

These may be another learning rate or another ρ, for example. Everything else is as if the other run had been continued:
weights, moments, per-sample state, the step of the schedules, and the place in the data.
"""

from __future__ import annotations

from jobs.engine.checkpoint_files import find_damage
from jobs.engine.config import RunSection, TrainingConfig
from jobs.engine.identity import differences, may_differ, recorded_values
from jobs.engine.resumption import checkpoint_name, whole_checkpoints
from pipelines.storage import read_json


def start_checkpoint(run: RunSection) -> str:
    """Return the path or URI of the checkpoint that a run starts from; empty if it starts at step 0."""
    name = run.start_from.rpartition("@")[0]
    return f"{run.resolved_storage}/{name}/{checkpoint_name(run.start_step)}" if name else ""


def check_start(config: TrainingConfig) -> None:
    """Check that a run can start from the checkpoint that its configuration names, if it names one.

    Raises:
        ValueError: if there is no such checkpoint, if it is not whole, or if the other run differs in a field that shapes
            the weights or orders the data. Other decimal numbers, such as learning rates and ρ, may differ.
    """
    run = config.run
    if not run.start_from:
        return
    directory = f"{run.resolved_storage}/{run.start_from.rpartition('@')[0]}"
    held = read_json(f"{directory}/configuration.json")
    if held is None:
        raise ValueError(f"run.start_from = {run.start_from!r}: there is no run in {directory}")
    if damage := find_damage(start_checkpoint(run)):
        steps = ", ".join(map(str, whole_checkpoints(directory).values()))
        raise ValueError(
            f"run.start_from = {run.start_from!r}: {checkpoint_name(run.start_step)} in {directory} cannot be used, "
            f"{damage}; its whole checkpoints are of the steps {steps or '(none)'}"
        )
    own = recorded_values(config)
    shaping = [name for name in held.keys() | own.keys() if not may_differ(name, held.get(name), own.get(name))]
    changed = differences({name: held.get(name) for name in shaping}, {name: own.get(name) for name in shaping})
    if changed:
        raise ValueError(
            f"run.start_from = {run.start_from!r}: that run differs in what shapes the weights or orders the data: "
            f"{'; '.join(changed)}. Give it the same values; decimal numbers such as learning rates and ρ may differ"
        )
