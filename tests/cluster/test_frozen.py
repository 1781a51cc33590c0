"""Test on a real Ray what a frozen base makes possible: training from stored features, and a grid in one run.

That features stand for their base, and runs side by side for single ones, is tested without Ray in tests/jobs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from clip_support import SIDE, make_dual_encoder, make_pairs
from readme_support import lines_like, run_line
from support import FROZEN_OPTIONS

from jobs import prepare_features, sweep
from tempnet.loading import load_causal_lm
from tempnet.models.dual_encoder import load_pair_tempnets

pytestmark = pytest.mark.cluster

NUM_STEPS = 12
OPTIONS = [*FROZEN_OPTIONS, f"--run.num-steps={NUM_STEPS}", "--optimizer.micro-batch-size=2", "--workers.zero-stage=0"]
AXES = ["--sweep.axes", "temperature.rho=1,2", "optimizer.learning_rate_tempnet=1e-2,1e-3"]


def of_base(options: list[str]) -> list[str]:
    """Return the options of a run as those of a sweep's base."""
    return [option.replace("--", "--base.", 1) for option in options]


def test_a_grid_trains_from_stored_features(home: Path, reference: dict[str, Any]) -> None:
    (prepare,), (sweep,) = lines_like("jobs.prepare_features *"), lines_like("jobs.sweep frozen-rho-lr-small *")
    run_line(prepare, *OPTIONS, "--temperature.rho=1.5")
    run_line(sweep, *of_base(OPTIONS), *AXES, "--base.run.num-steps=4")
    rows = json.loads((home / "runs" / "frozen-rho-lr-small" / "results.json").read_text())["rows"]
    assert [row["num_steps"] for row in rows] == [4] * 4
    assert len({row["tau_mean"] for row in rows}) == 4
    load_causal_lm(home / "runs" / "frozen-rho-lr-small" / rows[0]["name"] / "export")


@pytest.mark.long
def test_a_grid_on_stored_embeddings_is_one_run(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_pairs(home / "pairs")
    options = [
        f"--model.path={make_dual_encoder(home / 'encoder')}", f"--model.image-size={SIDE}", "--model.embedding-size=12",
        "--data.tokenizer=", "--data.num-text-tokens=40", f"--data.train={home / 'pairs'}", "--data.max-bad-share=0.1",
        f"--data.validation={home / 'pairs'}", f"--run.num-steps={NUM_STEPS}", "--run.log-every=4",
        "--run.checkpoint-every=4", "--temperature.hidden-size=6", "--temperature.num-prototypes=5",
        "--optimizer.batch-size=8", "--workers.num-threads=1", "--workers.precision=fp32", "--validation.num-images=7",
    ]  # fmt: skip
    assert prepare_features.main(["clip-cc12m-tempnet-frozen-small", *options]) == 0
    said = capsys.readouterr().out
    assert "add --model.features --data.view central to the same options of jobs.train_clip" in said
    grid = ["clip-frozen-rho-lr-small", *of_base(options), "--base.model.features", "--base.data.view=central"]
    assert sweep.main([*grid, "--base.run.name=grid", "--sweep.axes", "temperature.rho=1,2"]) == 0
    rows = json.loads((home / "runs" / "grid" / "results.json").read_text())["rows"]
    assert [row["num_steps"] for row in rows] == [NUM_STEPS] * 2
    assert not list((home / "runs" / "grid").glob("side-by-side/*/checkpoint-*"))
    for row in rows:
        load_pair_tempnets(home / "runs" / "grid" / row["name"] / "export")
