"""Tests that damage to a checkpoint's files is found and named, and that a run continues from its newest whole one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.engine.resumption import (
    RECORD_FILE,
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
    """Returns the directory of a run that was killed after it had saved steps 5 and 10."""
    for step in (5, 10):
        save(tmp_path / "run" / f"checkpoint-{step:08d}")
    write_record(str(tmp_path / "run"), ["checkpoint-00000005", "checkpoint-00000010"])
    return tmp_path / "run"


BOTH = ["checkpoint-00000005", "checkpoint-00000010"]


def test_the_record_names_the_newest(run: Path) -> None:
    assert registered_step(str(run)) == 10
    assert find_resumption(str(run), {}) == Resumption(checkpoints=BOTH, notes=[])
    shutil.rmtree(run / BOTH[0])
    truncate(run / BOTH[1] / OPTIMIZER.format(rank=1))
    with pytest.raises(ValueError, match="checkpoint-00000005 cannot be used: the directory is missing"):
        find_resumption(str(run), {})


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
    "damage",
    [
        lambda checkpoint: truncate(checkpoint / OPTIMIZER.format(rank=1)),
        lambda checkpoint: shutil.rmtree(checkpoint / "deepspeed"),
        shutil.rmtree,
    ],
    ids=["truncated", "half deleted", "missing"],
)
def test_the_one_before_is_gone_on_from(run: Path, damage: Callable[[Path], None]) -> None:
    damage(run / BOTH[1])
    resumption = find_resumption(str(run), {})
    assert resumption.step == 5
    (note,) = resumption.notes
    assert note.startswith("checkpoint-00000010 cannot be used: ")
    write_record(str(run), resumption.checkpoints)
    assert registered_step(str(run)) == 5


def test_what_readers_found_counts_as_damage(run: Path) -> None:
    resumption = find_resumption(str(run), {"checkpoint-00000010": "a byte"})
    assert (resumption.step, resumption.notes) == (5, ["checkpoint-00000010 cannot be used: a byte"])


@pytest.mark.parametrize(
    "content",
    [None, b"", b'{"checkpoints": ["checkpoint-0', b"[]", b'{"ray_version": "1.0"}', b"\xff"],
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


def test_what_was_being_deleted_is_not_spoken_of(run: Path) -> None:
    save(run / "checkpoint-00000001", ranks=(0,))
    assert find_resumption(str(run), {}).notes == []
