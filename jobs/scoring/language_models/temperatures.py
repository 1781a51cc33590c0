"""The temperatures of an evaluation: a constant, or what the model's TempNet predicts for every token.

Shapes: V vocabulary, "…" any leading dimensions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tempnet.network import TempNet

# Maps float32 logits (…, V) and the hidden states (…, d) that they were computed from to temperatures (…,).
TemperatureFunction = Callable[[Tensor, Tensor], Tensor]

# Number of elements of a float32 chunk of logits (64 MiB).
_CHUNK_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Temperature:
    """A temperature to evaluate at; it forms one column of the results for every model."""

    name: str
    """Its normal form: `one`, `fixed:0.7`, `tempnet` or `tempnet:1.5`."""
    needs_tempnet: bool
    value: float | None
    """The constant temperature; or, for a TempNet, τ_max at inference, where None keeps the network's own."""

    @classmethod
    def parse(cls, text: str) -> Temperature:
        """Parse a temperature from the command line.

        Raises:
            ValueError: naming the legal values.
        """
        kind, _, number = text.partition(":")
        try:
            value = float(number) if number else None
        except ValueError:
            value = -1.0
        is_legal = value is None if kind == "one" else kind == "tempnet" or (kind == "fixed" and value is not None)
        if not is_legal or (value is not None and not 0.0 < value < float("inf")):
            raise ValueError(
                f"temperature {text!r} is none of: one, fixed:VALUE, tempnet, tempnet:TAU_MAX, with positive numbers"
            )
        if kind == "one":
            value = 1.0
        name = kind if not number else f"{kind}:{value:g}"
        return cls(name=name, needs_tempnet=kind == "tempnet", value=value)

    def function(self, network: TempNet | None) -> TemperatureFunction:
        """Returns the function that maps logits and hidden states to τ.

        Args:
            network: the model's TempNet, required if `needs_tempnet`. Its parameters are shared with the returned
                function.

        Raises:
            ValueError: if τ_max is not above τ₀.
        """
        if not self.needs_tempnet:
            value = self.value
            assert value is not None
            return lambda logits, hidden: torch.full(logits.shape[:-1], value, device=logits.device)
        assert network is not None
        variant = copy.copy(network)  # a shallow copy: the same parameters with a configuration of its own
        if self.value is not None:
            variant.set_tau_max_eval(self.value)
        return variant


def num_rows_a_chunk(vocab_size: int) -> int:
    """Returns the number of rows of logits to hold in float32 at a time."""
    return max(1, _CHUNK_ELEMENTS // vocab_size)


@torch.no_grad()
def divide_(logits: Tensor, hidden: Tensor, function: TemperatureFunction) -> Tensor:
    """Divide float32 logits (B, T, V) of hidden states (B, T, d) by τ in place, a chunk of tokens at a time."""
    size = num_rows_a_chunk(logits.shape[-1])
    chunks = logits.view(-1, logits.shape[-1]).split(size), hidden.flatten(0, 1).split(size)
    for chunk, states in zip(*chunks, strict=True):
        chunk.div_(function(chunk, states.to(chunk.device)).unsqueeze(-1))
    return logits
