"""Compute losses and gradients of tokens with the Triton kernels, as `chunks.py` does, on a GPU that can run them.

The fold gives τ of every token before the vocabulary is read, so that one pass yields all sums that the losses need.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tempnet.softmax.chunks import ChunkSettings, ChunkSums, NetworkGraph
from tempnet.softmax.kernels import is_available, softmax_gradients, softmax_statistics
from tempnet.softmax.reference import IGNORE_INDEX


def can_fuse(hidden: Tensor, settings: ChunkSettings) -> bool:
    """Return whether the kernels can process a call: they must run on the device, and τ must not need the logits."""
    is_known = (
        settings.fold is not None if settings.tempnet is not None else settings.config.kind.temperature != "oracle"
    )
    matmul_dtype = settings.matmul_dtype or hidden.dtype
    return is_known and is_available(hidden.new_empty(0, dtype=matmul_dtype))


class FusedSums(ChunkSums):
    """Like `ChunkSums`, but with all tokens at once instead of in chunks."""

    def add(self, targets: Tensor, row_weights: Tensor | None = None) -> None:
        """Process all tokens.

        Args:
            targets: (N,) int64 targets.
            row_weights: (N,) weights; gradients are those of Σ row_weights·loss. By default all weights are 1.
        """
        if not len(self.hidden):
            return  # A kernel cannot be launched on an empty input; all sums are already 0.
        everything = slice(None)
        tau, network = self._known_temperatures()
        self.tau.copy_(tau)
        with_values = self.settings.with_values
        found = softmax_statistics(
            self.hidden,
            self.weight,
            targets,
            tau,
            bias=self.bias,
            soft_cap=self.settings.soft_cap,
            with_unit=with_values,
        )
        if with_values:
            assert found.cross_entropy_unit is not None
            assert found.entropy_unit is not None
            self.values[0].copy_(found.cross_entropy_unit.where(targets != IGNORE_INDEX, 0.0))
            self.values[2].copy_(found.entropy_unit)
        row_scale, tau_grad = self._finish(everything, targets, tau, found.cross_entropy, found.entropy, row_weights)
        if network is not None and self.needs_network_grad:
            self._add_network_grad(self.hidden, network, tau_grad)
        if self.needs_logits_grad:
            gradients = softmax_gradients(
                self.hidden,
                self.weight,
                targets,
                tau,
                found,
                row_scale,
                bias=self.bias,
                soft_cap=self.settings.soft_cap,
                needs=(self.hidden_grad is not None, self.weight_grad is not None, self.bias_grad is not None),
            )
            vocabulary = slice(0, self.settings.vocab_size)
            for total, gradient in zip(
                (
                    self.hidden_grad,
                    None if self.weight_grad is None else self.weight_grad[vocabulary],
                    None if self.bias_grad is None else self.bias_grad[vocabulary],
                ),
                gradients,
                strict=True,
            ):
                if total is not None and gradient is not None:
                    total.copy_(gradient)

    def _known_temperatures(self) -> tuple[Tensor, NetworkGraph | None]:
        """Return τ (N,), computed from the hidden states alone, and the autograd graph of a TempNet's prediction."""
        if self.tempnet is None:
            value = self.config.tau if self.config.kind.temperature == "given" else 1.0
            return torch.full_like(self.tau, value), None
        assert self.settings.fold is not None
        assert self.folded is not None
        hidden = self.hidden.to(self.exact)
        inverse_norm = torch.ones_like(self.tau)
        if self.tempnet.config.normalize_input:
            gram = self.settings.fold.gram(self.weight, centred=self.is_centred)
            inverse_norm = (
                torch.linalg.vecdot(hidden @ gram, hidden).clamp(min=0.0).sqrt().clamp(min=1e-12).reciprocal()
            )
        return self._network_graph((hidden @ self.folded.T) * inverse_norm.unsqueeze(-1), inverse_norm, None)
