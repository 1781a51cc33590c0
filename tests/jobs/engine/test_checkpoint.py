"""Tests what is read of a checkpoint, that damage is found, where a run goes on, and moments on any number of workers."""

from __future__ import annotations

import json
import os
import pickle
import pickletools
import shutil
import signal
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from jobs.engine.checkpoint import (
    RunState,
    SafeCheckpointEngine,
    _parts,
    _process_directory,
    read_state,
    repartition,
    upload_part,
)
from jobs.engine.config import RunSection, TrainingConfig
from jobs.engine.resumption import (
    RECORD_FILE,
    DiskFullError,
    FatalTrainingError,
    Resumption,
    best_checkpoint,
    find_changed_file,
    find_damage,
    find_resumption,
    list_name,
    record_checkpoint,
    registered_step,
    write_file_list,
    write_record,
)
from pipelines.local_copy import shared_copy
from pipelines.plan import StreamPlan

CONFIG = TrainingConfig(run=RunSection(name="run"))
PLAN = StreamPlan(shard_sizes=(8,), seed=0)


def test_a_stage_is_pickled_by_its_value_whatever_the_python_and_other_classes_are_refused(tmp_path: Path) -> None:
    stage = ZeroStageEnum(2)
    names = [argument for _, argument, _ in pickletools.genops(pickle.dumps(stage)) if isinstance(argument, str)]
    assert "getattr" not in names
    torch.save({"zero_stage": stage, "weight": torch.ones(2)}, tmp_path / "states.pt")
    found = SafeCheckpointEngine().load(str(tmp_path / "states.pt"))
    assert found["zero_stage"] is stage
    assert torch.equal(found["weight"], torch.ones(2))
    torch.save({"hidden": pytest.raises}, tmp_path / "states.pt")
    with pytest.raises(pickle.UnpicklingError):
        SafeCheckpointEngine().load(str(tmp_path / "states.pt"))


def test_a_checkpoint_of_a_program_with_another_order_of_the_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(json.dumps(asdict(RunState())))
    assert read_state(tmp_path, CONFIG, PLAN) == RunState()
    with pytest.raises(FatalTrainingError, match=r"another order \(version 1; this program has version 2\)"):
        read_state(tmp_path, CONFIG, replace(PLAN, part_sizes=(1,)))


@pytest.mark.parametrize(
    ("held", "own", "other"),
    [
        ({}, {"archives": "a", "rows": "b"}, ""),  # written before there were hashes
        ({"archives": "a"}, {"archives": "a", "rows": "b"}, ""),  # the text was still being prepared
        ({"archives": "a", "rows": "b"}, {"archives": "a"}, ""),
        ({"archives": "a"}, {"archives": "c", "rows": "b"}, "archives"),
        ({"archives": "a", "rows": "b"}, {"archives": "a", "rows": "c"}, "rows"),
    ],
)
def test_a_run_does_not_go_on_over_other_data(
    tmp_path: Path, held: dict[str, str], own: dict[str, str], other: str
) -> None:
    (tmp_path / "state.json").write_text(json.dumps(asdict(RunState(step=40, data_identity=held))))
    expected = pytest.raises(FatalTrainingError, match=f"of step 40, they have other {other}: restore")
    with expected if other else nullcontext():
        read_state(tmp_path, CONFIG, replace(PLAN, identity=own))


def test_what_concerns_another_run_alone_is_not_taken_over(tmp_path: Path) -> None:
    state = RunState(
        step=40, world_size=1, num_units=7, best_rating=0.5, unsent_metrics=[["loss", 1.0]],
        validations=[(40, {"loss": 2.0})], store_retries=2, batches_digest="0123",
    )  # fmt: skip
    (tmp_path / "state.json").write_text(json.dumps(asdict(state)))
    own = read_state(tmp_path, CONFIG, PLAN)
    assert (own.best_rating, own.unsent_metrics, own.store_retries) == (0.5, [["loss", 1.0]], 2)
    config = replace(CONFIG, run=replace(CONFIG.run, start_from="other@40"))
    started = read_state(tmp_path, config, PLAN)
    assert started == replace(own, best_rating=None, unsent_metrics=[], store_retries=0, batches_digest="")


def test_a_part_that_cannot_be_uploaded_leaves_no_copy(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "state.json").write_text("{}")
    (tmp_path / "run").write_text("a file in the place of the run's directory")
    with pytest.raises(DiskFullError, match=rf"{tmp_path}/run/checkpoint-00000005"):
        upload_part(tmp_path / "part", str(tmp_path / "run" / "checkpoint-00000005"), rank=0, world_size=1, group="")
    assert not (tmp_path / "part").exists()


