"""The logits-free losses against the reference form and the formula, in float64: loss, τ and every gradient.

Networks that are trained side by side are compared with each network alone, to the last bit.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tempnet import TempNet, TempNetConfig
from tempnet.inference import CachedFold
from tempnet.softmax.config import LOSS_KINDS, TemperatureLossConfig
from tempnet.softmax.fold import FoldCache
from tempnet.softmax.linear import (
    LinearLoss,
    NetworkLoss,
    linear_language_model_loss,
    linear_language_model_losses,
)
from tempnet.softmax.reference import IGNORE_INDEX, language_model_loss, token_losses, token_slopes
from tempnet.statistics import TokenValues
from tests.tempnet.formula import relative_error, temperatures
from tests.tempnet.tiny_language_models import make_tempnet

RHO = 0.4


def compare(
    name: str,
    *,
    num_tokens: int,
    num_hidden: int,
    vocabulary: int,
    dtype: torch.dtype = torch.float64,
    fold: bool | None = None,
    chunk_size: int = 5,
    num_ignored: int = 0,
    bias: bool = False,
    soft_cap: float | None = None,
    num_padding: int = 0,
    matmul_dtype: torch.dtype | None = None,
    seed: int = 0,
    spread: float = 0.7,
    common: float = 0.0,
    **switches: Any,
) -> dict[str, float]:
    """Return relative errors of loss, τ and gradients for random inputs, against all their logits and autograd in float64.

    The reference sees the same inputs, rounded to the dtype; `switches` are fields of the network's configuration. The rows
    of the output weight have the scale `spread`, and a common row of the scale `common` is added to them.
    """
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape: int, scale: float) -> torch.Tensor:
        return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()

    num_rows = vocabulary + num_padding
    leaves = [leaf(num_tokens, num_hidden, scale=1.0), leaf(num_rows, num_hidden, scale=spread)]
    if common:
        rows = leaves[1].detach().double() + common * leaf(num_hidden, scale=1.0).detach()
        leaves[1] = rows.to(dtype).requires_grad_()
    leaves += [leaf(num_rows, scale=0.5)] if bias else []
    targets = torch.randint(vocabulary, (num_tokens,), generator=generator)
    targets[:num_ignored] = IGNORE_INDEX
    torch.manual_seed(seed)
    network = TempNet(TempNetConfig.for_logits(vocabulary, rho=RHO, hidden_size=7, num_prototypes=5, **switches))
    network.to(torch.float64 if dtype == torch.float64 else torch.float32)
    config = TemperatureLossConfig(name=name, rho=RHO, tau=0.7)

    def gradients(loss: torch.Tensor, leaves: list[torch.Tensor], network: TempNet) -> tuple[torch.Tensor, ...]:
        """Differentiate a multiple of a loss."""
        parameters = list(network.parameters()) if LOSS_KINDS[name].temperature == "tempnet" else []
        return torch.autograd.grad(3.0 * loss, [*leaves, *parameters])

    def loss_of(leaves: list[torch.Tensor]) -> LinearLoss:
        return linear_language_model_loss(
            *leaves[:2],
            targets,
            config,
            network,
            vocab_size=vocabulary,
            bias=leaves[2] if bias else None,
            soft_cap=soft_cap,
            fold=fold and not (bias or soft_cap or switches.get("input_shift") == "max"),
            chunk_size=chunk_size,
            matmul_dtype=matmul_dtype,
            with_values=True,
        )

    found = loss_of(leaves)
    exact, reference = [value.detach().double().requires_grad_() for value in leaves], copy.deepcopy(network).double()
    logits = exact[0] @ exact[1].T + (exact[2] if bias else 0.0)
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    logits = logits[:, :vocabulary]
    loss, tau = language_model_loss(logits, targets, config, reference)
    free_tau = tau.detach().requires_grad_()
    (slopes,) = torch.autograd.grad(token_losses(logits, targets, free_tau, config).sum(), free_tau)
    torch.testing.assert_close(token_slopes(logits, targets, tau, config), slopes)

    with torch.no_grad():
        evaluated = loss_of(leaves)
    assert found.values is not None
    assert evaluated.values is not None
    assert not evaluated.loss.requires_grad
    pairs = zip(
        (*evaluated[:2], evaluated.slopes, *evaluated.values), (*found[:2], found.slopes, *found.values), strict=True
    )
    assert all(torch.equal(value, trained) for value, trained in pairs)
    for value, expected in zip(found.values, TokenValues.from_logits(logits, targets, tau), strict=True):
        # from_logits is float32, and the difference of terms of size 1: a small value has few digits in it.
        scale = expected.norm().clamp(min=num_tokens**0.5).item()
        tolerance = 1e-2 if torch.bfloat16 in (dtype, matmul_dtype) else 1e-5
        assert (value.double() - expected.double()).norm().item() < tolerance * scale
    errors = {"loss": relative_error(found.loss, loss), "tau": relative_error(found.tau, tau)}
    # At the oracle's τ the slope is what rounding leaves of terms of size 1.
    difference = (found.slopes - slopes).abs().max().item()
    errors["slopes"] = difference if name == "dro_newton" else relative_error(found.slopes, slopes)
    ours = gradients(found.loss, leaves, network)
    names = [*["hidden", "weight", "bias"][: len(leaves)], *(key for key, _ in network.named_parameters())]
    for label, value, expected in zip(names, ours, gradients(loss, exact, reference), strict=False):
        is_leaf = label in ("hidden", "weight", "bias")
        assert value.dtype == (dtype if is_leaf else next(network.parameters()).dtype)
        errors[label] = relative_error(value, expected)
    return errors


@pytest.mark.parametrize("name", list(LOSS_KINDS))
@pytest.mark.parametrize("fold", [True, False])
def test_float64_equals_the_reference(name: str, fold: bool) -> None:
    """Smaller shapes are those of `test_any_shape_and_switch`."""
    sizes = {"num_tokens": 23, "num_hidden": 8, "vocabulary": 50}
    capped = {"bias": True, "soft_cap": 2.0, "num_padding": 2, "num_ignored": 5}
    for chunk_size, options in ((1, {}), (7, {}), (7, capped), (100, {})):
        errors = compare(name, **sizes, fold=fold, chunk_size=chunk_size, **options)
        # The oracle is solved to a residual of 1e-6.
        tolerance = 1e-5 if name == "dro_newton" else 1e-9
        assert max(errors.values()) < tolerance, errors


@pytest.mark.parametrize("name", ["ce", "ts_ce", "dro"])
@pytest.mark.parametrize(
    # A float32 loss is itself rounded to 6e-8; products may be in bfloat16 although the inputs are not.
    ("dtype", "matmul_dtype", "loss_tolerance", "tolerance"),
    [
        (torch.float32, None, 2e-7, 1e-6),
        (torch.bfloat16, None, 1e-3, 1e-2),
        (torch.float32, torch.bfloat16, 1.5e-2, 1.5e-2),
    ],
    ids=str,
)
def test_lower_precisions_stay_near(
    name: str, dtype: torch.dtype, matmul_dtype: torch.dtype | None, loss_tolerance: float, tolerance: float
) -> None:
    sizes: dict[str, Any] = {"num_tokens": 300, "num_hidden": 32, "vocabulary": 203}
    errors = compare(name, **sizes, dtype=dtype, matmul_dtype=matmul_dtype, fold=True, chunk_size=64)
    assert errors["loss"] < loss_tolerance, errors
    assert max(errors.values()) < tolerance, errors


@pytest.mark.parametrize(
    ("spread", "common", "matmul_dtype", "tolerance"),
    [
        (1e-3, 0.0, None, 1e-4),
        (1e-3, 3.0, None, 1e-4),
        (0.7, 25.0, None, 1e-4),  # GPT-2's logits lie near −100, so the mean must be subtracted before squaring.
        (1e-3, 0.0, torch.bfloat16, 2e-2),
        (1e-3, 3.0, torch.bfloat16, 2e-2),
    ],
)
@pytest.mark.parametrize("name", ["dro", "proper"])
@pytest.mark.parametrize("fold", [True, False])
def test_nearly_flat_logits_keep_their_digits(
    fold: bool, name: str, spread: float, common: float, matmul_dtype: torch.dtype | None, tolerance: float
) -> None:
    """The gradient of a TempNet depends on how logits differ, which may be little beside what they have in common."""
    sizes: dict[str, Any] = {"num_tokens": 24, "num_hidden": 16, "vocabulary": 300, "input_shift": "mean"}
    numbers: dict[str, Any] = {"dtype": torch.float32, "matmul_dtype": matmul_dtype, "spread": spread, "common": common}
    errors = compare(name, fold=fold, **sizes, **numbers)
    assert max(error for key, error in errors.items() if key not in ("hidden", "weight")) < tolerance, errors


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


@pytest.mark.parametrize("name", list(LOSS_KINDS))
@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("num_tokens", [0, 6])
def test_nothing_to_predict_is_a_zero_loss(name: str, fold: bool, num_tokens: int) -> None:
    """There are no tokens, or their targets are all ignored."""
    hidden, weight = torch.randn(num_tokens, 4, requires_grad=True), torch.randn(11, 4, requires_grad=True)
    network = TempNet(TempNetConfig.for_logits(9, rho=RHO))
    loss, tau, values, slopes = linear_language_model_loss(
        hidden, weight, torch.full((num_tokens,), IGNORE_INDEX), TemperatureLossConfig(name=name, rho=RHO), network,
        vocab_size=9, fold=fold, with_values=True,
    )  # fmt: skip
    assert [len(value) for value in (tau, slopes, *values)] == [num_tokens] * 5
    assert loss.item() == 0.0
    loss.backward()
    gradients = [hidden.grad, weight.grad, *(parameter.grad for parameter in network.parameters())]
    assert weight.grad is not None
    assert all(gradient is None or gradient.abs().sum().item() == 0.0 for gradient in gradients)


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


# TempNets that read hidden states.
NUM_TOKENS, NUM_HIDDEN, VOCABULARY = 17, 6, 23


def make_hidden_network(kind: str, **switches: Any) -> TempNet:
    sizes = {"rho": RHO, "hidden_size": 7, "num_prototypes": 5, **switches}
    return make_tempnet(VOCABULARY, kind=kind, state_size=NUM_HIDDEN, **sizes).double().train()


def hidden_tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(NUM_TOKENS, NUM_HIDDEN, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(VOCABULARY, NUM_HIDDEN, generator=generator, dtype=torch.float64).requires_grad_()
    targets = torch.randint(VOCABULARY, (NUM_TOKENS,), generator=generator)
    targets[3] = IGNORE_INDEX
    return hidden, weight, targets


HIDDEN_CASES = [
    {"kind": "hidden"},
    {"kind": "hidden", "normalize_input": False},
    {"kind": "both"},
    {"kind": "both", "input_shift": "mean"},
    {"kind": "both", "normalize_input": False},
]


@pytest.mark.parametrize("switches", HIDDEN_CASES, ids=str)
@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("name", ["dro", "proper"])
def test_loss_and_gradients_of_hidden_states_are_those_of_the_formula(
    switches: dict[str, Any], fold: bool, name: str
) -> None:
    hidden, weight, targets = hidden_tensors()
    network = make_hidden_network(**switches)
    exact = copy.deepcopy(network)
    config = TemperatureLossConfig(name=name, rho=RHO)
    ours = linear_language_model_loss(hidden, weight, targets, config, network, fold=fold, chunk_size=5)
    gradients = torch.autograd.grad(ours.loss, [hidden, weight, *network.parameters()])

    logits = hidden @ weight.T
    tau = temperatures(exact, logits, hidden)
    loss = token_losses(logits, targets, tau, config).sum() / (targets != IGNORE_INDEX).sum()
    expected = torch.autograd.grad(loss, [hidden, weight, *exact.parameters()])
    torch.testing.assert_close(ours.tau, tau.detach())
    torch.testing.assert_close(ours.loss, loss)
    for gradient, reference in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(exact(logits, hidden), tau)
    kept = CachedFold(weight.detach().float(), network.float()).temperatures(hidden)
    torch.testing.assert_close(kept.double(), tau, atol=1e-4, rtol=1e-4)


V, D, N = 50, 6, 23


def make_members(shift: str) -> list[NetworkLoss]:
    """Return networks that differ in loss, ρ, τ_max, norm, width, depth, pooling and initial weights."""
    options: list[dict[str, Any]] = [
        {},
        {"rho": 2.5, "tau_max": 1.5},
        {"hidden_size": 7},
        {"normalize_input": False},
        {"depth": 4, "pooling": "linear"},
    ]
    members = []
    for number, (option, loss) in enumerate(zip(options, itertools.cycle(("dro", "dro", "ts_ce")), strict=False)):
        torch.manual_seed(number)
        network = {"rho": 1.0, "hidden_size": 5, "num_prototypes": 4, "input_shift": shift, **option}
        config = TempNetConfig.for_logits(V, **network)
        loss_config = TemperatureLossConfig(name=loss, rho=config.rho, tau_max=config.tau_max)
        members.append(NetworkLoss(config=loss_config, tempnet=TempNet(config), fold_cache=FoldCache()))
    return members


@pytest.mark.parametrize(("num_tokens", "chunk_size"), [(23, None), (23, 4), (400, None)])  # 400: the fold pays
@pytest.mark.parametrize(
    ("extra", "shift"), [({}, "none"), ({"bias": True}, "mean"), ({"soft_cap": 3.0}, "max"), ({}, "mean")]
)
def test_everything_is_that_of_each_network_alone(
    num_tokens: int, chunk_size: int | None, extra: dict[str, Any], shift: str
) -> None:
    torch.manual_seed(1)
    hidden, weight, targets = torch.randn(num_tokens, D), torch.randn(V + 3, D), torch.randint(V, (num_tokens,))
    targets[::5] = IGNORE_INDEX
    options = {**extra, "vocab_size": V, "with_values": True, "chunk_size": chunk_size, "num_targets": 3.0}
    if extra.get("bias"):
        options["bias"] = torch.randn(len(weight))
    members, alone = make_members(shift), make_members(shift)
    for part in (slice(0, num_tokens // 2), slice(num_tokens // 2, num_tokens)):  # micro-batches
        losses = linear_language_model_losses(hidden[part], weight, targets[part], members, **options)
        torch.stack([found.loss for found in losses]).sum().backward()
        for same, found in zip(alone, losses, strict=True):
            expected = linear_language_model_loss(
                hidden[part], weight, targets[part], same.config, same.tempnet, **options
            )
            expected.loss.backward()
            assert found.values is not None
            assert expected.values is not None
            ours, theirs = (torch.stack([result.tau, result.slopes, *result.values]) for result in (found, expected))
            torch.testing.assert_close(found.loss, expected.loss)
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for member, same in zip(members, alone, strict=True):
        for own, other in zip(member.tempnet.parameters(), same.tempnet.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_networks_with_other_shifts_do_not_share_logits() -> None:
    networks = [make_members("none")[0], make_members("max")[0]]
    with pytest.raises(ValueError, match="one input_shift, not max, none"):
        linear_language_model_losses(
            torch.randn(2, D), torch.randn(V, D), torch.tensor([1, 2]), networks, num_targets=1.0
        )
