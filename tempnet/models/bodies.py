"""Between the body of a Transformers model and its head: what the head reads, seen and perhaps narrowed on its way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from transformers import PreTrainedModel


@contextmanager
def last_hidden_states(
    model: PreTrainedModel, narrow: Callable[[Tensor], Tensor] | None = None
) -> Iterator[list[Tensor]]:
    """While it is open, every forward pass of `model` puts the last hidden states of its body into the list.

    Heads of Transformers read the first entry of what their body returns. Computing a head on the whole and throwing most of
    it away is what this avoids, for any architecture.

    Args:
        model: a body (`base_model`) with a head.
        narrow: the head is given this of them.
    """
    seen: list[Tensor] = []

    def pass_on(_module: nn.Module, _inputs: object, output: object) -> object:
        hidden: Tensor = output["last_hidden_state"]  # type: ignore[index]
        seen.append(hidden)
        if narrow is not None:
            output["last_hidden_state"] = narrow(hidden)  # type: ignore[index]
        return output

    handle = model.base_model.register_forward_hook(pass_on)
    try:
        yield seen
    finally:
        handle.remove()
