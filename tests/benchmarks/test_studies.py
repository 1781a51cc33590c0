"""The benchmarks: a peer takes a temperature for every token, and a task verifies answers."""

from __future__ import annotations

import sys
from contextlib import closing

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import product_paths
from benchmarks.product_paths import FACTORS, TARGETS
from benchmarks.scaling import Training
from benchmarks.softmax_loss import fused_losses


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
        assert product_paths.verify({"target": target, "text": text}) == float(is_right)


@pytest.mark.parametrize("num_lines", [1, 30])
def test_a_training_that_ends_says_its_last_lines(num_lines: int) -> None:
    """It may end before its first step that counts, or in a round; what is ended afterwards hides nothing."""
    code = f"import time\nfor i in range({num_lines}): print(f'step {{i}}/', flush=True); time.sleep(.02)\nprint('disk full')"

    def measure() -> None:
        with closing(Training([sys.executable, "-c", code], 1)) as training:
            training.wait_for(1)
            start = training.start()
            training._process.wait()
            training.stop(start)

    with pytest.raises(RuntimeError, match="disk full"):
        measure()
