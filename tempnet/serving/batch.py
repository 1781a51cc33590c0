"""Divide the logits of a batch, each row as its request asks, by the temperatures that a TempNet predicts for them.

Everything is computed on the device of the logits, for all rows at once, and nothing waits for the device. Rows without a
temperature are divided by 1, which is cheaper than to take the others out and put them back.

Shapes: n rows, V effective vocabulary of the TempNet.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tempnet.loading import load_tempnet
from tempnet.network import TempNet
from tempnet.serving.hidden_from_logits import HiddenFromLogits, load_output_layer

_log = logging.getLogger("vllm.tempnet")  # vLLM shows what its own loggers say


class BatchTemperatures:
    """Applies a TempNet, which is put into eval mode and moved to the device of the logits, to rows of a server's logits.

    `hidden` computes τ by way of the hidden state; None for a TempNet that reads all logits itself. A row of which a logit
    that is read is −∞ has been masked by the server already; it keeps its logits (τ = 1) and is counted in `num_masked`. A
    TempNet on embeddings raises ValueError.
    """

    def __init__(self, tempnet: TempNet, device: torch.device | str, hidden: HiddenFromLogits | None = None) -> None:
        if tempnet.config.kind == "embeddings":
            raise ValueError("the TempNet reads embeddings, not the logits of a language model")
        self.tempnet = tempnet.eval().requires_grad_(False).to(device)
        self.hidden = hidden
        self.device = torch.device(device)
        self.vocab_size = tempnet.config.input_size
        self.num_masked = torch.zeros((), dtype=torch.int64, device=device)
        """Number of rows so far whose τ could not be predicted, on the device."""

    @classmethod
    def load(
        cls, source: str, device: torch.device | str, model: str, *, revision: str | None, dtype: torch.dtype | None
    ) -> BatchTemperatures:
        """Load the TempNet of a server and, of the model that it serves, the output layer (:func:`load_output_layer`).

        A TempNet on logits alone reads all of them where they do not lead to the hidden state. A file that cannot be read
        raises OSError; a TempNet on embeddings, or on hidden states that the logits do not determine, ValueError.
        """
        temperatures = cls(load_tempnet(source), device)
        tempnet = temperatures.tempnet
        try:
            layer = load_output_layer(model, revision=revision, dtype=dtype)
            temperatures.hidden = HiddenFromLogits(tempnet, layer, device)
            reads = f"hidden states from logits: {temperatures.hidden.figures}"
        except Exception as error:  # the code of a served model may raise any
            if tempnet.config.reads_state:
                raise
            reads = f"all logits, because {error}"
        _log.info("TempNet of kind %s from %s; %s", tempnet.config.kind, source, reads)
        return temperatures

    @property
    def tau_max(self) -> float:
        """The TempNet's own τ_max for inference."""
        return self.tempnet.config.inference_tau_max

    def check_logits(self, num_logits: int) -> None:
        """Raise ValueError if a model has fewer logits than the TempNet reads; additional ones are padding."""
        if num_logits < self.vocab_size:
            raise ValueError(
                f"the TempNet was built for a vocabulary of {self.vocab_size}, the served model has {num_logits} logits"
            )

    def to_device(self, values: Sequence[Any]) -> Tensor:
        """Return numbers of the host as float32 on the device, without waiting for what the device is doing."""
        host = torch.tensor(values, dtype=torch.float32, pin_memory=self.device.type == "cuda")
        return host.to(self.device, non_blocking=True)

    @torch.no_grad()
    def predict(self, logits: Tensor, settings: Tensor, state: Tensor | None = None) -> Tensor:
        """Return τ (n,) in float32 of logits (n, V or more), with the setting (n,) of each row.

        A positive setting is τ_max of predicted temperatures, a negative one −τ of a constant, and 0 is τ = 1. τ − τ₀ is
        proportional to τ_max − τ₀, so that one pass through the network serves every τ_max. A τ_max below τ₀ gives τ₀.
        `state` (n, d) are hidden states, for a TempNet that reads them and has no `hidden`.
        """
        raw, low = logits[:, : self.vocab_size], self.tempnet.config.tau_min
        if self.hidden is None:
            predicted = self.tempnet(raw, state).masked_fill(raw.amin(-1).isneginf(), math.nan)
        else:
            predicted = self.hidden.temperatures(raw)
        is_predicted, masked = settings > 0.0, predicted.isnan()
        self.num_masked += (masked & is_predicted).sum()
        tau = low + (predicted - low) * ((settings - low).clamp(min=0.0) / (self.tau_max - low))
        return torch.where(is_predicted & ~masked, tau, torch.where(settings < 0.0, -settings, 1.0))

    @torch.no_grad()
    def divide(self, logits: Tensor, settings: Tensor) -> Tensor:
        """Divide logits (n, V or more) by their τ in place, set those beyond V to −∞ where there is one, and return them.

        The settings (n,) of the rows are those of :meth:`predict`.
        """
        logits /= self.predict(logits, settings).to(logits.dtype).unsqueeze(-1)
        logits[:, self.vocab_size :].masked_fill_((settings != 0.0).unsqueeze(-1), -math.inf)
        return logits
