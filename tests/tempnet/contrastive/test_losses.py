"""Every loss against a dense float64 transcription with autograd: value, gradients, outputs and state.

Alone, several at a time, and on one space.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pytorch_metric_learning.losses import NTXentLoss
from transformers import SiglipConfig, SiglipModel

from tempnet.contrastive.config import check_negatives, gamma_at
from tempnet.contrastive.losses import ContrastiveLoss, contrastive_losses
from tempnet.contrastive.state import SampleState
from tempnet.contrastive.unimodal import UnimodalLoss
from tests.tempnet.contrastive.dense import (
    NAMES,
    NUM_SAMPLES,
    SIZE,
    Batch,
    make_batch,
    make_config,
    make_dense,
    make_loss,
    make_unimodal_loss,
    run,
)
from tests.tempnet.formula import relative_error

ROBUST = ("isogclr", "tempnet", "fastclip_v2", "fastclip_v3", "neuclip", "tempnet_neuclip")
GLOBAL = (*ROBUST, "sogclr", "sogclr_given", "fastclip_v0", "fastclip_v1")


def errors(
    name: str,
    batches: Sequence[Batch],
    *,
    dtype: torch.dtype = torch.float64,
    gammas: Sequence[float] = (0.7,),
    network: dict[str, Any] | None = None,
    **changes: Any,
) -> dict[str, float]:
    """Return the largest relative errors of the steps on some batches; the reference sees the same rounded inputs.

    The state of every sample is compared after the last step.
    """
    loss = make_loss(make_config(name, **changes), **network or {})
    dense = make_dense(loss)
    if dtype != torch.float64:
        loss.float()
    found: dict[str, float] = {}
    for step, batch in enumerate(batches):
        ours, theirs = batch.to(dtype), batch.to(dtype).to(torch.float64)
        for parameter in (*loss.parameters(), *dense.parameters):
            parameter.grad = None
        gamma = gammas[step % len(gammas)]
        output = run(loss, ours, gamma)
        reference = dense(theirs.image, theirs.text, theirs.ids, theirs.image_ids, gamma)
        reference.backward()
        assert ours.image.grad is not None
        assert ours.image.grad.dtype == dtype
        pairs = {
            "loss": (output["loss"], reference),
            "image": (ours.image.grad, theirs.image.grad),
            "text": (ours.text.grad, theirs.text.grad),
        }
        for (key, parameter), copy in zip(loss.named_parameters(), dense.parameters, strict=True):
            pairs[key] = parameter.grad, copy.grad
        has = {"tau": True, "log_u": name in GLOBAL, "dual_gradient": name in ROBUST}
        for place, key in enumerate(has if dtype == torch.float64 else ()):
            value, wanted = output[key], torch.stack([outputs[place] for outputs in dense.outputs])  # type: ignore[literal-required]
            assert (value is not None) == has[key]
            if value is not None:
                assert not value.requires_grad
                is_known = ~wanted.isnan()
                pairs[f"{key} of the anchors"] = value[is_known], wanted[is_known]
        for key, (value, expected) in pairs.items():
            found[key] = max(found.get(key, 0.0), relative_error(value, expected))
    if loss.state is not None:
        for modality, entries in enumerate(dense.state):
            for id_, entry in entries.items():
                for column, value in entry.items():
                    error = abs(float(loss.state.columns[column][modality, id_] - value)) / (1 + abs(float(value)))
                    key = f"{column} of the state"
                    found[key] = max(found.get(key, 0.0), error)
            unseen = torch.ones(NUM_SAMPLES, dtype=torch.bool)
            unseen[list(entries)] = False
            assert torch.isneginf(loss.state.columns["log_u"][modality, unseen]).all()
        if name == "isogclr" and "tau" in found:
            tau = torch.tensor([float(entry["tau"]) for entry in dense.state[0].values()])
            assert ((tau > loss.config.tau_min) & (tau < loss.config.tau_max)).any()
    return found


@pytest.mark.parametrize("tile_size", [1, 5, 64])
@pytest.mark.parametrize("name", NAMES)
def test_the_dense_transcription_is_met(name: str, tile_size: int) -> None:
    """Batches of 12 and of 3 pairs, with and without repeated ids and images; tiles of 5 divide neither."""
    for num_pairs, repeats, gamma in ((12, True, 0.7), (12, False, 1.0), (3, False, 0.01)):
        # A second visit makes the moving average matter, and the momentum of the temperatures.
        batches = [make_batch(num_pairs, seed=3, repeats=repeats)] * 2
        found = errors(name, batches, tile_size=tile_size, gammas=[gamma])
        # The state is float32 in both implementations; gradients of few pairs may be sums that all but cancel.
        tolerance = 1e-9 if num_pairs == 12 else 1e-6
        assert all(value < (2e-7 if "of the" in key else tolerance) for key, value in found.items()), found


@pytest.mark.parametrize("name", ["sogclr", "sogclr_given", "isogclr", "tempnet"])
def test_the_state_of_every_sample_is_met_over_many_batches(name: str) -> None:
    """Different samples meet in 16 batches, at a falling γ, and a sample keeps its values while it is not seen."""
    batches = [make_batch(5 if step == 9 else 10, seed=step, repeats=step % 3 == 0) for step in range(16)]
    gammas = [1.0 - 0.05 * step for step in range(16)]
    # η is small enough that the temperatures move inside their range instead of from bound to bound.
    found = errors(name, batches, gammas=gammas, tile_size=4, tau_step=0.003)
    assert all(value < 1e-6 for value in found.values()), found


@pytest.mark.parametrize("name", NAMES)
def test_float32_and_bfloat16_inputs(name: str) -> None:
    batches = [make_batch(14, seed=1)] * 2
    found = errors(name, batches, dtype=torch.float32, tile_size=8)
    assert found["loss"] < 1e-6, found
    # Gradients of single parameters are sums over anchors, some of which all but cancel.
    assert all(value < (5e-4 if "_tempnet" in key else 1e-5) for key, value in found.items()), found
    found = errors(name, batches, dtype=torch.bfloat16, tile_size=8)
    # The similarities of bfloat16 rows are exact; only the gradients are rounded to the inputs' type.
    assert found["loss"] < 1e-6, found
    assert max(found["image"], found["text"]) < 5e-3, found


def test_without_stop_gradient_the_embeddings_feel_tau() -> None:
    found = errors("tempnet_in_batch", [make_batch(12, seed=3)], network={"stop_gradient": False})
    assert max(found.values()) < 1e-9, found


@pytest.mark.parametrize("name", [name for name in NAMES if name != "siglip"])  # its positives count by themselves
def test_a_batch_without_negatives_counts_for_nothing(name: str) -> None:
    batch = make_batch(4)
    batch.ids, batch.image_ids = torch.tensor([6, 6, 7, 6]), torch.tensor([3, 3, 3, 3])
    loss = make_loss(make_config(name, cyclic_in_modal=0.0, cyclic_cross_modal=0.0))
    before = {} if loss.state is None else {key: value.clone() for key, value in loss.state.columns.items()}
    assert run(loss, batch)["loss"].item() == 0.0
    assert batch.image.grad is not None
    assert not batch.image.grad.any()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in loss.parameters())
    assert all(torch.equal(value, loss.state.columns[key]) for key, value in before.items())  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["clip_fixed", "sogclr", "isogclr"])
def test_small_temperatures_do_not_overflow(name: str) -> None:
    """h/τ reaches 2000, with state from another batch, and float32 must stay finite."""
    loss = make_loss(make_config(name, tau=0.001, tau_min=0.001))
    batch = make_batch(16, repeats=False).to(torch.float32)
    flipped = Batch(batch.image, (-batch.text).detach().requires_grad_(), batch.ids, batch.image_ids)
    for part in (flipped, batch, flipped):
        output = run(loss, part)
        for value in (output["loss"], output["log_u"], output["dual_gradient"], part.image.grad, part.text.grad):
            assert value is None or torch.isfinite(value).all()
    found = errors(name, [batch], dtype=torch.float32, tau=0.001, tau_min=0.001)
    assert found["loss"] < 1e-6, found


@pytest.mark.parametrize("tile_size", [7, 64])
def test_float32_keeps_the_digits_of_the_gradient_in_tau(tile_size: int) -> None:
    """The gradient is a difference of numbers that reach 1/τ; the reference is the same loss of the same rows in float64."""
    loss = make_loss(make_config("isogclr", tau=0.001, tau_min=0.0005, tile_size=tile_size)).float()
    exact = make_loss(make_config("isogclr", tau=0.001, tau_min=0.0005))
    for _ in range(2):  # the first visit of every sample, and one that averages
        batch = make_batch(16, repeats=False).to(torch.float32)
        ours, theirs = run(loss, batch), run(exact, batch.to(torch.float64))
        assert relative_error(ours["dual_gradient"], theirs["dual_gradient"]) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_extreme_cosines_have_finite_artanh(dtype: torch.dtype) -> None:
    rows = torch.nn.functional.normalize(torch.randn(4, SIZE, generator=torch.Generator().manual_seed(0)), dim=-1)
    image = rows.to(dtype, copy=True).requires_grad_()
    text = torch.stack([rows[0], -rows[1], rows[1], rows[3]]).to(dtype).requires_grad_()
    output = run(make_loss(make_config("temperature_free")).float(), Batch(image, text, *[torch.arange(4)] * 2))
    assert torch.isfinite(output["loss"])
    assert image.grad is not None
    assert torch.isfinite(image.grad).all()
    assert image.grad.abs().max() < 1e7


def test_autocast_evaluation_and_a_frozen_encoder_change_nothing_else() -> None:
    batch = make_batch(10)
    loss = make_loss(make_config("tempnet"))
    expected = run(loss, batch)["loss"].item()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run(make_loss(make_config("tempnet")), batch)["loss"].item() == expected
    frozen = make_loss(make_config("tempnet"))
    run(frozen, Batch(batch.image.detach(), batch.text.detach(), batch.ids, batch.image_ids))
    for parameter, same in zip(frozen.parameters(), loss.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, same.grad)
    loss = make_loss(make_config("isogclr"))
    assert loss.state is not None
    run(loss, batch)
    before = {key: value.clone() for key, value in loss.state.columns.items()}
    with torch.no_grad():
        loss.eval()(batch.image, batch.text, batch.ids, batch.image_ids, gamma=0.5)
    assert all(torch.equal(value, loss.state.columns[key]) for key, value in before.items())


MANY: tuple[tuple[str, dict[str, Any], float], ...] = (
    ("tempnet", {}, 0.7), ("tempnet", {"rho": 0.4, "tau_max": 0.3}, 0.2), ("tempnet_in_batch", {}, 1.0),
    ("isogclr", {"tau_step": 0.1}, 0.5), ("sogclr", {}, 0.9), ("clip", {}, 1.0), ("cyclip", {}, 1.0),
    ("tempnet_neuclip", {}, 0.3), ("fastclip_v0", {}, 0.5),
)  # fmt: skip
"""Name, changes of the configuration, and γ; normalisers and temperatures may be mixed."""
ARTANH: tuple[tuple[str, dict[str, Any], float], ...] = (("temperature_free", {}, 1.0),) * 2
SIGMOID: tuple[tuple[str, dict[str, Any], float], ...] = (("siglip", {}, 1.0), ("siglip", {"bias": -0.5}, 1.0))


@pytest.mark.parametrize(("cases", "tile_size"), [(MANY, 5), (MANY, 64), (ARTANH, 5), (SIGMOID, 5)])
def test_several_losses_of_a_batch_are_those_that_they_would_be_alone(cases: Any, tile_size: int) -> None:
    configs = [make_config(name, tile_size=tile_size, **changes) for name, changes, _ in cases]
    gammas = [gamma for *_, gamma in cases]
    together, alone = ([make_loss(config, seed=seed) for seed, config in enumerate(configs)] for _ in range(2))
    for step in range(3):
        shared = make_batch(12, seed=step)
        outputs = contrastive_losses(together, shared.image, shared.text, shared.ids, shared.image_ids, gammas=gammas)
        torch.stack([output["loss"] for output in outputs]).sum().backward()
        image_grad, text_grad = (torch.zeros_like(leaf) for leaf in (shared.image, shared.text))
        for ours, loss, output, gamma in zip(together, alone, outputs, gammas, strict=True):
            own = make_batch(12, seed=step)
            expected = run(loss, own, gamma)
            for key in ("loss", "tau", "log_u", "dual_gradient"):
                torch.testing.assert_close(output[key], expected[key], rtol=1e-12, atol=1e-12)  # type: ignore[literal-required]
            for parameter, other in zip(ours.parameters(), loss.parameters(), strict=True):
                torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-10, atol=1e-12)
                parameter.grad = other.grad = None
            image_grad += own.image.grad
            text_grad += own.text.grad
            for name, column in loss.state.columns.items() if loss.state is not None else ():
                torch.testing.assert_close(ours.state.columns[name], column, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(shared.image.grad, image_grad, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(shared.text.grad, text_grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": "simclr"}, "choose one of clip, clip_fixed"),
        ({"rho": -1.0}, "rho = -1"),
        ({"rho": math.inf}, "rho = inf"),
        ({"tau_min": 0.5}, "tau_min < tau_max"),
        ({"name": "isogclr", "tau": 0.5}, "tau = 0.5, where isogclr starts"),
        ({"tau": 0.0}, "tau = 0 must be positive"),
        ({"gamma": 0.0}, r"gamma = 0 must lie in \(0, 1\]"),
        ({"gamma_min": 1.5}, "gamma_min = 1.5"),
        ({"gamma_schedule": "linear"}, "gamma_schedule = 'linear'"),
        ({"tile_size": 0}, "tile_size = 0"),
        ({"name": "neuclip", "gamma": -0.1}, r"gamma = -0.1 must lie in \[0, 1\]"),
    ],
)
def test_impossible_configurations_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_config(**{"name": "tempnet", **fields})


def test_the_batch_that_is_asked_for_is_large_enough() -> None:
    check_negatives(make_config("clip", rho=9.0), 16, 64)  # This loss does not use ρ.
    with pytest.raises(ValueError, match="at least 2 pairs, not 1"):
        check_negatives(make_config("clip"), 1, 64)
    with pytest.raises(ValueError, match=r"rho = 4.5 is not below log\(N − 1\) = 4.1431"):
        check_negatives(make_config("isogclr", rho=4.5), 16, 64)
    for rho in (0.0, 0.5, 3.0, math.log(8.0)):
        with pytest.raises(ValueError, match="more than") as caught:
            check_negatives(make_config("tempnet", rho=rho), 2, 2)
        smallest = int(str(caught.value).split("more than ")[1].split(" pairs")[0]) + 1
        check_negatives(make_config("tempnet", rho=rho), 2, smallest)


def test_ids_and_parts_that_do_not_belong_are_refused() -> None:
    batch = make_batch(4)
    config = make_config("sogclr_given")
    loss = ContrastiveLoss(config, state=SampleState(NUM_SAMPLES, config.state_columns))
    with pytest.raises(ValueError, match="4 of 4 ids of the batch have no temperature, the first is id"):
        run(loss, batch)
    batch.ids[2] = NUM_SAMPLES
    with pytest.raises(ValueError, match=f"id {NUM_SAMPLES} is not one of the {NUM_SAMPLES} samples"):
        run(make_loss(make_config("sogclr")), batch)
    with pytest.raises(ValueError, match="two TempNets"):
        ContrastiveLoss(make_config("tempnet_in_batch"))
    with pytest.raises(ValueError, match="neuclip takes two NormaliserNets"):
        ContrastiveLoss(make_config("neuclip"))
    with pytest.raises(ValueError, match="sogclr keeps log_u per sample"):
        ContrastiveLoss(make_config("sogclr"))
    with pytest.raises(ValueError, match="clip keeps nothing per sample"):
        ContrastiveLoss(make_config("clip"), state=SampleState(4, {"log_u": 0.0}))
    with pytest.raises(ValueError, match="cyclip compares two modalities"):
        UnimodalLoss(make_config("cyclip"))


def test_gamma_falls_over_the_first_half() -> None:
    config = make_config("sogclr", gamma_schedule="cosine", gamma_min=0.2)
    values = [gamma_at(config, step, 100) for step in range(101)]
    assert (values[0], values[25]) == (1.0, pytest.approx(0.6))
    assert all(value == pytest.approx(0.2) for value in values[50:])
    assert values == sorted(values, reverse=True)
    assert gamma_at(make_config("sogclr", gamma=0.9), 7, 10) == 0.9
    for name in ("fastclip_v0", "fastclip_v1", "fastclip_v2", "fastclip_v3", "neuclip"):
        assert gamma_at(make_config(name), 25, 100) == pytest.approx(0.6)
        assert gamma_at(make_config(name, gamma_schedule="constant"), 25, 100) == 0.8


@pytest.mark.parametrize("tile_size", [5, 64])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("cyclip", "sogclr_given")])
def test_losses_on_one_space(name: str, tile_size: int) -> None:
    """A vector's positive is its mate, and all vectors but these two are its negatives."""
    loss, batch = make_unimodal_loss(make_config(name, tile_size=tile_size)), make_batch(9)
    dense = make_dense(loss.bimodal)
    documents = torch.tensor([3, 3, 7, 8, 8, 1, 0, 2, 5])  # two spans of some documents
    vectors, mates = torch.cat([batch.image, batch.text]), torch.cat([batch.text, batch.image])
    networks = [pair[0] for pair in (dense.networks, dense.normalisers) if pair]
    scalars = [leaf for leaf in (dense.log_tau, dense.bias) if leaf is not None]
    copies = [*(parameter for network in networks for parameter in network.parameters()), *scalars]
    for _ in range(2):
        output = loss(batch.image, batch.text, documents, gamma=0.7)
        pairs = torch.arange(9).repeat(2)
        expected = dense.side(0, vectors @ mates.T, vectors, documents.repeat(2), pairs, 0.7)
        torch.testing.assert_close(output["loss"], expected, rtol=1e-9, atol=1e-12)
        found = torch.autograd.grad(output["loss"], [batch.image, batch.text, *loss.parameters()], retain_graph=True)
        wanted = torch.autograd.grad(expected, [batch.image, batch.text, *copies], retain_graph=True)
        for value, reference in zip(found, wanted, strict=True):
            assert relative_error(value, reference) < 1e-8
        for key, values in zip(("tau", "log_u", "dual_gradient"), dense.outputs[0], strict=True):
            if output[key] is not None:  # type: ignore[literal-required]
                torch.testing.assert_close(output[key].flatten().double(), values, rtol=1e-6, atol=1e-6)  # type: ignore[literal-required]


