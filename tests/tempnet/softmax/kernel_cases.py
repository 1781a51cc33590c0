"""Tests of the kernels against float64 autograd of the plain formula, which test_kernels.py runs in its own process.

They run on the CPU with TRITON_INTERPRET=1, else on a GPU; Triton reads the variable once, when it is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tempnet import TempNet, TempNetConfig
from tempnet.softmax import linear
from tempnet.softmax.config import TemperatureLossConfig
from tempnet.softmax.kernels import SoftmaxStatistics, Tile, is_available, softmax_gradients, softmax_statistics
from tempnet.softmax.reference import IGNORE_INDEX
from tempnet.softmax.tokens import can_fuse
from tests.tempnet.formula import relative_error

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
# Small enough that the shapes below have several tiles in every direction.
TILE = Tile(num_tokens=16, num_vocab=32, num_hidden=16, num_warps=4, num_stages=2)
# Tolerances of statistics and of gradients: 16-bit inputs round dL and the results, but not the statistics.
TOLERANCES = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1e-5, 1e-2), torch.float16: (1e-5, 2e-3)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Random inputs of the kernels, with methods that compute the exact answers."""

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
            self.hidden, self.weight, self.targets, self.tau, statistics, self.row_scale,
            bias=self.bias, soft_cap=self.soft_cap, **options,
        )  # fmt: skip

    def exact_logits(self, *leaves: Tensor) -> Tensor:
        hidden, weight, *bias = leaves
        logits = hidden @ weight.T + (bias[0] if bias else 0.0)
        return logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)

    def leaves(self) -> list[Tensor]:
        leaves = [self.hidden, self.weight] + ([] if self.bias is None else [self.bias])
        return [leaf.double().requires_grad_() for leaf in leaves]

    def check(self, *, is_exact: bool = False, **options: object) -> None:
        """Compare statistics and gradients with those of the formula; `is_exact`: float32 holds the logits exactly."""
        leaves = self.leaves()
        logits = self.exact_logits(*leaves)
        tau = self.tau.double()
        is_valid = self.targets != IGNORE_INDEX
        safe_targets = self.targets.where(is_valid, 0)
        log_partition, mean = exact_statistics(logits, tau)
        log_partition_unit, mean_unit = exact_statistics(logits, torch.ones_like(tau))
        positive = logits.gather(1, safe_targets[:, None])[:, 0]
        statistics_tolerance, gradient_tolerance = TOLERANCES[self.hidden.dtype]
        # A float32 logit is off by 2⁻²⁴|L|, which p = exp(L/τ − …) sees divided by τ.
        rounding = 0.0 if is_exact else (logits.abs().max() / tau.min()).item() * 2**-24
        assert not is_exact or torch.equal(logits.float().double(), logits)

        statistics = self.statistics(tile=TILE, with_unit=True)
        assert statistics.at_one is not None
        errors = {
            "maximum": relative_error(statistics.maximum, logits.amax(-1)),
            "log_sum": relative_error(log_partition_of(statistics, self.tau), log_partition),
        }
        assert max(errors.values()) < statistics_tolerance, errors
        # Entropies near 0 are differences of large numbers: an absolute error is what can be asked of them.
        for value, reference in (
            (statistics.at_tau.entropy, log_partition - mean / tau),
            (statistics.at_tau.cross_entropy[is_valid], (log_partition - positive / tau)[is_valid]),
            (statistics.at_one.entropy, log_partition_unit - mean_unit),
            (statistics.at_one.cross_entropy[is_valid], (log_partition_unit - positive)[is_valid]),
        ):
            assert (value.dtype, value.shape) == (torch.float32, reference.shape)
            tolerance = 1e-6 if is_exact else max(1e-5, 4 * rounding)
            torch.testing.assert_close(value.double(), reference, rtol=1e-5, atol=tolerance)

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


@pytest.fixture(autouse=True)
def nothing_is_uninitialized_by_luck() -> Iterator[None]:
    """On a CPU, fill all new memory with NaN, so that reading it before it is written shows."""
    torch.set_deterministic_debug_mode("error" if DEVICE == "cpu" else "default")
    yield
    torch.set_deterministic_debug_mode("default")


