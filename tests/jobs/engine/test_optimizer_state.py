"""Test that the optimizer states of DeepSpeed's checkpoints are read by any number of workers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from deepspeed.utils.tensor_fragment import fragment_address
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from jobs.engine.checkpoint import MOMENTS, load_moments, repartition


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