def test_the_public_library_agrees_on_nt_xent() -> None:
    raw = torch.randn(30, SIZE, generator=torch.Generator().manual_seed(2), dtype=torch.float64).requires_grad_()
    anchors, positives = F.normalize(raw, dim=-1).chunk(2)  # the library normalises by itself
    found = make_unimodal_loss(make_config("clip_fixed", tau=0.1))(anchors, positives, torch.arange(15), gamma=1.0)
    expected = NTXentLoss(temperature=0.1)(raw, torch.arange(15).repeat(2))
    torch.testing.assert_close(found["loss"], expected, rtol=1e-6, atol=1e-6)
    gradients = [torch.autograd.grad(loss, raw)[0] for loss in (found["loss"], expected)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)


def test_the_public_library_agrees_on_the_sigmoid_loss() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 12, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    texts, images = {**sizes, "vocab_size": 20, "projection_size": 12}, {**sizes, "image_size": 8, "patch_size": 4}
    model = SiglipModel(SiglipConfig(text_config=texts, vision_config=images)).double()
    with torch.no_grad():
        model.logit_scale.fill_(math.log(9.0))
        model.logit_bias.fill_(-3.0)
    pixels = torch.randn(7, 3, 8, 8, dtype=torch.float64)
    theirs = model(torch.randint(20, (7, 5)), pixels, return_loss=True)
    image, text = theirs.image_embeds, theirs.text_embeds
    loss = make_loss(make_config("siglip", tau=1 / 9, bias=-3.0, tile_size=4))
    ours = loss(image, text, torch.arange(7), torch.arange(7), gamma=1.0)["loss"]
    torch.testing.assert_close(ours, theirs.loss)
    found = torch.autograd.grad(ours, (image, text, *loss.parameters()), retain_graph=True)
    expected = torch.autograd.grad(theirs.loss, (image, text, model.logit_scale, model.logit_bias))
    for value, wanted, sign in zip(found, expected, (1, 1, -1, 1), strict=True):  # Their scale is exp(−log τ).
        torch.testing.assert_close(value.squeeze(), sign * wanted.squeeze())
