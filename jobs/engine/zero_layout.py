"""Parameters in one piece of memory, cut into parts where DeepSpeed's ZeRO 1 and 2 cut them for the workers.

On CPUs, PyTorch rounds the last values of a tensor, which do not fill a vector register, in another way than those before
them, and the norm of the gradients is added up part by part. A network that every worker holds whole is therefore trained
as ZeRO trains it, to the last bit, only if its tensors begin and end where ZeRO's do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

# ZeRO pads every group of parameters to a multiple of this number of values for each worker (DeepSpeed's
# `nccl_start_alignment_factor`).
_ALIGNMENT = 2
_NUM_VALUES_AT_A_TIME = 1 << 15
# Name of the number of steps in the state of AdamW.
_STEP = "step"


def part_sizes(sizes: Sequence[int], *, zero_stage: int, num_workers: int) -> list[int]:
    """Return the sizes of the tensors in which parameters of given sizes are updated.

    Args:
        sizes: number of values of every parameter of a group.
        zero_stage: stage of ZeRO. 1 and 2 cut the padded group into equal parts; 0 updates every parameter by itself. 3,
            which cuts every parameter, is treated like 0.
        num_workers: number of workers.
    """
    if zero_stage not in (1, 2):
        return list(sizes)
    unit = _ALIGNMENT * num_workers
    return [-(-sum(sizes) // unit) * _ALIGNMENT] * num_workers


class FlatGroup:
    """A group of an optimizer whose parameters and gradients lie in one piece of memory each.

    The optimizer updates the parts, and thereby the parameters, which are views of the same memory.

    Args:
        group: group of an optimizer that has no state yet; its parameters are replaced by the parts.
        sizes: sizes of the parts (`part_sizes`).
        gradients: memory of the gradients, as large as all parts together, filled with zeros.
    """

    def __init__(self, group: dict[str, Any], sizes: Sequence[int], gradients: Tensor) -> None:
        self.parameters: list[nn.Parameter] = group["params"]
        self._ends = list(accumulate(map(torch.numel, self.parameters), initial=0))
        weights = torch.zeros_like(gradients)
        for parameter, (start, end) in zip(self.parameters, pairwise(self._ends), strict=True):
            weights[start:end] = parameter.detach().flatten()
            parameter.data = weights[start:end].view_as(parameter)
            parameter.grad = gradients[start:end].view_as(parameter)
        self.parts = [nn.Parameter(part) for part in weights.split(list(sizes))]
        for part, gradient in zip(self.parts, gradients.split(list(sizes)), strict=True):
            part.grad = gradient
        self._gradients = gradients
        self._part_ends = list(accumulate(sizes, initial=0))
        group["params"] = self.parts

    def gradient_norm(self) -> Tensor:
        """Return the L2 norm of the gradient, added up as ZeRO does: in float64 within a part, in float32 over parts."""
        squares = [
            torch.stack([_sum_squares(self._gradients[piece]) for piece in pieces]).sum().float()
            for pieces in self._pieces()
        ]
        return torch.stack(squares).sum().sqrt()

    def _pieces(self) -> Iterator[list[slice]]:
        """Yield, for every part that has any, the pieces of parameters in it; padding is none."""
        for start, end in pairwise(self._part_ends):
            bounds = [max(start, min(end, bound)) for bound in self._ends]
            if pieces := [slice(first, last) for first, last in pairwise(bounds) if first < last]:
                yield pieces

    def state_of_parameters(self, states: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Return the optimizer's state of every parameter, from that of every part."""
        return [
            {name: value.view_as(parameter) if name != _STEP else value for name, value in state.items()}
            for state, parameter in zip(_cut(states, self._ends), self.parameters, strict=True)
        ]

    def state_of_parts(self, states: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Return the optimizer's state of every part, from that of every parameter."""
        return _cut(states, self._part_ends)


def _cut(states: Sequence[Mapping[str, Tensor]], ends: Sequence[int]) -> list[dict[str, Tensor]]:
    """Join states of the optimizer, pad them with zeros, and cut them between the given ends.

    The number of steps, which all states share, is copied, because the optimizer counts in place.
    """
    joined = {name: torch.cat([state[name].flatten() for state in states]) for name in states[0] if name != _STEP}
    padded = {name: nn.functional.pad(value, (0, max(0, ends[-1] - len(value)))) for name, value in joined.items()}
    return [
        {_STEP: states[0][_STEP].clone()} | {name: value[start:end].clone() for name, value in padded.items()}
        for start, end in pairwise(ends)
    ]


def _sum_squares(values: Tensor) -> Tensor:
    """Return Σ x² in float64. What is converted at a time stays in the processor's cache, which takes a fifth of the time."""
    blocks = (block.double() for block in values.split(_NUM_VALUES_AT_A_TIME))
    return torch.stack([torch.dot(block, block) for block in blocks]).sum()


def state_of_parameters(optimizer: Optimizer, groups: Sequence[FlatGroup]) -> dict[str, Any]:
    """Return the state of an optimizer of flat groups as if it updated parameters, whatever the number of parts is."""
    return _convert(optimizer.state_dict(), [(len(group.parameters), group.state_of_parameters) for group in groups])


def load_state_of_parameters(optimizer: Optimizer, groups: Sequence[FlatGroup], values: Mapping[str, Any]) -> None:
    """Load what :func:`state_of_parameters` returned."""
    optimizer.load_state_dict(_convert(values, [(len(group.parts), group.state_of_parts) for group in groups]))


def _convert(
    values: Mapping[str, Any], groups: Sequence[tuple[int, Callable[[list[Any]], list[dict[str, Tensor]]]]]
) -> dict[str, Any]:
    """Convert the state of an optimizer group by group, and number its tensors anew.

    Args:
        values: what `Optimizer.state_dict` returned.
        groups: number of tensors of every group in the result, and the function that returns their states.
    """
    state: dict[int, dict[str, Tensor]] = {}
    entries, count = [], 0
    for (num_tensors, convert), entry in zip(groups, values["param_groups"], strict=True):
        numbers = range(count, count := count + num_tensors)
        if values["state"]:  # It is empty before the first step.
            state |= zip(numbers, convert([values["state"][number] for number in entry["params"]]), strict=True)
        entries.append({**entry, "params": list(numbers)})
    return {"state": state, "param_groups": entries}
