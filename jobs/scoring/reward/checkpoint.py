"""The checkpoint of a run: one safetensors file with weights and moments, and the rest as JSON in its header."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from jobs.scoring.reward.trainer import RewardTrainer
from pipelines.storage import exists, read_bytes, write_bytes

CHECKPOINT_FILE = "checkpoint.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq")


def save_checkpoint(trainer: RewardTrainer, directory: str) -> None:
    """Write the state of a trainer; a reader finds this checkpoint or the one before, whenever the process is killed."""
    assert trainer.controller is not None
    tensors = {f"network.{name}": value.contiguous() for name, value in trainer.weights().items()}
    for name, parameter in trainer.network.named_parameters():
        for moment in _MOMENTS:
            value = trainer.optimizer.state[parameter].get(moment, torch.zeros_like(parameter))
            tensors[f"{moment}.{name}"] = value.detach().clone().contiguous()
    state = {
        "step": trainer.step,
        "controller": trainer.controller.state(),
        "base": trainer.base,
        "history": trainer.history,
        "failures": dict(trainer.failures),
        "first_failure": trainer.first_failure,
    }
    write_bytes(f"{directory}/{CHECKPOINT_FILE}", save(tensors, metadata={"state": json.dumps(state)}))


def load_checkpoint(trainer: RewardTrainer, directory: str) -> bool:
    """Give a trainer the state of the checkpoint in a directory, and return whether there is one.

    Raises:
        ValueError: if the file is damaged, or of another TempNet.
    """
    uri = f"{directory}/{CHECKPOINT_FILE}"
    if not exists(uri):
        return False
    content = read_bytes(uri)
    try:
        tensors, state = load(content), _read_state(content)
        network = {
            name.removeprefix("network."): value for name, value in tensors.items() if name.startswith("network.")
        }
        trainer.network.load_state_dict(network)
        for name, parameter in trainer.network.named_parameters():
            moments = {moment: tensors[f"{moment}.{name}"] for moment in _MOMENTS}
            trainer.optimizer.state[parameter] = {"step": torch.tensor(float(state["step"])), **moments}
        controller = state["controller"]
    except (SafetensorError, RuntimeError, ValueError, KeyError) as error:
        raise ValueError(f"{uri} is damaged: {error!s:.200}; delete it to begin anew") from error
    trainer.controller = trainer.make_controller(controller["target"])
    trainer.controller.restore(controller)
    trainer.step, trainer.base, trainer.history = state["step"], state["base"], state["history"]
    trainer.failures, trainer.first_failure = Counter(state["failures"]), state["first_failure"]
    return True


def _read_state(content: bytes) -> dict[str, Any]:
    """Return the JSON in the header of a safetensors file, which begins with the header's length in 8 bytes."""
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    state: dict[str, Any] = json.loads(header["__metadata__"]["state"])
    return state
