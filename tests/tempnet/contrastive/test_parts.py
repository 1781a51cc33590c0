"""Tests of the parts of the contrastive losses: masks, repeated ids, and the learned scalar."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tempnet.contrastive.config import ContrastiveLossConfig
from tempnet.contrastive.normalisers import Repeats
from tempnet.contrastive.pairs import PositivePairs
from tempnet.contrastive.temperatures import LearnedTemperature, momentum_step
from tempnet.contrastive.world import World


@settings(max_examples=60)
@given(
    keys=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    num_ranks=st.integers(1, 3),
    tile_size=st.integers(1, 7),
)
def test_positive_pairs_are_those_of_one_image(keys: list[int], num_ranks: int, tile_size: int) -> None:
    image_ids = torch.tensor(keys * num_ranks)
    same = image_ids[:, None] == image_ids[None]
    for rank in range(num_ranks):
        part = World(rank, num_ranks).part(len(image_ids))
        pairs = PositivePairs.find(image_ids, part)
        assert torch.equal(pairs.num_negatives, (~same).sum(1))
        found = torch.zeros(len(keys), len(image_ids), dtype=torch.int64)
        for (row, column), (rows, columns) in pairs.by_tile(tile_size).items():
            assert max(rows.max(), columns.max()) < tile_size
            found.index_put_((rows + row * tile_size, columns + column * tile_size), torch.tensor(1), accumulate=True)
        assert torch.equal(found, same[part].long())


def test_repeats_are_averaged_in_log_space() -> None:
    ids = torch.tensor([4, 9, 4, 2, 4])
    values = torch.tensor([[1.0, -3.0, 700.0, 5.0, 699.0]], dtype=torch.float64)
    counts = torch.tensor([True, True, True, False, True])
    mean = Repeats(ids).log_mean_exp(values, counts)
    expected = torch.tensor([1.0, 700.0, 699.0], dtype=torch.float64).logsumexp(0) - math.log(3)
    assert torch.allclose(mean[0, [0, 2, 4]], expected)
    assert mean[0, 1] == -3.0
    assert torch.isneginf(mean[0, 3])
    assert Repeats(ids).mean(values, counts)[0].tolist() == pytest.approx([1400 / 3, -3, 1400 / 3, 0, 1400 / 3])


@pytest.mark.parametrize(
    ("log_tau", "grad", "expected"),
    [
        (math.log(0.07), 1.0, 0.07),  # inside: d τ/d log τ = τ
        (math.log(0.07), -1.0, -0.07),
        (math.log(2.0), 1.0, 1.0),  # above the bound 1, and the gradient leads back
        (math.log(2.0), -1.0, 0.0),  # further out
        (math.log(0.001), -1.0, -0.01),  # below the bound 0.01
        (math.log(0.001), 1.0, 0.0),
    ],
)
def test_the_learned_temperature_can_leave_its_bounds(log_tau: float, grad: float, expected: float) -> None:
    learned = LearnedTemperature(ContrastiveLossConfig.for_name("clip"))
    assert learned().item() == pytest.approx(0.07)
    learned.log_tau.data.fill_(log_tau)
    tau = learned()
    assert tau.item() == pytest.approx(min(1.0, max(0.01, math.exp(log_tau))))
    tau.backward(torch.tensor([grad]))
    assert learned.log_tau.grad is not None
    assert learned.log_tau.grad.item() == pytest.approx(expected, abs=1e-9)


def test_the_momentum_step_clips_and_projects() -> None:
    config = ContrastiveLossConfig(name="isogclr", tau_step=0.01, tau_momentum=0.5)
    tau, momentum = torch.tensor([[0.02, 0.02, 0.02]]), torch.tensor([[0.2, 0.0, 0.0]])
    new_tau, new_momentum = momentum_step(tau, momentum, torch.tensor([[0.4, 90.0, -90.0]]), config)
    assert new_momentum[0].tolist() == pytest.approx([0.3, 2.5, -2.5])
    assert new_tau[0].tolist() == pytest.approx([0.017, 0.001, 0.045])
