"""One rank with batch B and W ranks with B/W: the same losses, gradients and state (gloo processes, every loss)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tempnet.contrastive.state import SampleState
from tempnet.contrastive.world import World
from tests.tempnet.contrastive.cases import NUM_SAMPLES, make_config
from tests.tempnet.contrastive.ranks import ALL_NAMES, two_steps, whole

ROOT = Path(__file__).parents[3]

Findings = tuple[Path, list[dict[str, dict[str, Tensor]]]]


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Findings:
    """Return the results of W processes, which are started once for all losses."""
    directory = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.tempnet.contrastive.ranks", str(request.param), str(directory)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return directory, [torch.load(directory / f"rank-{rank}.pt", weights_only=True) for rank in range(request.param)]


@pytest.mark.parametrize("name", ALL_NAMES)
def test_the_number_of_ranks_changes_nothing(name: str, ranks: Findings, tmp_path: Path) -> None:
    directory, parts = ranks
    alone = two_steps(name, World.alone(), tmp_path)
    found = whole(name, parts)
    assert set(found) == set(alone)
    # A gradient of a single number may cancel: it is held to the scale of the others.
    scale = max([float(value.norm()) for key, value in alone.items() if key.startswith("parameter")], default=0.0)
    for key, value in alone.items():
        floor = 0.1 * scale if key.startswith("parameter") else 0.0
        error = float((found[key].double() - value.double()).norm()) / max(float(value.double().norm()), floor, 1e-12)
        assert error < (1e-6 if key.startswith("loss") else 1e-5), key
        # What all ranks share must be the same to the last bit: state is written from it.
        if key.startswith("loss"):
            assert all(torch.equal(part[name][key], found[key]) for part in parts)
    columns = make_config(name.rpartition(" ")[2]).state_columns
    if columns:
        states = [SampleState(NUM_SAMPLES, columns) for _ in range(2)]
        states[0].load(tmp_path / name, num_writers=1)
        states[1].load(directory / name, num_writers=len(parts))
        for key in columns:
            torch.testing.assert_close(states[1].columns[key], states[0].columns[key], rtol=1e-5, atol=1e-5)


def test_a_wrong_id_stops_every_rank(ranks: Findings) -> None:
    directory, parts = ranks
    for rank in range(len(parts)):
        assert "id 1000000 is not one of the 40 samples" in (directory / f"error-{rank}.txt").read_text()
