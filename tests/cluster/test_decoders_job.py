"""Run `jobs.analyse decoders` on a real Ray: its figures are those of one process, and files and MLflow hold them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient
from prediction_support import save_tiny_model, some_texts

from jobs.analyse import main
from jobs.scoring.decoders.config import Decoders
from jobs.scoring.decoders.job import resolve_settings
from jobs.scoring.decoders.report import figures
from jobs.scoring.decoders.worker import BenchWorker, run_bench

pytestmark = pytest.mark.cluster


def test_the_pool_gives_the_figures_of_one_process(
    cluster: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, output = save_tiny_model(tmp_path / "model"), tmp_path / "decoders"
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": text}) + "\n" for text in some_texts(12)))
    sizes = {"num_samples": 2, "max_new_tokens": 4, "prompt_tokens": 3, "num_steps": 2, "max_prompts": 6, "k": 2}
    options = [part for name, value in sizes.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    arguments = ["decoders", "--model", str(model), "--text", str(text), "--output", str(output), *options]
    assert main([*arguments, "--storage", str(tmp_path), "--workers.num-workers", "2"]) == 0
    shown = capsys.readouterr().out
    values = json.loads((output / "results.json").read_text())
    settings = resolve_settings(Decoders(model=str(model), text=str(text), output=str(output), **sizes))[0]  # type: ignore[arg-type]
    worker = BenchWorker(settings)
    expected = figures(run_bench(settings, lambda units: [worker(unit) for unit in units]), k=2)
    assert values["decoders"].keys() == expected["decoders"].keys()
    for name, found in values["decoders"].items():
        theirs = expected["decoders"][name]
        assert found["text"]["gain"]["mean"] == pytest.approx(theirs["text"]["gain"]["mean"], abs=1e-4), name
        assert found["prompts"]["distinct"] == pytest.approx(theirs["prompts"]["distinct"], abs=1e-4), name
    assert (output / "results.md").read_text().split("\n\n")[0] in shown
    assert (output / "frontier.png").stat().st_size > 5000
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("analyses").experiment_id])
    assert run.data.metrics["EDT/gain"] == pytest.approx(values["decoders"]["EDT"]["text"]["gain"]["mean"])
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {
        "results.json",
        "results.md",
        "frontier.png",
    }
