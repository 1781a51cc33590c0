"""The Gram form of the cyclic terms against the double sum over pairs that the paper writes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tempnet.contrastive.cyclic import cyclic_terms
from tempnet.contrastive.world import World


def double_sum(image: Tensor, text: Tensor, in_modal: float, cross_modal: float) -> Tensor:
    total = image.sum() * 0
    for j in range(len(image)):
        for k in range(len(image)):
            total = total + in_modal * (image[j] @ image[k] - text[j] @ text[k]) ** 2
            total = total + cross_modal * (image[j] @ text[k] - image[k] @ text[j]) ** 2
    return total / len(image)


@settings(max_examples=25)
@given(
    num_pairs=st.integers(1, 7),
    size=st.integers(1, 9),
    weights=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    seed=st.integers(0, 1000),
)
def test_value_and_gradients(num_pairs: int, size: int, weights: tuple[float, float], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    image, text = torch.randn(2, num_pairs, size, generator=generator, dtype=torch.float64)
    image.requires_grad_()
    text.requires_grad_()
    expected = double_sum(image, text, *weights)
    expected.backward()
    terms = cyclic_terms(image, text, *weights, World.alone())
    torch.testing.assert_close(terms.value, expected.detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(terms.image_grad, image.grad, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(terms.text_grad, text.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("distance", [0.0, 1e-4])
def test_nearly_equal_modalities_lose_no_digits(distance: float) -> None:
    """The norms of 64 pairs agree to eight digits, so that their difference would be noise in float32."""
    generator = torch.Generator().manual_seed(0)
    image, noise = torch.nn.functional.normalize(torch.randn(2, 64, 32, generator=generator), dim=-1)
    text = image + distance * noise
    terms = cyclic_terms(image, text, 0.25, 0.25, World.alone())
    expected = double_sum(image.double(), text.double(), 0.25, 0.25)
    assert abs(float(terms.value - expected)) <= 1e-6 * float(expected) + 1e-15
