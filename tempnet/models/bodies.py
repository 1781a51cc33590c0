"""Record the hidden states that the head of a Transformers model reads from its body, and optionally reduce them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from transformers import PreTrainedModel


@contextmanager
def last_hidden_states(
    model: PreTrainedModel, narrow: Callable[[Tensor], Tensor] | None = None
) -> Iterator[list[Tensor]]:
    """Context in which every forward pass of `model` appends the last hidden states of its body to the returned list.

    Heads in Transformers read the first entry of their body's output. With `narrow`, the head is computed only for
    the part of the hidden states that is needed, instead of computing it for all and discarding most of the result.
    This works for any architecture.

    Args:
        model: a model with a head on a body (`base_model`).
        narrow: function that selects the part of the hidden states that the head receives; by default all of them.
    """
    states: list[Tensor] = []

    def pass_on(_module: nn.Module, _inputs: object, output: object) -> object:
        hidden: Tensor = output["last_hidden_state"]  # type: ignore[index]
        states.append(hidden)
        if narrow is not None:
            output["last_hidden_state"] = narrow(hidden)  # type: ignore[index]
        return output

    handle = model.base_model.register_forward_hook(pass_on)
    try:
        yield states
    finally:
        handle.remove()