def test_the_device_can_run_them() -> None:
    assert is_available(torch.zeros(1, device=DEVICE))
    assert not is_available(torch.zeros(1, device=DEVICE, dtype=torch.float64))


@pytest.mark.parametrize(
    ("num_tokens", "num_hidden", "vocab_size", "num_ignored", "bias", "soft_cap"),
    [
        (1, 3, 5, 0, False, None),
        (7, 16, 32, 7, True, 1.5),
        (17, 40, 107, 4, False, 1.5),
    ],
)
def test_any_shape(
    num_tokens: int, num_hidden: int, vocab_size: int, num_ignored: int, bias: bool, soft_cap: float | None
) -> None:
    case = Case.random(num_tokens, num_hidden, vocab_size, bias=bias, soft_cap=soft_cap, num_ignored=num_ignored)
    case.check(scratch_bytes=num_tokens * 4 * 70)  # sections of two tiles


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_any_precision_and_temperature(dtype: torch.dtype) -> None:
    Case.random(17, 24, 70, dtype=dtype, tau=(0.005, 2.0), bias=True, num_ignored=3).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_tiles_of_a_real_launch(dtype: torch.dtype) -> None:
    case = Case.random(17, 48, 150, dtype=dtype, bias=True, soft_cap=1.5)
    statistics, reference = case.statistics(), case.statistics(tile=TILE)
    torch.testing.assert_close(log_partition_of(statistics, case.tau), log_partition_of(reference, case.tau))
    assert statistics.at_one is None
    ours, theirs = (case.gradients(statistics, tile=tile) for tile in (None, TILE))
    for value, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(value, expected)


def test_more_row_blocks_than_a_group_and_several_tiles_a_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempnet.softmax.kernels._GROUP", 2)
    for num_programs in (1, 7):  # all tiles in one split; three splits, of which the last is half empty
        monkeypatch.setattr("tempnet.softmax.kernels._NUM_PROGRAMS", num_programs)
        Case.random(40, 8, 140, num_ignored=5).check()


@pytest.mark.parametrize("tau", [0.001, 2.0])
def test_the_softmax_itself_loses_nothing_at_small_temperatures(tau: float) -> None:
    """For logits that float32 holds exactly, near 40 and about 10⁻³ apart, all results are right to 1e-5."""
    case = Case.random(17, 16, 107, tau=(tau, tau), num_ignored=2)
    weight = torch.zeros_like(case.weight)
    weight[:, 0] = torch.arange(107, device=DEVICE) % 8 / 2**10  # a step of τ = .001 each
    hidden = torch.zeros_like(case.hidden)
    hidden[:, 0], hidden[:, 1] = 1.0, torch.arange(17, device=DEVICE) / 2**4
    weight[:, 1] = torch.arange(107, device=DEVICE) % 5 / 2**8
    replace(case, hidden=hidden, weight=weight, bias=torch.full((107,), 40.0, device=DEVICE)).check(is_exact=True)


def test_only_what_is_needed() -> None:
    case = Case.random(7, 20, 50, bias=True)
    statistics = case.statistics(tile=TILE)
    full = case.gradients(statistics, tile=TILE)
    for index in range(3):
        needs = tuple(number == index for number in range(3))
        gradients = case.gradients(statistics, tile=TILE, needs=needs)
        assert [gradient is not None for gradient in gradients] == list(needs)
        assert torch.equal(gradients[index], full[index])


