"""Divide the logits of some rows of a batch by the temperatures that a TempNet predicts for them.

Everything is computed on the device of the logits, in one pass over all rows, and nothing waits for the device.

Shapes: n rows, V effective vocabulary of the TempNet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tempnet.models.output_head import StoredBase
from tempnet.network import TempNet
from tempnet.serving.hidden_from_logits import HiddenFromLogits


class BatchTemperatures:
    """Applies a TempNet to rows of a server's logits.

    A row of which a logit is −∞ has been masked by the server already, so that the logits that its TempNet would
    have to read are lost. Such rows keep their logits (τ = 1) and are counted in `num_masked`.

    Args:
        tempnet: the temperature network. It is put into eval mode and moved to the device.
        device: device of the logits.
        output_layer: output layer of the served model, for a TempNet that reads its hidden states.

    Raises:
        ValueError: if the TempNet reads embeddings, or hidden states that the logits do not determine
            (:class:`HiddenFromLogits`).
    """

    def __init__(self, tempnet: TempNet, device: torch.device | str, output_layer: StoredBase | None = None) -> None:
        if tempnet.config.kind == "embeddings":
            raise ValueError("the TempNet reads embeddings, not the logits of a language model")
        self.tempnet = tempnet.eval().requires_grad_(False).to(device)
        self.hidden = HiddenFromLogits(self.tempnet, output_layer) if output_layer is not None else None
        self.device = torch.device(device)
        self.vocab_size = tempnet.config.input_size
        self.num_masked = torch.zeros((), dtype=torch.int64, device=device)
        """Number of rows so far whose τ could not be predicted, on the device."""

    @property
    def tau_max(self) -> float:
        """The TempNet's own τ_max for inference."""
        config = self.tempnet.config
        return config.tau_max if config.tau_max_eval is None else config.tau_max_eval

    def check_logits(self, num_logits: int) -> None:
        """Check that a model's logits are enough for the TempNet; additional ones are padding.

        Raises:
            ValueError: if the model has fewer logits than the TempNet reads.
        """
        if num_logits < self.vocab_size:
            raise ValueError(
                f"the TempNet was built for a vocabulary of {self.vocab_size}, the served model has {num_logits} logits"
            )

    def to_device(self, values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return numbers of the host as a tensor on the device, without waiting for what the device is doing."""
        host = torch.tensor(values, dtype=dtype, pin_memory=self.device.type == "cuda")
        return host.to(self.device, non_blocking=True)

    @torch.no_grad()
    def predict(self, logits: Tensor, settings: Tensor) -> Tensor:
        """Return τ (n,) in float32 of logits (n, V or more), with the setting (n,) of each row.

        A positive setting is τ_max of predicted temperatures, a negative one −τ of a constant, and 0 is τ = 1. τ − τ₀ is
        proportional to τ_max − τ₀, so that one pass through the network serves every τ_max. A τ_max below τ₀ gives τ₀.
        """
        raw = logits[:, : self.vocab_size]
        low = self.tempnet.config.tau_min
        predicted = self.tempnet(raw) if self.hidden is None else self.hidden.temperatures(raw)
        tau = low + (predicted - low) * ((settings - low).clamp(min=0.0) / (self.tau_max - low))
        is_predicted = settings > 0.0
        masked = raw.amin(-1).isneginf() & is_predicted
        self.num_masked += masked.sum()
        return torch.where(is_predicted & ~masked, tau, torch.where(settings < 0.0, -settings, 1.0))

    @torch.no_grad()
    def divide(self, logits: Tensor, settings: Tensor, rows: Tensor | None = None) -> Tensor:
        """Divide logits by their τ in place, set those beyond V to −∞, and return them.

        Args:
            logits: (number of rows, V or more) raw logits of a batch.
            settings: (n,) settings of the rows that are divided, as :meth:`predict` takes them.
            rows: (n,) indices of those rows; None for all of them.
        """
        part = logits if rows is None else logits.index_select(0, rows)
        part /= self.predict(part, settings).to(part.dtype).unsqueeze(-1)
        part[:, self.vocab_size :] = -math.inf
        return logits if rows is None else logits.index_copy_(0, rows, part)
