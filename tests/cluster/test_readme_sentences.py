"""Run the README's commands on sentences and sweeps like its reader, with options added that make them short."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from readme_support import lines_like, run_line
from support import LANGUAGE_MODEL_OPTIONS, outcome_of

from jobs.scoring.sentence_encoders.config import EvaluateSentencesConfig
from jobs.scoring.sentence_encoders.evaluate import evaluate

pytestmark = pytest.mark.cluster

OPTIONS = [
    "--run.num-steps=4", "--run.log-every=2", "--data.min-length=3", "--data.max-length=12", "--data.min-num-tokens=36",
    "--model.hidden-size=16", "--model.num-heads=2", "--temperature.hidden-size=8", "--temperature.num-prototypes=8",
    "--temperature.rho=1", "--optimizer.batch-size=8", "--workers.num-workers=1", "--workers.zero-stage=0",
    "--workers.num-threads=1", "--validation.num-documents=15", "--validation.batch-size=4",
]  # fmt: skip


def test_training_and_scoring(home: Path) -> None:
    plain, with_tempnet = lines_like("jobs.train_sentences *")
    for line, name in ((plain, "declutr-small-small"), (with_tempnet, "declutr-small-tempnet-small")):
        run_line(line, *OPTIONS)
        assert outcome_of(home, name)["num_steps"] == 4
    task = home / "senteval" / "data" / "downstream" / "CR"
    task.mkdir(parents=True)
    for name, word in (("custrev.neg", "bad"), ("custrev.pos", "good")):
        (task / name).write_text("".join(f"{word} film {number}\n" for number in range(20)))
    run_line(*lines_like("jobs.evaluate_sentences *"))
    (cell,) = (home / "runs" / "sentence-evaluation" / "cells").glob("*.json")
    figures = json.loads(cell.read_text())
    assert figures["num_sentences"] == 40
    results = json.loads((home / "runs" / "sentence-evaluation" / "results.json").read_text())
    assert results["columns"][0]["metrics"] == {f"CR/{name}": value for name, value in figures.items()} | {
        "CR/num_unreadable": 0
    }
    # Another evaluation finds the stored figures.
    before = cell.stat().st_mtime_ns
    models = (str(home / "runs" / "declutr-small-small" / "export"),)
    config = EvaluateSentencesConfig(models=models, data=str(task.parent), storage=str(home / "runs"))
    (column,) = evaluate(config).columns
    assert column.metrics["CR/accuracy"] == figures["accuracy"]
    assert cell.stat().st_mtime_ns == before


def test_sweeping_some_values(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [option.replace("--", "--base.", 1) for option in LANGUAGE_MODEL_OPTIONS]
    short = ["--base.run.num-steps=4", "--base.validation.every=4", "--base.temperature.target-entropy=None"]
    kept = [option for option in options if not option.startswith(tuple(one.partition("=")[0] for one in short))]
    run_line(*lines_like("jobs.sweep * --sweep.axes *"), *kept, *short)
    rows = json.loads((home / "runs" / "gpt2-rho-lr-small" / "results.json").read_text())["rows"]
    assert [row["point"] for row in rows] == [{"temperature.rho": rho} for rho in (2.0, 2.5, 3.0)]
    assert all(row["num_steps"] == 4 for row in rows)
    assert len(re.findall(r"mean τ \d", capsys.readouterr().out)) >= 3
