"""The parts of the contrastive losses: repeats, temperatures, cyclic terms, statistics, and the per-sample state.

What is written to the state, which samples' owners keep, is read on any number of ranks; files serve any other number.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from tempnet.contrastive.config import ContrastiveLossConfig
from tempnet.contrastive.losses import (
    ContrastiveOutput,
    LearnedTemperature,
    PairStatistics,
    held_out_losses,
    momentum_step,
)
from tempnet.contrastive.state import SampleState, World
from tempnet.contrastive.step import cyclic_terms


@pytest.mark.parametrize(
    ("log_tau", "grad", "expected"),
    [
        (math.log(0.07), 1.0, 0.07),  # inside: d τ/d log τ = τ
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
    config = ContrastiveLossConfig(name="isogclr", tau_step=0.02, tau_momentum=0.25)
    tau, momentum = torch.tensor([[0.02, 0.02, 0.02]]), torch.tensor([[0.2, 0.0, 0.0]])
    new_tau, new_momentum = momentum_step(tau, momentum, torch.tensor([[0.4, 90.0, -90.0]]), config)
    assert new_momentum[0].tolist() == pytest.approx([0.25, 1.25, -1.25])
    assert new_tau[0].tolist() == pytest.approx([0.015, 0.001, 0.045])


@pytest.mark.parametrize("distance", [0.0, 1e-4])
def test_cyclic_terms_of_nearly_equal_modalities_lose_no_digits(distance: float) -> None:
    """The norms of 32 pairs agree to eight digits, so that their difference would be noise in float32."""
    generator = torch.Generator().manual_seed(0)
    image, noise = normalize(torch.randn(2, 32, 32, generator=generator), dim=-1)
    text = image + distance * noise
    value, *_ = cyclic_terms(image, text, 0.25, 0.25, World.alone())
    exact, other = image.double(), text.double()
    in_modal = (exact @ exact.T - other @ other.T).square().sum() / 32
    cross_modal = (exact @ other.T - other @ exact.T).square().sum() / 32
    expected = 0.25 * in_modal + 0.25 * cross_modal
    assert abs(float(value - expected)) <= 1e-6 * float(expected) + 1e-15


@pytest.mark.parametrize("name", ["tempnet", "tempnet_in_batch"])
@pytest.mark.parametrize("tile_size", [3, None])
def test_every_held_out_anchor_costs_what_the_formula_says(name: str, tile_size: int | None) -> None:
    image_ids = torch.tensor([0, 0, 1, 2, 2, 2, 3, 4])  # five images with one to three captions each
    generator = torch.Generator().manual_seed(0)
    images = normalize(torch.randn(5, 6, generator=generator, dtype=torch.float64), dim=-1)[image_ids]
    texts = normalize(torch.randn(8, 6, generator=generator, dtype=torch.float64), dim=-1)
    tau = 0.05 + torch.rand(2, 8, generator=generator, dtype=torch.float64)
    config = ContrastiveLossConfig.for_name(name, rho=1.2, tile_size=tile_size)
    found = held_out_losses(images, texts, image_ids, config)(tau)
    cosines = images @ texts.T
    for side, matrix in enumerate((cosines, cosines.T)):
        for i, (row, one) in enumerate(zip(matrix, tau[side].tolist(), strict=True)):
            h = [(row[j] - row[i]).item() / one for j in range(8) if image_ids[j] != image_ids[i]]
            total = sum(math.exp(value) for value in h)
            expected = one * (math.log(total / len(h)) + 1.2) if name == "tempnet" else math.log1p(total)
            assert found[side, i].item() == pytest.approx(expected)


CONFIG = ContrastiveLossConfig(name="tempnet")


def statistics_of(
    tau: Tensor, log_u: Tensor | None = None, gradient: Tensor | None = None, config: ContrastiveLossConfig = CONFIG
) -> PairStatistics:
    output: ContrastiveOutput = {"loss": torch.zeros(()), "tau": tau, "log_u": log_u, "dual_gradient": gradient}
    return PairStatistics.of(output, config)


def test_statistics_of_halves_add_up_and_figures_are_those_of_the_values() -> None:
    torch.manual_seed(0)
    tau = torch.empty(2, 40).uniform_(CONFIG.tau_min, CONFIG.tau_max)
    tau[0, :4], tau[1, :2] = CONFIG.tau_min, CONFIG.tau_max
    log_u, gradient = torch.randn(2, 40), torch.randn(2, 40)
    log_u[0, 3] = -torch.inf  # never had a negative
    whole = statistics_of(tau, log_u, gradient)
    first, second = (
        statistics_of(tau[:, part], log_u[:, part], gradient[:, part]) for part in (slice(0, 13), slice(13, 40))
    )
    torch.testing.assert_close(first.sums + second.sums, whole.sums)
    summary, known, exact = whole.summary(), log_u[log_u.isfinite()].double(), tau.double()
    expected = {
        "tau_mean": exact.mean(),
        "tau_mean_image": exact[0].mean(),
        "tau_mean_text": exact[1].mean(),
        "tau_share_upper_bound": (tau >= 0.05 - 0.01 * 0.049).double().mean(),
        "tau_q95": exact.flatten().quantile(0.95),
        "log_u_mean": known.mean(),
        "log_u_std": known.std(unbiased=False),
        "dual_gradient_mean": gradient.double().mean(),
        "dual_gradient_absolute": gradient.double().abs().mean(),
    }
    for name, value in expected.items():
        assert summary[name] == pytest.approx(float(value), rel=1e-6, abs=1e-3 if "_q" in name else 0), name


def test_quantiles_of_a_fixed_temperature_are_it() -> None:
    for tau in (0.1, 0.0001):
        config = ContrastiveLossConfig.for_name("sogclr", tau=tau)
        summary = statistics_of(torch.full((2, 4), tau), config=config).summary()
        assert [summary["tau_mean"], summary["tau_q50"]] == pytest.approx([tau, tau], abs=5e-4)


def test_statistics_leave_out_what_a_loss_does_not_have() -> None:
    summary = statistics_of(torch.full((2, 4), 0.01)).summary()
    assert summary["tau_std"] == pytest.approx(0.0, abs=1e-9)
    assert not {"log_u_mean", "dual_gradient_mean"} & set(summary)
    free = ContrastiveLossConfig.for_name("temperature_free")
    assert statistics_of(torch.ones(2, 4), config=free).summary() == {}


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
    assert sum(column.nbytes for state in states for column in state.columns.values()) == num_samples * 2 * 2 * 4


@pytest.mark.parametrize("num_samples", [23, 3])  # also fewer than ranks
def test_files_serve_any_number_of_ranks(num_samples: int, tmp_path: Path) -> None:
    """Saving and loading with 1 → 2 → 4 → 3 → 1 ranks changes no bit, not even −inf of samples not yet seen."""
    table = torch.randn(2, num_samples, generator=torch.Generator().manual_seed(0))
    states = shards(num_samples, 1)
    states[0].update(torch.arange(0, num_samples, 2), {"log_u": table[:, ::2]})
    expected = whole(states, "log_u")
    for size in (2, 4, 3, 1):
        directory = tmp_path / str(size)
        for state in states:
            state.save(directory)
        num_writers, states = len(states), shards(num_samples, size)
        for state in states:
            state.load(directory, num_writers)
        assert torch.equal(whole(states, "log_u"), expected)
        assert (whole(states, "tau") == torch.tensor(0.01)).all()


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
        SampleState(8, COLUMNS).read(torch.tensor([4, -3]))
    table = torch.full((2, 8), 0.1)
    table[1, 3], table[0, 5], table[1, 5] = math.nan, 0.0, -1.0
    with pytest.raises(ValueError, match="the table of tau lacks 2 of 8 ids"):
        SampleState(8, COLUMNS).fill("tau", table)
    with pytest.raises(ValueError, match=r"shape \(2, 8\), \(2, 9\) is needed"):
        SampleState(9, COLUMNS).fill("tau", table)
