"""Test that an optimizer's state is that of AdamW on the parameters, however many workers hold, write and read it."""

from __future__ import annotations

import copy
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.utils.tensor_fragment import fragment_address
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import AdamW

from jobs.engine.reshard import MOMENTS, load_moments, repartition
from jobs.engine.zero_layout import FlatGroup, load_state_of_parameters, part_sizes, state_of_parameters

SHAPES = [[(7, 5), (3, 33)], [(), (13,), (1,), (32,)]]


def make_parameters() -> list[list[nn.Parameter]]:
    torch.manual_seed(0)
    return [[nn.Parameter(torch.randn(shape)) for shape in group] for group in SHAPES]


def make_optimizer(groups: list[list[nn.Parameter]]) -> AdamW:
    decays = (0.1, 0.0)
    settings = [
        {"params": group, "weight_decay": decay, "name": "tempnet"} for group, decay in zip(groups, decays, strict=True)
    ]
    return AdamW(settings, lr=1e-2, fused=True)


def flatten(optimizer: AdamW, *, zero_stage: int, num_workers: int) -> list[FlatGroup]:
    found = []
    for group in optimizer.param_groups:
        sizes = part_sizes([value.numel() for value in group["params"]], zero_stage=zero_stage, num_workers=num_workers)
        found.append(FlatGroup(group, sizes, torch.zeros(sum(sizes))))
    return found


def set_gradients(groups: list[list[nn.Parameter]], seed: int) -> None:
    """Write gradients where the flat groups have them, or set them."""
    torch.manual_seed(seed)
    for parameter in (parameter for group in groups for parameter in group):
        gradient = torch.randn_like(parameter) * 1e-3
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.copy_(gradient)


@pytest.mark.parametrize(("zero_stage", "num_workers"), [(0, 1), (1, 3), (2, 1), (2, 2), (2, 8), (3, 2)])
def test_a_flat_group_is_updated_as_its_parameters_are(zero_stage: int, num_workers: int) -> None:
    flat, plain = make_parameters(), make_parameters()
    optimizers = make_optimizer(flat), make_optimizer(plain)
    groups = flatten(optimizers[0], zero_stage=zero_stage, num_workers=num_workers)
    for step in range(10):
        set_gradients(flat, step)
        set_gradients(plain, step)
        for group, parameters in zip(groups, plain, strict=True):
            gradients = [value.grad.flatten().double() for value in parameters if value.grad is not None]
            torch.testing.assert_close(group.gradient_norm().double(), torch.cat(gradients).norm(), rtol=1e-6, atol=0)
        for optimizer in optimizers:
            optimizer.step()
    for ours, theirs in zip(chain.from_iterable(flat), chain.from_iterable(plain), strict=True):
        assert ours.shape == theirs.shape
        if zero_stage in (0, 3):
            assert torch.equal(ours, theirs)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (2, 5)])
