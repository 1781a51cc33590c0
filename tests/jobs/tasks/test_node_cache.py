"""Test which size of the node's cache a run gets, and how a command ends when its object store refuses."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from s3_support import run_object_store

from jobs.tasks.node_cache import GIB, cache_bytes
from pipelines.plan import StreamPlan

ROOT = Path(__file__).parents[3]


@dataclass
class Data:
    cache_gib: float
    shuffle_window: int = 200


def size(data: Data, *, num_shards: int = 6, shard: int = GIB, split: str = "train") -> int:
    plan = StreamPlan(shard_sizes=(100,) * num_shards, seed=3, window_size=data.shuffle_window)
    return cache_bytes(data, plan=plan, shard_bytes=[shard] * num_shards, split=split)


def test_a_cache_that_holds_a_window_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert size(Data(cache_gib=2)) == 2 * GIB
    assert size(Data(cache_gib=3, shuffle_window=1000), num_shards=3) == 3 * GIB
    assert size(Data(cache_gib=0)) == size(Data(cache_gib=0.1), shard=0) == 0
    assert not capsys.readouterr().out


def test_a_cache_that_is_too_small_is_reported_and_not_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert size(Data(cache_gib=1.9), split="") == 0
    assert not capsys.readouterr().out
    assert size(Data(cache_gib=1.9)) == 0
    said = capsys.readouterr().out
    assert said.startswith("warning: data.cache_gib = 1.9 is less than the 2 GiB that the largest window of data.train")
    assert "set data.cache_gib to 2 or more" in said


@given(st.integers(1, 2**36))
def test_a_cache_of_the_size_that_the_warning_names_is_used(shard: int) -> None:
    said = io.StringIO()
    with redirect_stdout(said):
        assert size(Data(cache_gib=1e-12), shard=shard) == 0
    (named,) = re.findall(r"set data.cache_gib to (\S+) or more", said.getvalue())
    assert size(Data(cache_gib=float(named)), shard=shard) >= 2 * shard


def test_the_need_is_that_of_the_largest_window() -> None:
    plan = StreamPlan(shard_sizes=(10, 10, 10, 10, 10), seed=0, window_size=10)
    assert plan.cache_need([1, 2, 3, 4, 50]) == 50
    assert plan.cache_need([1, 2, 3, 4, 5]) == 5


def test_a_command_whose_store_refuses_ends_with_one_line(tmp_path: Path) -> None:
    with run_object_store(tmp_path / "log") as store:
        store.behave(needs_keys=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")} | {
            "AWS_ENDPOINT_URL": store.endpoint,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }
        uri = "s3://bucket/train"
        command = ["-m", "jobs.train_lm", "gpt2-scratch", "--data.train", uri, "--data.validation", uri, "--dry-run"]
        done = subprocess.run(
            [sys.executable, *command, "--tracking.no-enabled"],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"error: data.train: {uri}: the store refuses access: set AWS_ACCESS_KEY_ID and")
    assert done.stderr.count("\n") == 1
