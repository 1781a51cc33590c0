"""Test on a real Ray what a frozen base makes possible: training from stored features, and a grid in one run.

That features stand for their base, and runs side by side for single ones, is tested without Ray in tests/jobs/scoring
(test_features.py, test_stored_embeddings.py) and tests/jobs/tasks (test_side_by_side.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from clip_support import SIDE, make_dual_encoder, make_pairs
from readme_support import lines_like, run_line
from support import history, outcome_of, sweep_runs

from jobs import prepare_features, sweep, train_clip
from tempnet.loading import load_causal_lm
from tempnet.models.dual_encoder import load_pair_tempnets

pytestmark = pytest.mark.cluster

NUM_STEPS = 12
OPTIONS = [
    f"--run.num-steps={NUM_STEPS}", "--run.log-every=4", "--run.checkpoint-every=4", "--data.context-length=64",
    "--temperature.hidden-size=32", "--temperature.num-prototypes=16", "--optimizer.batch-size=8",
    "--optimizer.micro-batch-size=2", "--optimizer.learning-rate-tempnet=0.01", "--workers.num-threads=1",
    "--workers.precision=fp32", "--validation.every=6", "--validation.num-blocks=16",
    "--validation.num-oracle-tokens=256",
]  # fmt: skip
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
    """With two workers, its first trial is the run on the towers."""
    make_pairs(home / "pairs")
    options = [
        f"--model.path={make_dual_encoder(home / 'encoder')}", f"--model.image-size={SIDE}", "--model.embedding-size=12",
        "--data.tokenizer=", "--data.num-text-tokens=40", f"--data.train={home / 'pairs'}", "--data.max-bad-share=0.1",
        f"--data.validation={home / 'pairs'}", "--data.view=central", f"--run.num-steps={NUM_STEPS}",
        "--data.caption-noise=0.5", "--run.log-every=4", "--run.checkpoint-every=4", "--temperature.rho=1",
        "--temperature.hidden-size=6", "--temperature.num-prototypes=5", "--optimizer.batch-size=8",
        "--optimizer.epsilon=1e-4", "--workers.num-threads=1", "--workers.precision=fp32", "--validation.every=8",
        "--validation.num-images=7",
    ]  # fmt: skip
    preset = "clip-cc12m-tempnet-frozen-small"
    assert train_clip.main([preset, *options, "--run.name=on-towers"]) == 0
    expected = outcome_of(home, "on-towers")
    with pytest.raises(SystemExit) as ended:
        train_clip.main([preset, *options, "--model.features", "--run.name=on-embeddings"])
    assert ended.value.code == 2
    assert "store them by the same command with jobs.prepare_features" in capsys.readouterr().err
    assert prepare_features.main([preset, *(option for option in options if "--data.view" not in option)]) == 0
    said = capsys.readouterr().out
    assert "19 images × 52 bytes and 56 captions × 58 bytes (embeddings of 12 in float32, of the central view" in said
    assert "add --model.features --data.view central to the same options of jobs.train_clip" in said
    grid = ["clip-frozen-rho-lr-small", *of_base(options), "--base.model.features", "--base.run.name=towers-grid"]
    assert sweep.main([*grid, "--sweep.axes", "temperature.rho=1,2"]) == 0
    runs = home / "runs" / "towers-grid"
    rows = json.loads((runs / "results.json").read_text())["rows"]
    outcomes = [json.loads((runs / row["name"] / "outcome.json").read_text()) for row in rows]
    assert [row["num_steps"] for row in rows] == [NUM_STEPS] * 2
    assert not list(runs.glob("side-by-side/*/checkpoint-*"))
    _, children = sweep_runs(expected["tracking_uri"], "contrastive", "towers-grid")
    assert children.keys() == {row["name"] for row in rows}
    losses, wanted = ([history(run, "train/loss") for run in found] for found in (outcomes, [expected]))
    assert losses[0] == pytest.approx(wanted[0], abs=1e-5, rel=0)
    assert losses[1][NUM_STEPS] != pytest.approx(losses[0][NUM_STEPS], abs=1e-3)
    assert outcomes[0]["batches_digest"] == expected["batches_digest"]
    assert outcomes[0]["validation"] == pytest.approx(expected["validation"], rel=1e-4, abs=1e-5)
    for outcome in outcomes:
        load_pair_tempnets(outcome["export"])
