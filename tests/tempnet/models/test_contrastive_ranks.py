"""World-size invariance: two processes that share a batch compute what one computes of the whole batch."""

from __future__ import annotations

import pytest
import torch
import torch.multiprocessing
from torch import Tensor, nn

from tempnet.contrastive.world import World
from tests.tempnet.models.rank_cases import LOSSES, NORMS, NUM_STEPS, loss_case, norm_case, run_rank

Values = dict[str, dict[str, Tensor]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Values]:
    """Return what both ranks computed; the processes are started once for all tests."""
    directory = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(run_rank, args=(2, str(directory)), nprocs=2)
    return [torch.load(directory / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("name", list(NORMS))
def test_batch_norm(name: str, ranks: list[Values]) -> None:
    dtype = NORMS[name][2]
    theirs = norm_case(name, slice(None), nn.BatchNorm1d if len(NORMS[name][0]) == 2 else nn.BatchNorm2d)
    first, second = (values[name] for values in ranks)
    # nn.BatchNorm2d in float32 is itself 1e-6 away from float64, and at 3000 ± 3 its x̂ has an error of 1e-4.
    tolerance = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 2e-2}[dtype]
    if name == "far from zero":
        tolerance = 1e-3
    for key, value in theirs.items():
        if key in ("y", "x.grad"):
            ours = torch.cat([first[key], second[key]])
        elif key.endswith(".grad"):
            ours = first[key] + second[key]
        else:
            ours = first[key]
            assert torch.equal(second[key], ours), key
        assert ours.dtype == value.dtype
        assert (ours - value).abs().max() <= tolerance * value.abs().max().clamp(min=1.0), key


@pytest.mark.parametrize(("name", "dtype"), LOSSES)
def test_encoders_tempnets_and_loss(name: str, dtype: str, ranks: list[Values]) -> None:
    alone = loss_case(name, dtype, World.alone())
    first, second = (values[f"{name} {dtype}"] for values in ranks)
    assert set(first) == set(second) == set(alone)
    loss_error, gradient_error = (1e-6, 1e-5) if dtype == "float32" else (1e-9, 1e-9)
    largest = max(value.norm() for key, value in alone.items() if key.startswith("grad."))
    for key, value in alone.items():
        if key.startswith("loss."):
            assert first[key] == second[key]
            assert first[key].item() == pytest.approx(value.item(), rel=loss_error)
        elif key.startswith("tau."):
            torch.testing.assert_close(torch.cat([first[key], second[key]], dim=1), value, rtol=1e-5, atol=0)
        elif key.startswith("grad."):
            mean = (first[key] + second[key]) / 2
            # Some gradients are small differences of large numbers, that of attention's key bias is exactly none.
            floor = (1e-6 if dtype == "float32" else 1e-13) * largest
            assert (mean - value).norm() <= gradient_error * value.norm() + floor, key
        else:
            assert torch.equal(first[key], second[key]), key
            torch.testing.assert_close(first[key], value, rtol=1e-6, atol=1e-6, msg=key)
    assert sum(key.endswith("num_batches_tracked") for key in alone) > 3
    assert all(int(value) == NUM_STEPS for key, value in alone.items() if key.endswith("num_batches_tracked"))
    if name == "tempnet":
        assert alone["grad.loss.image_tempnet.projection"].abs().max() > 0
