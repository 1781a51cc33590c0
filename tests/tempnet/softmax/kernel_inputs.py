"""Random inputs of the kernels, with the exact answers: float64 autograd of the plain formula."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tempnet.softmax.kernels import SoftmaxStatistics, softmax_gradients, softmax_statistics
from tempnet.softmax.launch import Tile
from tempnet.softmax.reference import IGNORE_INDEX

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
# Small enough that the shapes below have several tiles in every direction.
TILE = Tile(num_tokens=16, num_vocab=32, num_hidden=16, num_warps=4, num_stages=2)
# Tolerances of statistics and of gradients: 16-bit inputs round dL and the results, but not the statistics.
TOLERANCES = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1e-5, 1e-2), torch.float16: (1e-5, 2e-3)}


def relative_error(value: Tensor, reference: Tensor) -> float:
    return ((value.double() - reference).norm() / reference.norm().clamp(min=1e-12)).item()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Random inputs, with methods that compute the exact answers."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    tau: Tensor
    row_scale: Tensor
    bias: Tensor | None
    soft_cap: float | None

    @classmethod
    def random(
        cls,
        num_tokens: int,
        num_hidden: int,
        vocab_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        tau: tuple[float, float] = (0.3, 2.0),
        bias: bool = False,
        soft_cap: float | None = None,
        num_ignored: int = 0,
    ) -> Case:
        generator = torch.Generator().manual_seed(num_tokens + num_hidden + vocab_size)

        def normal(*shape: int, scale: float) -> Tensor:
            return (scale * torch.randn(*shape, generator=generator)).to(DEVICE, dtype)

        targets = torch.randint(vocab_size, (num_tokens,), generator=generator)
        targets[torch.randperm(num_tokens, generator=generator)[:num_ignored]] = IGNORE_INDEX
        low, high = tau
        return cls(
            hidden=normal(num_tokens, num_hidden, scale=1.0),
            weight=normal(vocab_size, num_hidden, scale=num_hidden**-0.5),
            targets=targets.to(DEVICE),
            tau=(low + (high - low) * torch.rand(num_tokens, generator=generator)).to(DEVICE),
            row_scale=(0.5 + torch.rand(num_tokens, generator=generator)).to(DEVICE),
            bias=normal(vocab_size, scale=0.5) if bias else None,
            soft_cap=soft_cap,
        )

    def statistics(self, **options: object) -> SoftmaxStatistics:
        return softmax_statistics(
            self.hidden, self.weight, self.targets, self.tau, bias=self.bias, soft_cap=self.soft_cap, **options
        )

    def gradients(self, statistics: SoftmaxStatistics, **options: object) -> tuple[Tensor | None, ...]:
        return softmax_gradients(
            self.hidden,
            self.weight,
            self.targets,
            self.tau,
            statistics,
            self.row_scale,
            bias=self.bias,
            soft_cap=self.soft_cap,
            **options,
        )

    def exact_logits(self, *leaves: Tensor) -> Tensor:
        hidden, weight, *bias = leaves
        logits = hidden @ weight.T + (bias[0] if bias else 0.0)
        return logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)

    def leaves(self) -> list[Tensor]:
        leaves = [self.hidden, self.weight] + ([] if self.bias is None else [self.bias])
        return [leaf.double().requires_grad_() for leaf in leaves]

    def check(self, **options: object) -> None:
        """Compare statistics and gradients with those of the formula."""
        leaves = self.leaves()
        logits = self.exact_logits(*leaves)
        tau = self.tau.double()
        is_valid = self.targets != IGNORE_INDEX
        safe_targets = self.targets.where(is_valid, 0)
        log_partition, mean = exact_statistics(logits, tau)
        log_partition_unit, mean_unit = exact_statistics(logits, torch.ones_like(tau))
        positive = logits.gather(1, safe_targets[:, None])[:, 0].where(is_valid, 0.0)
        statistics_tolerance, gradient_tolerance = TOLERANCES[self.hidden.dtype]
        # A float32 logit is off by 2⁻²⁴|L|, which p = exp(L/τ − …) sees divided by τ.
        rounding = (logits.abs().max() / tau.min()).item() * 2**-24

        statistics = self.statistics(tile=TILE, with_unit=True)
        assert statistics.entropy_unit is not None
        assert statistics.cross_entropy_unit is not None
        expected = {"maximum": logits.amax(-1), "positive": positive}
        errors = {name: relative_error(getattr(statistics, name), value) for name, value in expected.items()}
        errors["log_sum"] = relative_error(log_partition_of(statistics, self.tau), log_partition)
        assert max(errors.values()) < statistics_tolerance, errors
        # Entropies near 0 are differences of large numbers: an absolute error is what can be asked of them.
        for value, reference in (
            (statistics.entropy, log_partition - mean / tau),
            (statistics.cross_entropy[is_valid], (log_partition - positive / tau)[is_valid]),
            (statistics.entropy_unit, log_partition_unit - mean_unit),
            (statistics.cross_entropy_unit[is_valid], (log_partition_unit - positive)[is_valid]),
        ):
            assert (value.dtype, value.shape) == (torch.float32, reference.shape)
            torch.testing.assert_close(value.double(), reference, rtol=1e-5, atol=max(1e-5, 4 * rounding))

        losses = F.cross_entropy(logits / tau[:, None], safe_targets, reduction="none") * tau * self.row_scale
        theirs = torch.autograd.grad(losses.where(is_valid, 0.0).sum(), leaves)
        ours = self.gradients(statistics, tile=TILE, **options)
        assert (ours[2] is None) == (self.bias is None)
        for name, value, reference in zip(("hidden", "weight", "bias"), ours, theirs, strict=False):
            assert value is not None
            assert (value.dtype, value.shape) == (self.hidden.dtype, reference.shape)
            assert relative_error(value, reference) < max(gradient_tolerance, rounding), name


def log_partition_of(statistics: SoftmaxStatistics, tau: Tensor) -> Tensor:
    """Return logsumexp(L/τ)."""
    return statistics.maximum / tau + statistics.log_sum


def exact_statistics(logits: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
    """Return logsumexp(L/τ) and E_p[L]."""
    scaled = logits / tau[:, None]
    return scaled.logsumexp(-1), (scaled.softmax(-1) * logits).sum(-1)