def test_the_state_is_that_of_the_parameters_whatever_the_number_of_workers(writers: int, readers: int) -> None:
    written, plain = make_parameters(), make_parameters()
    optimizers = make_optimizer(written), make_optimizer(plain)
    groups = flatten(optimizers[0], zero_stage=2, num_workers=writers)
    assert state_of_parameters(optimizers[0], groups)["state"] == {}
    for parameters, optimizer in zip((written, plain), optimizers, strict=True):
        set_gradients(parameters, 1)
        optimizer.step()
    state, expected = state_of_parameters(optimizers[0], groups), optimizers[1].state_dict()
    assert state["param_groups"] == expected["param_groups"]
    assert state["state"].keys() == expected["state"].keys()
    for number, values in expected["state"].items():
        for name, value in values.items():
            assert state["state"][number][name].shape == value.shape
            torch.testing.assert_close(state["state"][number][name], value, rtol=1e-5, atol=1e-9)
    read = [[nn.Parameter(value.detach().clone()) for value in group] for group in written]
    optimizer = make_optimizer(read)
    others = flatten(optimizer, zero_stage=2, num_workers=readers)
    load_state_of_parameters(optimizer, others, copy.deepcopy(state))
    assert_equal_states(state_of_parameters(optimizer, others), state)
    for parameters, own in ((written, optimizers[0]), (read, optimizer)):
        set_gradients(parameters, 2)
        own.step()
    for ours, theirs in zip(chain.from_iterable(read), chain.from_iterable(written), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def assert_equal_states(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["param_groups"] == theirs["param_groups"]
    own: dict[int, dict[str, Tensor]] = ours["state"]
    assert own.keys() == theirs["state"].keys()
    assert all(
        torch.equal(value, theirs["state"][k][name]) for k, values in own.items() for name, value in values.items()
    )


def test_parts_are_equal_and_padded() -> None:
    assert part_sizes([256, 1, 1, 256], zero_stage=2, num_workers=2) == [258, 258]
    assert part_sizes([256, 1, 1, 256], zero_stage=1, num_workers=1) == [514]
    assert part_sizes([16, 1, 1, 32], zero_stage=2, num_workers=2) == [26, 26]
    assert part_sizes([16, 1, 1, 32], zero_stage=0, num_workers=2) == [16, 1, 1, 32]


def write_parts(directory: Path, moment: Tensor, num_workers: int, step: int) -> None:
    """Writes what DeepSpeed saves of one parameter whose flat vector is divided among the workers."""
    for rank, part in enumerate(moment.chunk(num_workers)):
        place = {"weight": fragment_address(numel=len(part), start=0)}
        state = {0: {**dict.fromkeys(MOMENTS, part), "step": torch.tensor(step)}}
        saved = {"optimizer_state_dict": {"base_optimizer_state": {"state": state}, "param_slice_mappings": [place]}}
        torch.save(saved, directory / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def fresh_engine() -> SimpleNamespace:
    """Returns the engine of a single worker, which holds the whole parameter."""
    module = nn.Linear(12, 1, bias=False)
    whole = fragment_address(numel=12, start=0)
    module.weight._hp_mapping = SimpleNamespace(lp_fragment_address=whole, hp_fragment_address=whole)
    zero = SimpleNamespace(
        single_partition_of_fp32_groups=[torch.zeros(12)],
        bit16_groups=[[module.weight]],
        optimizer=SimpleNamespace(state={}, param_groups=[{}]),
    )
    return SimpleNamespace(module=module, optimizer=zero, lr_scheduler=SimpleNamespace(get_last_lr=lambda: [0.1]))


def test_parts_that_other_workers_left_are_not_read(tmp_path: Path) -> None:
    """Four workers were killed while they wrote a checkpoint; two continued from an earlier step and wrote it again."""
    moment = torch.arange(12.0)
    write_parts(tmp_path, torch.full((12,), -9.0), 4, step=7)
    write_parts(tmp_path, moment, 2, step=5)
    engine = fresh_engine()
    load_moments(engine, tmp_path, lambda file: torch.load(file, weights_only=False), num_writers=2)
    (state,) = engine.optimizer.optimizer.state.values()
    assert state["step"] == 5
    for key in MOMENTS:
        assert torch.equal(state[key], moment)


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    write_parts(tmp_path, torch.arange(12.0), 2, step=5)
    with pytest.raises(FileNotFoundError, match="holds 2 of 3 workers' optimizer states"):
        load_moments(fresh_engine(), tmp_path, torch.load, num_writers=3)


@given(st.lists(st.integers(1, 23), min_size=1, max_size=5), st.integers(1, 5), st.integers(1, 5))
def test_partitions_of_zero_3_are_those_of_the_whole_parameters(
    sizes: list[int], num_writers: int, num_readers: int
) -> None:
    """Padding is zero whatever the writers' padding was."""
    parameters = [torch.arange(1.0, size + 1) + 100 * number for number, size in enumerate(sizes)]

    def divide(count: int, padding: float) -> list[Tensor]:
        lengths = [-(-size // count) * count for size in sizes]
        padded = [
            torch.cat([values, torch.full((length - len(values),), padding)])
            for values, length in zip(parameters, lengths, strict=True)
        ]
        return [torch.cat([values.view(count, -1)[rank] for values in padded]) for rank in range(count)]

    written = divide(num_writers, padding=-1.0)
    for rank, expected in enumerate(divide(num_readers, padding=0.0)):
        assert torch.equal(repartition(written, sizes, rank=rank, world_size=num_readers), expected)
