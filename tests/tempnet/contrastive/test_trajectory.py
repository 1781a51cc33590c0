"""Fifty steps of the losses with a memory, against the dense transcription: parameters and state stay together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.tempnet.contrastive.cases import (
    NUM_SAMPLES,
    SIZE,
    dense_parameters,
    make_batch,
    make_config,
    make_dense,
    make_loss,
    relative_error,
)

NUM_STEPS = 50


def embeddings() -> list[Tensor]:
    """Create a table of rows for the image and text of every sample, in place of encoders."""
    generator = torch.Generator().manual_seed(0)
    tables = torch.randn(2, NUM_SAMPLES, SIZE, generator=generator, dtype=torch.float64)
    return [table.clone().requires_grad_() for table in tables]


def trained(loss: Any, tables: list[Tensor], parameters: list[Tensor]) -> list[float]:
    """Train with plain gradient descent, some repeated ids and a last batch of five; return the losses."""
    values = []
    for step in range(NUM_STEPS):
        num_pairs = 5 if step == NUM_STEPS - 1 else 10
        batch = make_batch(num_pairs, seed=step, repeats=step % 3 == 0)
        image, text = (F.normalize(table[batch.ids], dim=-1) for table in tables)
        value = loss(image, text, batch.ids, batch.image_ids, gamma=1.0 - 0.8 * step / NUM_STEPS)
        leaves = [*tables, *parameters]
        for leaf, gradient in zip(leaves, torch.autograd.grad(value, leaves), strict=True):
            leaf.data -= 0.3 * gradient
        values.append(value.item())
    return values


@pytest.mark.parametrize("name", ["sogclr", "isogclr", "tempnet"])
def test_fifty_steps(name: str) -> None:
    # η is small enough that the temperatures move inside their range instead of from bound to bound.
    loss = make_loss(make_config(name, tile_size=4, tau_step=0.003))
    dense, ours, theirs = make_dense(loss), embeddings(), embeddings()
    values = trained(lambda *a, **k: loss(*a, **k)["loss"], ours, list(loss.parameters()))
    expected = trained(lambda *a, **k: dense(*a, **k), theirs, dense_parameters(dense))

    assert values == pytest.approx(expected, rel=1e-6)
    for table, reference, start in zip(ours, theirs, embeddings(), strict=True):
        assert relative_error(table - start, reference - start) < 1e-6
        assert not torch.equal(table, start)
    for parameter, reference in zip(loss.parameters(), dense_parameters(dense), strict=True):
        assert relative_error(parameter, reference) < 1e-6
    assert loss.state is not None
    for modality, entries in enumerate(dense.state):
        for id_, entry in entries.items():
            for column, value in entry.items():
                assert float(loss.state.columns[column][modality, id_]) == pytest.approx(
                    float(value), rel=1e-5, abs=1e-6
                )
        unseen = torch.ones(NUM_SAMPLES, dtype=torch.bool)
        unseen[list(entries)] = False
        assert torch.isneginf(loss.state.columns["log_u"][modality, unseen]).all()
    if name == "isogclr":
        tau = loss.state.columns["tau"]
        assert ((tau > loss.config.tau_min) & (tau < loss.config.tau_max)).float().mean() > 0.5
        assert tau.std() > 0.003
