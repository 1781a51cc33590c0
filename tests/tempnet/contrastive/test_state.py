"""The owner-sharded state: what is written is read, on any number of ranks, and files serve any other number."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tempnet.contrastive.config import LOSS_KINDS, ContrastiveLossConfig
from tempnet.contrastive.state import SampleState
from tempnet.contrastive.world import World

COLUMNS = {"log_u": -math.inf, "tau": 0.01}


def shards(num_samples: int, size: int) -> list[SampleState]:
    """Create the states of all ranks, which save, load and write without talking to each other."""
    return [SampleState(num_samples, COLUMNS, world=World(rank, size)) for rank in range(size)]


def whole(states: list[SampleState], name: str) -> Tensor:
    """Return a column of all samples (2, N), combined according to the rule of ownership."""
    column = torch.full((2, states[0].num_samples), math.nan)
    for rank, state in enumerate(states):
        column[:, rank :: len(states)] = state.columns[name]
    return column


def test_what_is_written_is_read() -> None:
    state = SampleState(10, COLUMNS)
    ids = torch.tensor([7, 0, 7])
    before = state.read(ids)
    assert torch.isneginf(before["log_u"]).all()
    values = torch.tensor([[1.0, 2.0, 1.0], [3.0, 4.0, 3.0]])
    state.update(ids, {"log_u": values})
    assert torch.equal(state.read(ids)["log_u"], values)
    assert torch.equal(state.read(torch.tensor([1, 7]))["log_u"], torch.tensor([[-math.inf, 1.0], [-math.inf, 3.0]]))
    assert (state.read(ids)["tau"] == torch.tensor(0.01)).all()


@settings(max_examples=30)
@given(num_samples=st.integers(1, 40), size=st.integers(1, 5), seed=st.integers(0, 1000))
def test_every_sample_has_one_owner(num_samples: int, size: int, seed: int) -> None:
    """Ranks write the values of a batch; together they hold each once, and the rest is untouched."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(num_samples, generator=generator)[: max(1, num_samples // 2)]
    values, expected = torch.randn(2, len(ids), generator=generator), torch.full((2, num_samples), -math.inf)
    expected[:, ids] = values
    states = shards(num_samples, size)
    for state in states:
        state.update(ids, {"log_u": values})
    assert torch.equal(whole(states, "log_u"), expected)
    assert sum(state.bytes_per_rank for state in states) == num_samples * 2 * 2 * 4


def test_files_serve_any_number_of_ranks(tmp_path: Path) -> None:
    """Saving and loading with 1 → 2 → 4 → 3 → 1 ranks changes no bit, not even −inf of samples not yet seen."""
    table = torch.randn(2, 23, generator=torch.Generator().manual_seed(0))
    states = shards(23, 1)
    states[0].update(torch.arange(0, 23, 2), {"log_u": table[:, ::2]})
    expected = whole(states, "log_u")
    for size in (2, 4, 3, 1):
        directory = tmp_path / str(size)
        for state in states:
            state.save(directory)
        num_writers, states = len(states), shards(23, size)
        for state in states:
            state.load(directory, num_writers)
        assert torch.equal(whole(states, "log_u"), expected)
        assert (whole(states, "tau") == torch.tensor(0.01)).all()


def test_more_ranks_than_samples(tmp_path: Path) -> None:
    states = shards(2, 3)
    for state in states:
        state.fill("tau", torch.full((2, 2), 0.5))
        state.save(tmp_path)
    alone = SampleState(2, COLUMNS)
    alone.load(tmp_path, 3)
    assert (alone.columns["tau"] == 0.5).all()


def test_files_of_other_ranks_lie_beside_them(tmp_path: Path) -> None:
    """Four ranks are killed while they write; two continue from an earlier step and write it again."""
    for state in shards(23, 4)[:3]:
        state.fill("tau", torch.full((2, 23), 9.0))
        state.save(tmp_path)
    table = torch.rand(2, 23, generator=torch.Generator().manual_seed(0)) + 0.1
    for state in shards(23, 2):
        state.fill("tau", table)
        state.save(tmp_path)
    states = shards(23, 3)
    for state in states:
        state.load(tmp_path, 2)
    assert torch.equal(whole(states, "tau"), table)


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="state of 1 ranks: samples-00000-of-00001"):
        SampleState(8, COLUMNS).load(tmp_path, 1)
    for state in shards(8, 2):
        state.save(tmp_path)
    with pytest.raises(ValueError, match="holds the state of 8 samples, not of 9"):
        SampleState(9, COLUMNS).load(tmp_path, 2)
    with pytest.raises(ValueError, match="holds log_u, tau; this loss keeps log_u"):
        SampleState(8, {"log_u": 0.0}).load(tmp_path, 2)
    (tmp_path / "samples-00001-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"of 2 ranks: samples-00001-of-00002\.safetensors missing"):
        SampleState(8, COLUMNS).load(tmp_path, 2)
    with pytest.raises(ValueError, match="id -3 is not one of the 8 samples"):
        SampleState(8, COLUMNS).check(torch.tensor([4, -3]))
    table = torch.full((2, 8), 0.1)
    table[1, 3], table[0, 5], table[1, 5] = math.nan, 0.0, -1.0
    with pytest.raises(ValueError, match="the table of tau lacks 2 of 8 ids"):
        SampleState(8, COLUMNS).fill("tau", table)
    with pytest.raises(ValueError, match=r"shape \(2, 8\), \(2, 9\) is needed"):
        SampleState(9, COLUMNS).fill("tau", table)


@pytest.mark.parametrize("name", LOSS_KINDS)
def test_a_loss_keeps_only_what_it_needs(name: str) -> None:
    """Both modalities together take 8 bytes per sample for log u, 24 with τ and its momentum, 16 with a given τ."""
    columns = ContrastiveLossConfig.for_name(name).state_columns
    expected = {"sogclr": 8, "tempnet": 8, "isogclr": 24, "sogclr_given": 16}.get(name, 0)
    assert SampleState(1000, columns, world=World(3, 8)).bytes_per_rank == expected * 125