def test_a_checkpoint_in_a_store_is_read_from_a_copy_that_goes_afterwards(bucket: str, tmp_path: Path) -> None:
    (tmp_path / "part" / "deepspeed").mkdir(parents=True)
    (tmp_path / "part" / "deepspeed" / "states.pt").write_bytes(b"states")
    uri = f"s3://{bucket}/runs/run/checkpoint-00000005"
    upload_part(tmp_path / "part", uri, rank=0, world_size=1, group="")
    with shared_copy(uri) as directory:
        assert (Path(directory) / "deepspeed" / "states.pt").read_bytes() == b"states"
        assert find_changed_file(Path(directory), rank=0, world_size=1) == ""
    assert not Path(directory).exists()


def test_what_a_killed_process_has_left_is_deleted_by_the_next_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    living = _process_directory.__wrapped__()
    if not (pid := os.fork()):
        _process_directory.__wrapped__()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert len(list(tmp_path.glob("tempnet-checkpoints-*"))) == 2
    own = _process_directory.__wrapped__()
    assert set(tmp_path.glob("tempnet-checkpoints-*")) == {living, own}


OPTIMIZER = "deepspeed/zero_pp_rank_{rank}_optim_states.pt"


def save(directory: Path, *, world_size: int = 2, group: str = "a", ranks: tuple[int, ...] = (0, 1)) -> Path:
    """Writes what `world_size` workers leave of a checkpoint if only those in `ranks` finish; returns its directory."""
    for rank in ranks:
        part = directory.parent / f"part-{rank}"
        (part / "deepspeed").mkdir(parents=True)
        (part / OPTIMIZER.format(rank=rank)).write_bytes(bytes(range(100)) * (rank + 1))
        if rank == 0:
            (part / "state.json").write_text("{}")
        write_file_list(part, rank=rank, world_size=world_size, group=group)
        shutil.copytree(part, directory, dirs_exist_ok=True)
        shutil.rmtree(part)
    return directory


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:10] + bytes([content[10] ^ 1]) + content[11:])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda at: truncate(at / OPTIMIZER.format(rank=1)), r"zero_pp_rank_1_\S+ has 199 bytes instead of 200"),
        (lambda at: (at / OPTIMIZER.format(rank=0)).unlink(), r"zero_pp_rank_0_\S+ is missing"),
        (lambda at: (at / "state.json").unlink(), "state.json is missing"),
        (lambda at: (at / list_name(1)).unlink(), "files-00001.json is missing: its upload was not finished"),
        (lambda at: (at / list_name(0)).unlink(), "files-00000.json is missing"),
        (lambda at: truncate(at / list_name(1)), "files-00001.json is damaged"),
        (lambda at: (at / list_name(1)).write_text("[]"), "files-00001.json is damaged"),
        (lambda at: (at / list_name(0)).write_text('{"world_size": 2}'), "a list of its files is damaged"),
        (shutil.rmtree, "the directory is missing or empty"),
    ],
)
def test_names_and_sizes_show_what_is_bad(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    checkpoint = save(tmp_path / "checkpoint")
    assert find_damage(str(checkpoint)) == find_damage(checkpoint.as_uri()) == ""
    damage(checkpoint)
    with pytest.raises(ValueError, match=message):
        raise ValueError(find_damage(checkpoint.as_uri()))


def test_parts_of_two_attempts_are_no_checkpoint(tmp_path: Path) -> None:
    """Workers that were killed and write a step again leave no checkpoint until the last of them has finished."""
    save(tmp_path / "checkpoint", group="a")
    save(tmp_path / "checkpoint", group="b", ranks=(0,))
    assert "another attempt" in find_damage(str(tmp_path / "checkpoint"))
    save(tmp_path / "checkpoint", group="b", ranks=(1,))
    assert find_damage(str(tmp_path / "checkpoint")) == ""


def test_files_of_more_workers_that_did_not_finish_do_no_harm(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint", world_size=3, group="a", ranks=(1, 2))
    save(tmp_path / "checkpoint", group="b")
    assert find_damage(str(tmp_path / "checkpoint")) == ""
    assert not any(find_changed_file(tmp_path / "checkpoint", rank=rank, world_size=2) for rank in (0, 1))


@pytest.mark.parametrize("num_readers", [1, 3])
def test_together_the_workers_find_a_changed_byte(tmp_path: Path, num_readers: int) -> None:
    checkpoint = save(tmp_path / "checkpoint")

    def found() -> list[str]:
        messages = (find_changed_file(checkpoint, rank=rank, world_size=num_readers) for rank in range(num_readers))
        return [message for message in messages if message]

    assert not found()
    flip(checkpoint / OPTIMIZER.format(rank=1))
    assert find_damage(str(checkpoint)) == ""  # Names and sizes do not show a changed byte.
    (message,) = found()
    assert message == f"{OPTIMIZER.format(rank=1)} does not hold what was written"
    (checkpoint / OPTIMIZER.format(rank=1)).unlink()
    assert found() == [f"{OPTIMIZER.format(rank=1)} is missing"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (5, 10):
        save(tmp_path / "run" / f"checkpoint-{step:08d}")
    write_record(str(tmp_path / "run"), ["checkpoint-00000005", "checkpoint-00000010"])
    return tmp_path / "run"


BOTH = ["checkpoint-00000005", "checkpoint-00000010"]


def test_the_record_names_the_newest(run: Path) -> None:
    assert registered_step(str(run)) == 10
    save(run / "checkpoint-00000001", ranks=(0,))  # which was being deleted
    assert find_resumption(str(run), {}) == Resumption(checkpoints=BOTH, notes=[])
    # What readers found counts as damage, too.
    resumption = find_resumption(str(run), {"checkpoint-00000010": "a byte"})
    assert (resumption.step, resumption.notes) == (5, ["checkpoint-00000010 cannot be used: a byte"])
    truncate(run / BOTH[1] / OPTIMIZER.format(rank=1))
    resumption = find_resumption(str(run), {})
    assert resumption.step == 5
    assert [note.partition(": ")[0] for note in resumption.notes] == ["checkpoint-00000010 cannot be used"]
    write_record(str(run), resumption.checkpoints)
    assert registered_step(str(run)) == 5


def test_the_newest_and_the_best_are_kept(run: Path) -> None:
    save(run / "checkpoint-00000002", ranks=(0,))  # an upload that did not end
    ratings = {15: 0.1, 20: 0.3, 25: 0.2, 30: None, 35: 0.25}
    for step, rating in ratings.items():
        save(run / f"checkpoint-{step:08d}")
        record_checkpoint(str(run), f"checkpoint-{step:08d}", num_kept=2, rating=rating)
    assert sorted(path.name for path in run.glob("checkpoint-*")) == [
        "checkpoint-00000020", "checkpoint-00000030", "checkpoint-00000035"
    ]  # fmt: skip
    assert best_checkpoint(str(run)) == f"{run}/checkpoint-00000020"
    truncate(run / "checkpoint-00000020" / OPTIMIZER.format(rank=1))
    assert best_checkpoint(str(run)) == f"{run}/checkpoint-00000035"
    assert find_resumption(str(run), {}).step == 35


@pytest.mark.parametrize(
    "content", [None, b"", b'{"checkpoints": ["checkpoint-0', b"[]", b'{"ray_version": "1.0"}', b"\xff"]
)
def test_a_record_that_is_damaged_or_missing_costs_nothing(run: Path, content: bytes | None) -> None:
    if content is None:
        (run / RECORD_FILE).unlink()
    else:
        (run / RECORD_FILE).write_bytes(content)
    resumption = find_resumption(str(run), {})
    assert resumption.step == 10
    is_told = resumption.notes == [f"{RECORD_FILE} is damaged: the checkpoints' own directories decide"]
    assert is_told == (content is not None)
    write_record(str(run), resumption.checkpoints)
    assert registered_step(str(run)) == 10


@pytest.mark.parametrize("with_record", [True, False])
def test_with_none_left_it_stops_and_names_all(run: Path, with_record: bool) -> None:
    truncate(run / "checkpoint-00000010" / OPTIMIZER.format(rank=1))
    shutil.rmtree(run / "checkpoint-00000005")
    if not with_record:
        truncate(run / RECORD_FILE)
    with pytest.raises(ValueError, match=r"no checkpoint in \S+ is whole") as error:
        find_resumption(str(run), {})
    assert "checkpoint-00000010 cannot be used: deepspeed/zero_pp_rank_1_" in str(error.value)
    assert with_record == ("checkpoint-00000005 cannot be used: the directory is missing" in str(error.value))


def test_an_upload_that_was_not_finished_is_not_used_and_stops_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert find_resumption(str(run), {}).step == 0
    save(run / "checkpoint-00000005", ranks=(0,))
    (run / "checkpoint-of-another-kind").mkdir()
    resumption = find_resumption(str(run), {})
    assert resumption.checkpoints == []
    (note,) = resumption.notes
    assert note == "checkpoint-00000005 cannot be used: files-00001.json is missing: its upload was not finished"
    write_record(str(run), resumption.checkpoints)
    assert not (run / RECORD_FILE).exists()


def test_only_the_parts_of_the_last_writers_are_read(tmp_path: Path) -> None:
    """Four workers were killed while they wrote a checkpoint; two continued from an earlier step and wrote it again."""
    files = [tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(4)]
    for file in files:
        file.touch()
    assert _parts(tmp_path, 2) == files[:2]
    with pytest.raises(FileNotFoundError, match="holds 4 of 5 workers' optimizer states"):
        _parts(tmp_path, 5)


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