def test_views_are_read_right_and_bits_repeat() -> None:
    """Tensors may have any strides, and the output weight may be cut to the effective vocabulary."""
    case = Case.random(14, 20, 50)
    padded = torch.cat([case.weight, torch.full_like(case.weight[:3], 1e4)])
    view = replace(case, hidden=case.hidden.T.contiguous().T, weight=padded[:50])
    statistics = case.statistics(tile=TILE)
    assert torch.equal(statistics.at_tau.cross_entropy, view.statistics(tile=TILE).at_tau.cross_entropy)
    ours, theirs = (one.gradients(statistics, tile=TILE) for one in (case, view))
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="sizes for a GPU")
def test_sizes_of_a_language_model() -> None:
    """With GPT-2's vocabulary in bfloat16 and several sections, results are close to the formula in float32."""
    case = Case.random(2048, 768, 50257, dtype=torch.bfloat16, num_ignored=100)
    statistics = case.statistics(with_unit=True)
    leaves = [leaf.detach().float().requires_grad_() for leaf in case.leaves()]
    logits = case.exact_logits(*leaves)
    is_valid = case.targets != IGNORE_INDEX
    losses = F.cross_entropy(logits / case.tau[:, None], case.targets, reduction="none") * case.tau * case.row_scale
    log_partition = (logits / case.tau[:, None]).logsumexp(-1).double()
    assert relative_error(log_partition_of(statistics, case.tau), log_partition) < 1e-5
    unit = F.cross_entropy(logits, case.targets, reduction="none").double()[is_valid]
    assert relative_error(statistics.at_one.cross_entropy[is_valid], unit) < 1e-5
    theirs = torch.autograd.grad(losses.where(is_valid, 0.0).sum(), leaves)
    ours = case.gradients(statistics, scratch_bytes=64 << 20)
    for value, reference in zip(ours, theirs, strict=False):
        assert relative_error(value, reference.double()) < 1e-2


@pytest.mark.parametrize("name", ["ce", "fixed_robust", "ts_ce", "dro", "proper"])
def test_the_loss_by_kernels_is_the_loss_in_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss, τ, values and every gradient by kernels equal those in chunks."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(17, 24, generator=generator).to(DEVICE).requires_grad_()
    weight = (0.4 * torch.randn(83, 24, generator=generator)).to(DEVICE).requires_grad_()
    targets = torch.randint(80, (17,), generator=generator).to(DEVICE)
    targets[3] = IGNORE_INDEX
    torch.manual_seed(0)
    network = TempNet(TempNetConfig.for_logits(80, rho=1.0, hidden_size=8, num_prototypes=6)).to(DEVICE)
    config = TemperatureLossConfig(name=name, rho=1.0, tau=0.7)
    parameters = list(network.parameters()) if config.kind.temperature == "tempnet" else []

    def run() -> list[Tensor]:
        loss, tau, values, _ = linear.linear_language_model_loss(
            hidden, weight, targets, config, network,
            vocab_size=80, fold=True, with_values=True,
        )  # fmt: skip
        assert values is not None
        gradients = torch.autograd.grad(loss, [hidden, weight, *parameters])
        return [loss, tau, *values, *gradients]

    is_fused = []
    monkeypatch.setattr(linear, "can_fuse", lambda *call: is_fused.append(can_fuse(*call)) or is_fused[-1])
    fused = run()
    assert all(is_fused)
    assert is_fused
    monkeypatch.setattr(linear, "can_fuse", lambda plan, hidden: False)
    for value, reference in zip(fused, run(), strict=True):
        assert relative_error(value, reference.double()) < 2e-6


@pytest.mark.parametrize("name", ["ce", "dro"])
def test_no_tokens_at_all(name: str) -> None:
    hidden = torch.zeros(0, 24, device=DEVICE, requires_grad=True)
    weight = torch.randn(83, 24).to(DEVICE).requires_grad_()
    network = TempNet(TempNetConfig.for_logits(80, rho=1.0, hidden_size=8, num_prototypes=6)).to(DEVICE)
    loss, tau, *_ = linear.linear_language_model_loss(
        hidden, weight, torch.zeros(0, dtype=torch.long, device=DEVICE), TemperatureLossConfig(name=name, rho=1.0), network,
        vocab_size=80, fold=True, with_values=True,
    )  # fmt: skip
    assert (loss.item(), len(tau)) == (0.0, 0)
    loss.backward()
    gradients = [hidden.grad, weight.grad, *(parameter.grad for parameter in network.parameters())]
    assert all(gradient is None or gradient.abs().sum().item() == 0.0 for gradient in gradients)
