"""The benchmarks of docs/results.md: a peer takes τ, a task verifies answers, and intervals are over seeds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t as student

from benchmarks import product_paths
from benchmarks.decoders import show_differences
from benchmarks.product_paths import FACTORS, TARGETS, check
from benchmarks.softmax_loss import fused_losses

# ---- peers -----------------------------------------------------------------------------------------------------------


def test_a_fused_cross_entropy_takes_a_temperature_for_every_token() -> None:
    """τ, hidden states and weight get the gradients of the cross-entropy of z/τ from a peer that knows no temperature."""
    hidden, weight, tau = torch.randn(40, 8).double(), torch.randn(50, 8).double(), 0.5 + torch.rand(40).double()
    leaves = [leaf.requires_grad_() for leaf in (hidden, weight, tau)]
    targets = torch.randint(50, (40,))
    expected = F.cross_entropy(hidden @ weight.T / tau.unsqueeze(-1), targets)
    found = fused_losses("cpu")["torch, chunked"](hidden / tau.unsqueeze(-1), weight, targets)
    torch.testing.assert_close(found, expected)
    for own, other in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(own, other)


# ---- tasks -----------------------------------------------------------------------------------------------------------

FACTOR = st.sampled_from(FACTORS)


@given(st.sampled_from(TARGETS), FACTOR, FACTOR, st.integers(0, 99), st.sampled_from("+-"), st.integers(0, 99))
def test_a_right_product_is_what_python_computes(
    target: int, first: int, second: int, product: int, sign: str, distance: int
) -> None:
    for shown, apart in ((product, distance), (first * second, abs(target - first * second))):
        text = f"{first} * {second} = {' '.join(str(shown))} {sign} {' '.join(str(apart))}"
        reached = shown + apart if sign == "+" else shown - apart
        # Nothing is written as "+ 0", so that no path has two forms.
        is_right = first * second == shown and reached == target and (sign, apart) != ("-", 0)
        assert check(target, text) == ((first, second), is_right)
        assert product_paths.verify({"target": target, "text": text}) == float(is_right)


def half_width(values: list[float] | np.ndarray) -> float:
    return float(student.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values)))


def test_differences_are_paired_over_seeds() -> None:
    """A rival that moves with the seed as the learned one does has a narrow interval, however wide those of both are."""
    ours, theirs = np.array([0.50, 0.70, 0.60]), np.array([0.40, 0.61, 0.49])
    measures = ("correct", "distinct_correct", "pass_at_k", "maj_at_k")
    runs = []
    for own, other in zip(ours, theirs, strict=True):
        values = {"TempNet, reward each": own, "TempNet, reward distinct": own + 0.1, "min-p": other}
        means = {name: {measure: {"mean": value} for measure in measures} for name, value in values.items()}
        runs.append({"decoders": {name: {"prompts": prompts} for name, prompts in means.items()}})
    row = next(line for line in show_differences(runs).splitlines() if line.startswith("| min-p")).split("|")
    gaps = 100 * (ours - theirs)
    for cell, mean in zip(row[2:-1], [gaps.mean()] * 4 + [gaps.mean() + 10] * 4, strict=True):
        assert list(map(float, cell.split(" ± "))) == pytest.approx([mean, half_width(gaps)], abs=0.06)
