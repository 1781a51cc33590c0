"""Run the README's commands on images in a directory like its reader's, with options added that make them short."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from readme_support import lines_like, recipe, run_line, run_notebook
from safetensors.torch import load_file
from support import outcome_of
from task_support import TOWER_OPTIONS

pytestmark = pytest.mark.cluster

NUM_STEPS = 4
OPTIONS = [
    *TOWER_OPTIONS, f"--run.num-steps={NUM_STEPS}", "--run.log-every=2", "--workers.num-workers=1",
    "--workers.zero-stage=0",
]  # fmt: skip


@pytest.fixture
def export(home: Path) -> Path:
    """Return the export of `jobs.train_clip clip-cc3m-tempnet-small`, which is trained only once."""
    directory = home / "runs" / "clip-cc3m-tempnet-small" / "export"
    if not directory.exists():
        run_line(*lines_like("jobs.train_clip clip-cc3m-tempnet-small"), *OPTIONS)
    return directory


def test_training_and_scoring(home: Path, export: Path) -> None:
    assert {"image_encoder", "text_encoder", "tempnet_image", "tempnet_text"} <= {
        path.name for path in export.iterdir()
    }
    run_line(*lines_like("jobs.evaluate_clip *"))
    results = home / "runs" / "clip-evaluation" / "results.json"
    (column,) = json.loads(results.read_text())["columns"]
    assert column["metrics"]["test/num_images"] == 20
    assert 0 <= column["metrics"]["test/mean_recall"] <= 1
    assert column["metrics"]["concepts/num_classes"] == 2


def test_training_without_captions(home: Path) -> None:
    (line,) = lines_like("jobs.train_images *-small")
    of_text = ("--model.text", "--temperature.rho", "--temperature.hidden", "--temperature.num")
    options = [option for option in OPTIONS if not option.startswith(of_text)]
    run_line(line, *options, "--validation.num-train-images=0")
    outcome = outcome_of(home, line.split()[-1])
    assert outcome["num_classes"] > 10
    assert 0 <= outcome["validation"]["probe_accuracy"] <= 1


@pytest.mark.long
def test_the_notebook_on_temperatures_of_images(home: Path) -> None:
    for line in recipe("run")[4:6]:  # A model without temperatures, and TempNets for it: the notebook reads the second.
        run_line(line, *(option for option in OPTIONS if "clip-temperatures" in line or "rho" not in option))
    shown = run_notebook("your-images.ipynb", home, {"jobs.predict_temperatures * --images *": []})
    written = pq.read_table(home / "runs" / "image-temperatures")
    num_images = len(set(written["key"].to_pylist()))
    assert f"{num_images} images, {written.num_rows} pairs with a frequency" in shown
    assert shown.count("<Figure size") == 2
    similarities = [float(number) for number in re.findall(r"^(-?\d\.\d{3})  ", shown, re.MULTILINE)]
    assert len(similarities) == 5
    assert similarities == sorted(similarities, reverse=True)


@pytest.mark.long
def test_training_with_predicted_temperatures(home: Path, export: Path) -> None:
    run_line(*lines_like("jobs.predict_temperatures * --images *"))
    page = (home / "temperatures-images.html").read_text()
    assert page.count("<figure>") == 4 * 12
    assert "http" not in page
    run_line(*lines_like("jobs.train_clip clip-cc3m-sogclr-given-small"), *OPTIONS)
    outcome = outcome_of(home, "clip-cc3m-sogclr-given-small")
    states = load_file(
        Path(outcome["directory"]) / f"checkpoint-{NUM_STEPS:08d}" / "samples-00000-of-00001.safetensors"
    )
    written = pq.read_table(home / "runs" / "temperatures-small").sort_by("id")
    for modality, name in enumerate(("tau_image", "tau_text")):
        assert states["tau"][modality].tolist() == written[name].to_pylist()
    assert outcome["validation"]["tau_mean"] == pytest.approx(states["tau"].double().mean().item())
