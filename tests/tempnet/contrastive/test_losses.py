"""Every loss against a dense float64 transcription with autograd: value, gradients, state."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tempnet import TempNet, TempNetConfig
from tempnet.contrastive.losses import ContrastiveLoss, ContrastiveLossConfig, check_negatives, gamma_at
from tempnet.contrastive.state import SampleState
from tests.tempnet.contrastive.cases import (
    NAMES,
    NUM_SAMPLES,
    SIZE,
    Batch,
    dense_parameters,
    make_batch,
    make_config,
    make_dense,
    make_loss,
    relative_error,
    run,
)


def errors(
    name: str,
    batch: Batch,
    *,
    dtype: torch.dtype = torch.float64,
    gamma: float = 0.7,
    num_steps: int = 2,
    **changes: object,
) -> dict[str, float]:
    """Return the relative errors of the last step on the batch; the reference sees the same rounded inputs."""
    loss = make_loss(make_config(name, **changes))
    dense = make_dense(loss)
    if dtype != torch.float64:
        loss.float()
    ours, theirs = batch.to(dtype), batch.to(dtype).to(torch.float64)
    for _ in range(num_steps):  # a second visit makes the moving average matter
        for leaf in (ours.image, ours.text, theirs.image, theirs.text, *loss.parameters(), *dense_parameters(dense)):
            leaf.grad = None
        output = run(loss, ours, gamma)
        reference = dense(theirs.image, theirs.text, theirs.ids, theirs.image_ids, gamma)
        reference.backward()
    assert ours.image.grad is not None
    assert ours.image.grad.dtype == dtype
    found = {
        "loss": relative_error(output["loss"], reference),
        "image": relative_error(ours.image.grad, theirs.image.grad),
        "text": relative_error(ours.text.grad, theirs.text.grad),
    }
    for (key, parameter), copy in zip(loss.named_parameters(), dense_parameters(dense), strict=True):
        found[key] = relative_error(parameter.grad, copy.grad)
    if loss.state is not None:
        for modality in (0, 1):
            for id_, entry in dense.state[modality].items():
                for column, value in entry.items():
                    kept = loss.state.columns[column][modality, id_]
                    key = f"{column} of the state"
                    found[key] = max(found.get(key, 0.0), abs(float(kept - value)) / (1 + abs(float(value))))
    return found


@pytest.mark.parametrize("tile_size", [1, 5, 64])
@pytest.mark.parametrize("name", NAMES)
def test_the_dense_transcription_is_met(name: str, tile_size: int) -> None:
    """The batches have 12 pairs, with and without repeated ids and images; tiles of 5 divide neither."""
    for repeats in (True, False):
        found = errors(name, make_batch(12, seed=3, repeats=repeats), tile_size=tile_size)
        # The state is float32 in both implementations.
        assert all(value < (2e-7 if "state" in key else 1e-9) for key, value in found.items()), found


@pytest.mark.parametrize("name", NAMES)
def test_float32_and_bfloat16_inputs(name: str) -> None:
    batch = make_batch(14, seed=1)
    found = errors(name, batch, dtype=torch.float32, tile_size=8)
    assert found["loss"] < 1e-6, found
    # Gradients of single parameters are sums over anchors, some of which all but cancel.
    assert all(value < (1e-4 if "tempnet" in key else 1e-5) for key, value in found.items()), found
    found = errors(name, batch, dtype=torch.bfloat16, tile_size=8)
    # The similarities of bfloat16 rows are exact; only the gradients are rounded to the inputs' type.
    assert found["loss"] < 1e-6, found
    assert max(found["image"], found["text"]) < 5e-3, found


@settings(max_examples=25)
@given(
    name=st.sampled_from(NAMES),
    num_pairs=st.integers(2, 9),
    seed=st.integers(0, 10_000),
    repeats=st.booleans(),
    tile_size=st.integers(1, 10),
    gamma=st.sampled_from([0.01, 0.5, 1.0]),
)
def test_any_batch(name: str, num_pairs: int, seed: int, repeats: bool, tile_size: int, gamma: float) -> None:
    found = errors(name, make_batch(num_pairs, seed=seed, repeats=repeats), tile_size=tile_size, gamma=gamma, rho=0.3)
    # Gradients of few pairs may be sums that all but cancel; with one negative and ρ = 0 that of τ is rounding alone.
    assert max(found.values()) < 1e-6, found


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_without_negatives_counts_for_nothing(name: str) -> None:
    batch = make_batch(4)
    batch.ids, batch.image_ids = torch.tensor([6, 6, 7, 6]), torch.tensor([3, 3, 3, 3])
    loss = make_loss(make_config(name, cyclic_in_modal=0.0, cyclic_cross_modal=0.0))
    before = {} if loss.state is None else {key: value.clone() for key, value in loss.state.columns.items()}
    output = run(loss, batch)
    assert output["loss"].item() == 0.0
    assert batch.image.grad is not None
    assert not batch.image.grad.any()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in loss.parameters())
    assert all(torch.equal(value, loss.state.columns[key]) for key, value in before.items())  # type: ignore[union-attr]


@pytest.mark.parametrize("tau", [0.001, 0.005])
@pytest.mark.parametrize("name", ["clip_fixed", "sogclr", "isogclr"])
def test_small_temperatures_do_not_overflow(name: str, tau: float) -> None:
    """h/τ reaches 2000, with state from another batch, and float32 must stay finite."""
    config = make_config(name, tau=tau, tau_min=0.001)
    loss = make_loss(config)
    batch = make_batch(16, repeats=False).to(torch.float32)
    flipped = Batch(batch.image, (-batch.text).detach().requires_grad_(), batch.ids, batch.image_ids)
    for part in (flipped, batch, flipped):
        output = run(loss, part)
        for value in (output["loss"], output["log_u"], output["dual_gradient"], part.image.grad, part.text.grad):
            assert value is None or torch.isfinite(value).all()
    found = errors(name, batch, dtype=torch.float32, num_steps=1, tau=tau, tau_min=0.001)
    assert found["loss"] < 1e-6, found


def test_extreme_cosines_have_finite_artanh() -> None:
    rows = torch.nn.functional.normalize(torch.randn(4, SIZE, generator=torch.Generator().manual_seed(0)), dim=-1)
    for dtype in (torch.float32, torch.bfloat16):
        image = rows.to(dtype, copy=True).requires_grad_()
        text = torch.stack([rows[0], -rows[1], rows[1], rows[3]]).to(dtype).requires_grad_()
        batch = Batch(image, text, torch.arange(4), torch.arange(4))
        loss = make_loss(make_config("temperature_free")).float()
        output = run(loss, batch)
        assert torch.isfinite(output["loss"])
        assert image.grad is not None
        assert torch.isfinite(image.grad).all()
        assert image.grad.abs().max() < 1e7


def test_autocast_changes_nothing() -> None:
    batch, results = make_batch(10).to(torch.float32), []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            results.append(run(make_loss(make_config("tempnet")).float(), batch)["loss"].item())
    assert results[0] == results[1]


def test_the_outputs_are_what_the_formulas_say() -> None:
    batch, loss = make_batch(12, seed=3), make_loss(make_config("tempnet"))
    dense = make_dense(loss)
    for _ in range(2):
        output = run(loss, batch)
        dense(batch.image, batch.text, batch.ids, batch.image_ids, 0.7)
    assert output["log_u"] is not None
    assert output["dual_gradient"] is not None
    assert loss.text_tempnet is not None
    torch.testing.assert_close(output["tau"][1], loss.text_tempnet(batch.text))
    for row, id_ in enumerate(batch.ids.tolist()):
        assert abs(float(output["log_u"][1, row] - dense.state[1][id_]["log_u"])) < 1e-6
        assert min(abs(float(output["dual_gradient"][1, row] - dual)) for dual in dense.duals[id_]) < 1e-6
    assert not any(value.requires_grad for value in (output["tau"], output["log_u"], output["dual_gradient"]))
    clip = run(make_loss(make_config("clip")), batch)
    assert (clip["log_u"], clip["dual_gradient"]) == (None, None)


def test_evaluation_leaves_the_state_alone() -> None:
    loss, batch = make_loss(make_config("isogclr")), make_batch(10)
    assert loss.state is not None
    run(loss, batch)
    before = {key: value.clone() for key, value in loss.state.columns.items()}
    loss.eval()
    with torch.no_grad():
        loss(batch.image, batch.text, batch.ids, batch.image_ids, gamma=0.5)
    assert all(torch.equal(value, loss.state.columns[key]) for key, value in before.items())


def test_a_frozen_encoder_leaves_only_the_networks_gradients() -> None:
    batch, loss = make_batch(12, seed=3), make_loss(make_config("tempnet"))
    run(loss, batch)
    gradients = [parameter.grad.clone() for parameter in loss.parameters() if parameter.grad is not None]
    frozen = make_loss(make_config("tempnet"))
    run(frozen, Batch(batch.image.detach(), batch.text.detach(), batch.ids, batch.image_ids))
    for parameter, gradient in zip(frozen.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_without_stop_gradient_the_embeddings_feel_tau() -> None:
    batch, config = make_batch(12, seed=3), make_config("tempnet_in_batch")
    sizes = {"hidden_size": 7, "num_prototypes": 5, "tau_min": 0.01, "tau_max": 0.3, "stop_gradient": False}
    torch.manual_seed(0)
    networks = [TempNet(TempNetConfig.for_embeddings(SIZE, rho=1.2, **sizes)).double() for _ in range(2)]
    loss = ContrastiveLoss(config, image_tempnet=networks[0], text_tempnet=networks[1])
    dense = make_dense(loss)
    copy = batch.to(torch.float64)
    run(loss, batch)
    dense(copy.image, copy.text, copy.ids, copy.image_ids, 1.0).backward()
    assert relative_error(batch.image.grad, copy.image.grad) < 1e-9
    assert relative_error(batch.text.grad, copy.text.grad) < 1e-9


class TestMistakes:
    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"name": "simclr"}, "choose one of clip, clip_fixed"),
            ({"rho": -1.0}, "rho = -1"),
            ({"rho": math.inf}, "rho = inf"),
            ({"tau_min": 0.1}, "tau_min < tau_max"),
            ({"name": "isogclr", "tau": 0.2}, "tau = 0.2, where isogclr starts"),
            ({"tau": 0.0}, "tau = 0 must be positive"),
            ({"gamma": 0.0}, r"gamma = 0 must lie in \(0, 1\]"),
            ({"gamma_min": 1.5}, "gamma_min = 1.5"),
            ({"gamma_schedule": "linear"}, "gamma_schedule = 'linear'"),
            ({"tile_size": 0}, "tile_size = 0"),
        ],
    )
    def test_of_the_configuration(self, fields: dict[str, object], words: str) -> None:
        with pytest.raises(ValueError, match=words):
            ContrastiveLossConfig(**fields)  # type: ignore[arg-type]

    def test_an_infeasible_rho(self) -> None:
        check_negatives(make_config("tempnet", rho=4.0), 16, 64)
        check_negatives(make_config("clip", rho=9.0), 16, 64)  # This loss does not use ρ.
        with pytest.raises(
            ValueError, match=r"rho = 4.5 is not below log\(N − 1\) = 4.1431 .* below 4.1431, or more than"
        ):
            check_negatives(make_config("isogclr", rho=4.5), 16, 64)
        with pytest.raises(ValueError, match="at least 2 pairs, not 1"):
            check_negatives(make_config("clip"), 1, 64)

    def test_the_batch_that_is_asked_for_is_large_enough(self) -> None:
        for rho in (0.0, 0.5, 3.0, math.log(8.0)):
            with pytest.raises(ValueError, match="more than") as caught:
                check_negatives(make_config("tempnet", rho=rho), 2, 2)
            smallest = int(str(caught.value).split("more than ")[1].split(" pairs")[0]) + 1
            check_negatives(make_config("tempnet", rho=rho), 2, smallest)

    def test_an_unknown_id(self) -> None:
        batch = make_batch(4)
        batch.ids[2] = NUM_SAMPLES
        with pytest.raises(ValueError, match=f"id {NUM_SAMPLES} is not one of the {NUM_SAMPLES} samples"):
            run(make_loss(make_config("sogclr")), batch)

    def test_a_missing_temperature(self) -> None:
        config = make_config("sogclr_given")
        loss = ContrastiveLoss(config, state=SampleState(NUM_SAMPLES, config.state_columns))
        with pytest.raises(ValueError, match="4 of 4 ids of the batch have no temperature, the first is id"):
            run(loss, make_batch(4))

    def test_parts_that_do_not_belong(self) -> None:
        with pytest.raises(ValueError, match="two TempNets"):
            ContrastiveLoss(make_config("tempnet_in_batch"))
        with pytest.raises(ValueError, match="sogclr keeps log_u per sample"):
            ContrastiveLoss(make_config("sogclr"))
        with pytest.raises(ValueError, match="clip keeps nothing per sample"):
            ContrastiveLoss(make_config("clip"), state=SampleState(4, {"log_u": 0.0}))


def test_gamma_falls_over_the_first_half() -> None:
    config = make_config("sogclr", gamma_schedule="cosine", gamma_min=0.2)
    values = [gamma_at(config, step, 100) for step in range(101)]
    assert values[0] == 1.0
    assert values[25] == pytest.approx(0.6)
    assert all(value == pytest.approx(0.2) for value in values[50:])
    assert values == sorted(values, reverse=True)
    assert gamma_at(make_config("sogclr", gamma=0.9), 7, 10) == 0.9
