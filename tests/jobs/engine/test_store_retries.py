"""Tests that the repeated requests of all workers become lines, metrics and a row of the results."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from jobs.engine.description import results
from jobs.engine.store_retries import StoreRetries
from pipelines.retries import RETRIES, with_own_retries


def test_counts_go_on_from_those_of_the_checkpoint_and_are_shown(tmp_path: Path) -> None:
    RETRIES.take()
    lines: list[str] = []
    progress: Any = SimpleNamespace(say=lines.append)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        assert StoreRetries({}, group=None, progress=progress).metrics() == {}
        retries = StoreRetries({"s3://a": {"slow_down": 2}}, group=None, progress=progress)
        retries.collect()
        assert not lines
        for reason in ("slow_down", "other", "other"):
            RETRIES.add("s3://a", reason)
        totals = retries.collect()
        assert totals == retries.collect() == {"s3://a": {"slow_down": 3, "other": 2}}
    finally:
        dist.destroy_process_group()
    assert len(lines) == 1
    assert lines[0].endswith(": 3 to s3://a (last reason: other); 5 so far")
    assert retries.metrics() == {"store_retries": 5, "store_retries/slow_down": 3, "store_retries/other": 2}
    RETRIES.add("s3://b", "other")  # as the driver counts while it prepares data
    outcome = {
        "store_retries": with_own_retries(totals), "pairs_per_second": None, "num_epochs": 1.0, "num_steps": 1,
        "temperature_verdict": None,
    }  # fmt: skip
    text = results([], outcome, "pairs")
    assert "repeated requests to object stores  6 (3 slow_down, 3 other)" in text
