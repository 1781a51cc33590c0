"""The logits-free losses against the reference form, in float64: loss, τ and every gradient, folded and not."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tempnet import TempNet, TempNetConfig
from tempnet.inference import CachedFold
from tempnet.softmax.fold import FoldCache, fold_pays
from tempnet.softmax.linear import LinearLoss, linear_language_model_loss
from tempnet.softmax.reference import IGNORE_INDEX, LOSS_KINDS, TemperatureLossConfig, language_model_loss
from tests.tempnet.softmax.linear_cases import RHO, compare, relative_error


@pytest.mark.parametrize("name", list(LOSS_KINDS))
@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("shape", [(1, 4, 3), (23, 8, 50), (40, 16, 131)], ids=str)
def test_float64_equals_the_reference(name: str, fold: bool, shape: tuple[int, int, int]) -> None:
    num_tokens, num_hidden, vocabulary = shape
    for chunk_size in (1, 7, 100):
        errors = compare(
            name, num_tokens=num_tokens, num_hidden=num_hidden, vocabulary=vocabulary, fold=fold, chunk_size=chunk_size
        )
        # The oracle is solved to a residual of 1e-6.
        tolerance = 1e-5 if name == "dro_newton" else 1e-9
        assert max(errors.values()) < tolerance, errors


@pytest.mark.parametrize("name", ["ce", "ts_ce", "dro"])
@pytest.mark.parametrize("shape", [(300, 32, 203), (1, 16, 50), (77, 24, 1001)], ids=str)
@pytest.mark.parametrize(
    # A float32 loss is itself rounded to 6e-8.
    ("dtype", "loss_tolerance", "tolerance"),
    [(torch.float32, 2e-7, 1e-6), (torch.bfloat16, 1e-3, 1e-2)],
    ids=str,
)
def test_lower_precisions_stay_near(
    name: str, shape: tuple[int, int, int], dtype: torch.dtype, loss_tolerance: float, tolerance: float
) -> None:
    num_tokens, num_hidden, vocabulary = shape
    for seed in range(3):
        errors = compare(
            name,
            num_tokens=num_tokens,
            num_hidden=num_hidden,
            vocabulary=vocabulary,
            dtype=dtype,
            fold=True,
            chunk_size=64,
            seed=seed,
        )
        assert errors["loss"] < loss_tolerance, errors
        assert max(errors.values()) < tolerance, errors


@settings(max_examples=60)
@given(
    name=st.sampled_from(list(LOSS_KINDS)),
    num_tokens=st.integers(1, 40),
    num_hidden=st.integers(1, 12),
    vocabulary=st.integers(3, 70),
    chunk_size=st.integers(1, 50),
    share=st.floats(0, 1),
    bias=st.booleans(),
    soft_cap=st.sampled_from([None, 2.0]),
    num_padding=st.integers(0, 3),
    reduction=st.sampled_from(["mean", "none"]),
    fold=st.booleans(),
    depth=st.sampled_from([3, 4]),
    projection=st.booleans(),
    pooling=st.sampled_from(["parametric", "linear"]),
    normalize_input=st.booleans(),
    input_shift=st.sampled_from(["none", "mean", "max"]),
    seed=st.integers(0, 1000),
)
def test_any_shape_and_switch(name: str, num_tokens: int, share: float, **options: object) -> None:
    errors = compare(name, num_tokens=num_tokens, num_ignored=int(share * num_tokens), **options)
    tolerance = 1e-4 if name == "dro_newton" else 1e-7
    assert max(errors.values()) < tolerance, errors


@pytest.mark.parametrize("fold", [True, False])
def test_what_is_centred_keeps_its_digits_beside_a_large_mean(fold: bool) -> None:
    """Logits of GPT-2 lie near −100 and differ by a few, so the mean must be subtracted before squaring."""
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(40, 24), torch.randn(500, 24), torch.randint(500, (40,))
    hidden[:, 0], weight[:, 0] = 10.0, -10.0
    network = TempNet(TempNetConfig.for_logits(500, rho=RHO, hidden_size=7, input_shift="mean"))
    config = TemperatureLossConfig(name="dro", rho=RHO)
    loss, tau, *_ = linear_language_model_loss(hidden, weight, targets, config, network, fold=fold)
    ours = torch.autograd.grad(loss, list(network.parameters()))
    exact = copy.deepcopy(network).double()
    expected, expected_tau = language_model_loss(hidden.double() @ weight.double().T, targets, config, exact)
    assert expected_tau.std() > 1e-3
    for value, reference in zip(ours, torch.autograd.grad(expected, list(exact.parameters())), strict=True):
        assert relative_error(value, reference) < 3e-5
    of_fold = CachedFold(weight, network.eval()).temperatures(hidden)
    for value in (tau, of_fold):
        assert (value.double() - expected_tau).abs().max().item() < 1e-6


@pytest.mark.parametrize("name", list(LOSS_KINDS))
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("fold", [True, False])
def test_no_tokens_at_all(name: str, reduction: str, fold: bool) -> None:
    hidden, weight = torch.zeros(0, 4, requires_grad=True), torch.randn(11, 4, requires_grad=True)
    network = TempNet(TempNetConfig.for_logits(9, rho=RHO))
    loss, tau, values, slopes = linear_language_model_loss(
        hidden, weight, torch.zeros(0).long(), TemperatureLossConfig(name=name, rho=RHO), network,
        vocab_size=9, reduction=reduction, fold=fold, with_values=True,
    )  # fmt: skip
    assert loss.shape == (() if reduction == "mean" else (0,))
    assert [len(value) for value in (tau, slopes, *values)] == [0] * 5
    assert loss.sum().item() == 0.0
    loss.sum().backward()
    assert weight.grad.abs().sum().item() == 0.0
    gradients = [parameter.grad for parameter in network.parameters()]
    assert all(gradient is None or gradient.abs().sum().item() == 0.0 for gradient in gradients)


def test_all_targets_ignored() -> None:
    hidden = torch.randn(6, 4, requires_grad=True)
    weight = torch.randn(9, 4, requires_grad=True)
    network = TempNet(TempNetConfig.for_logits(9, rho=RHO))
    config = TemperatureLossConfig(name="dro", rho=RHO)
    loss, tau, *_ = linear_language_model_loss(hidden, weight, torch.full((6,), IGNORE_INDEX), config, network)
    loss.backward()
    assert loss.item() == 0.0
    assert tau.shape == (6,)
    gradients = [hidden.grad, weight.grad, *(parameter.grad for parameter in network.parameters())]
    assert all(gradient is not None and gradient.abs().sum() == 0 for gradient in gradients)


class ProductCounter(TorchDispatchMode):
    """Dispatch mode that counts matrix products, in place or not."""

    num_products = 0

    def __torch_dispatch__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        self.num_products += func.overloadpacket.__name__ in ("mm", "addmm", "addmm_", "matmul", "linear")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_without_autograd_only_the_forward_products_are_computed(fold: bool, bias: bool) -> None:
    torch.manual_seed(0)
    num_tokens, vocabulary, num_chunks = 30, 41, 5
    hidden, weight = torch.randn(num_tokens, 8), torch.randn(vocabulary, 8)
    leaves = [hidden, weight] + ([torch.randn(vocabulary)] if bias else [])
    targets = torch.randint(vocabulary, (num_tokens,))
    network = TempNet(TempNetConfig.for_logits(vocabulary, rho=RHO, hidden_size=7, num_prototypes=5))
    config = TemperatureLossConfig(name="dro", rho=RHO)
    fold = fold and not bias

    def count() -> tuple[int, LinearLoss]:
        offset = leaves[2] if bias else None
        with ProductCounter() as counter:
            found = linear_language_model_loss(
                hidden, weight, targets, config, network, bias=offset, fold=fold, chunk_size=6, with_values=True
            )
        return counter.num_products, found

    for leaf in leaves:
        leaf.requires_grad_()
    num_trained, trained = count()
    with torch.no_grad():
        num_evaluated, evaluated = count()
    with torch.inference_mode():
        assert count()[0] == num_evaluated
    # A chunk needs its logits, W1 of them and W2 of that, and a call the fold. Training adds dh, dW and the network.
    assert num_evaluated == 3 * num_chunks + fold
    assert num_trained >= num_evaluated + 5 * num_chunks
    assert not evaluated.loss.requires_grad
    for value, reference in zip(evaluated, trained, strict=True):
        for part, expected in zip(value, reference, strict=True) if isinstance(value, tuple) else [(value, reference)]:
            torch.testing.assert_close(part, expected.detach(), rtol=0, atol=0)


def test_a_frozen_base_gets_no_gradients_and_the_network_the_same() -> None:
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(30, 8), torch.randn(40, 8), torch.randint(40, (30,))
    network = TempNet(TempNetConfig.for_logits(40, rho=RHO))
    config = TemperatureLossConfig(name="dro", rho=RHO)
    frozen, *_ = linear_language_model_loss(hidden, weight, targets, config, network)
    gradients = torch.autograd.grad(frozen, list(network.parameters()))
    joint, *_ = linear_language_model_loss(hidden.requires_grad_(), weight.requires_grad_(), targets, config, network)
    for value, reference in zip(gradients, torch.autograd.grad(joint, list(network.parameters())), strict=True):
        torch.testing.assert_close(value, reference)


def test_what_this_path_cannot_do_is_refused() -> None:
    hidden, weight, targets = torch.randn(3, 4), torch.randn(9, 4), torch.zeros(3).long()
    config = TemperatureLossConfig(name="dro", rho=RHO)
    for switches in ({"stop_gradient": False}, {"transform": False}):
        with pytest.raises(ValueError, match="no transform layer, or lets gradients through"):
            linear_language_model_loss(
                hidden, weight, targets, config, TempNet(TempNetConfig.for_logits(9, rho=RHO, **switches))
            )
    network = TempNet(TempNetConfig.for_logits(9, rho=RHO))
    with pytest.raises(ValueError, match="fold = True is impossible"):
        linear_language_model_loss(hidden, weight, targets, config, network, soft_cap=2.0, fold=True)
    shifted = TempNet(TempNetConfig.for_logits(9, rho=RHO, input_shift="max"))
    with pytest.raises(ValueError, match=r"fold = True is impossible .* input_shift = 'max'"):
        linear_language_model_loss(hidden, weight, targets, config, shifted, fold=True)
    for vocab_size in (0, -1, 10):
        with pytest.raises(ValueError, match=rf"vocab_size = {vocab_size} must lie in 1 … 9, the rows"):
            linear_language_model_loss(hidden, weight, targets, config, network, vocab_size=vocab_size)
    with pytest.raises(ValueError, match="vocab_size = 8, but the TempNet was built for a vocabulary of 9"):
        linear_language_model_loss(hidden, weight, targets, config, network, vocab_size=8)
    for chunk_size in (0, -3):
        with pytest.raises(ValueError, match=f"chunk_size = {chunk_size} must be at least 1 token"):
            linear_language_model_loss(hidden, weight, targets, config, network, chunk_size=chunk_size)
    with pytest.raises(ValueError, match="rho = 10"):
        linear_language_model_loss(hidden, weight, targets, TemperatureLossConfig(name="dro", rho=10.0), network)


def test_products_in_bfloat16_of_float32_inputs_stay_near() -> None:
    errors = compare(
        "dro", num_tokens=300, num_hidden=32, vocabulary=203, dtype=torch.float32, matmul_dtype=torch.bfloat16
    )
    assert max(errors.values()) < 1.5e-2, errors


def test_a_kept_fold_gives_the_same_and_is_made_anew_once_cleared() -> None:
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(30, 8), torch.randn(40, 8), torch.randint(40, (30,))
    network = TempNet(TempNetConfig.for_logits(40, rho=RHO))
    config = TemperatureLossConfig(name="dro", rho=RHO)
    cache = FoldCache()

    def tau(cache: FoldCache | None) -> torch.Tensor:
        return linear_language_model_loss(hidden, weight, targets, config, network, fold=True, fold_cache=cache).tau

    torch.testing.assert_close(tau(cache), tau(None))
    kept = cache.first(network.first_layer.weight, weight, centred=False)
    with torch.no_grad():
        network.first_layer.weight.mul_(1.5)
    assert cache.first(network.first_layer.weight, weight, centred=False) is kept
    cache.clear(keep_gram=True)
    torch.testing.assert_close(tau(cache), tau(None))


def test_the_choice_of_path_counts_flops() -> None:
    assert not fold_pays(100, 768, 50_257, 256)
    assert fold_pays(1_000, 768, 50_257, 256)
    assert fold_pays(700, 768, 50_257, 256, num_uses=4)
    assert not fold_pays(700, 768, 50_257, 256, trains=False)
    assert fold_pays(800, 768, 50_257, 256, trains=False)
