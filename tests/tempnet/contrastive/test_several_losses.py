"""Several losses that share the similarities of a batch, against each of them alone: value, gradients, state."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tempnet.contrastive.losses import contrastive_losses
from tests.tempnet.contrastive.cases import make_batch, make_config, make_loss, run

CASES: tuple[tuple[str, dict[str, Any], float], ...] = (
    ("tempnet", {}, 0.7), ("tempnet", {"rho": 0.4, "tau_max": 0.3}, 0.2), ("tempnet_in_batch", {}, 1.0),
    ("isogclr", {"tau_step": 0.1}, 0.5), ("sogclr", {}, 0.9), ("clip", {}, 1.0), ("cyclip", {}, 1.0),
)  # fmt: skip
"""Name, changes of the configuration, and γ; normalisers and temperatures may be mixed."""


@pytest.mark.parametrize("tile_size", [5, 64])
def test_each_is_the_loss_that_it_would_be_alone(tile_size: int) -> None:
    configs = [make_config(name, tile_size=tile_size, **changes) for name, changes, _ in CASES]
    gammas = [gamma for *_, gamma in CASES]
    together, alone = ([make_loss(config, seed=seed) for seed, config in enumerate(configs)] for _ in range(2))
    for step in range(3):  # Later visits make the moving averages and the momentum matter.
        shared = make_batch(12, seed=step)
        outputs = contrastive_losses(together, shared.image, shared.text, shared.ids, shared.image_ids, gammas=gammas)
        torch.stack([output["loss"] for output in outputs]).sum().backward()
        image_grad, text_grad = (torch.zeros_like(leaf) for leaf in (shared.image, shared.text))
        for ours, loss, output, gamma in zip(together, alone, outputs, gammas, strict=True):
            own = make_batch(12, seed=step)
            expected = run(loss, own, gamma)
            for key in ("loss", "tau", "log_u", "dual_gradient"):
                found, wanted = output[key], expected[key]  # type: ignore[literal-required]
                assert (found is None) == (wanted is None), key
                if wanted is not None:
                    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
            for parameter, other in zip(ours.parameters(), loss.parameters(), strict=True):
                torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-10, atol=1e-12)
                parameter.grad = other.grad = None
            assert own.image.grad is not None
            assert own.text.grad is not None
            image_grad += own.image.grad
            text_grad += own.text.grad
            if loss.state is not None:
                assert ours.state is not None
                for name, column in loss.state.columns.items():
                    torch.testing.assert_close(ours.state.columns[name], column, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(shared.image.grad, image_grad, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(shared.text.grad, text_grad, rtol=1e-10, atol=1e-12)
    states = [loss.state.columns["log_u"] for loss in together if loss.state is not None]
    assert len(states) == 4
    assert not any(torch.equal(states[0], other) for other in states[1:])


def test_losses_without_a_temperature_share_a_batch_with_their_like() -> None:
    losses = [make_loss(make_config("temperature_free")) for _ in range(2)]
    batch = make_batch(8)
    outputs = contrastive_losses(losses, batch.image, batch.text, batch.ids, batch.image_ids, gammas=[1.0, 1.0])
    expected = run(losses[0], make_batch(8))["loss"]
    assert [output["loss"].item() for output in outputs] == pytest.approx([expected.item()] * 2, rel=1e-12)
    with pytest.raises(AssertionError):
        contrastive_losses(
            [losses[0], make_loss(make_config("clip"))],
            batch.image,
            batch.text,
            batch.ids,
            batch.image_ids,
            gammas=[1.0, 1.0],
        )
