"""Measure TempNets on the frozen towers of a dual encoder: stored embeddings beside the towers, and a grid beside one run.

    python -m jobs.sample_data
    python -m benchmarks.frozen_towers

The towers are random and have the sizes of the small presets, since speed and equality do not depend on what they have
learned; pairs are those of the sample images for validation, seen through central views. Both sides of a ratio are measured
in this process, one after the other, with Ray already running and the pairs already indexed.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path

from benchmarks.frozen_grid import largest_difference, timed
from jobs.engine.cluster import start_ray
from jobs.scoring.features.embeddings import prepare_embeddings
from jobs.studies.sweeps.config import ClipSweep, SweepSection
from jobs.studies.sweeps.launch import run_sweep
from jobs.studies.sweeps.plan import make_sweep
from jobs.tasks.dual_encoder.config import ClipConfig
from jobs.tasks.dual_encoder.models import build_encoder
from jobs.tasks.dual_encoder.plan import make_plan
from jobs.tasks.presets.clip import PRESETS
from pipelines.storage import read_json
from pipelines.text.tokenization import load_tokenizer

AXES = ("temperature.rho=3.5,4,4.5,5", "optimizer.learning_rate_tempnet=1e-3,3e-3,1e-2,3e-2")


def save_towers(directory: Path) -> None:
    """Write a random dual encoder of the small presets' sizes."""
    config = PRESETS["clip-cc3m-clip-small"]()
    tokenizer = load_tokenizer(config.tokenizer, needs_eos=False)
    build_encoder(config, tokenizer).save_pretrained(directory, tokenizer)


def make_config(home: Path, name: str, num_steps: int, *, features: bool = False) -> ClipConfig:
    """Return the small preset of frozen towers on the validation images, with one worker and without MLflow."""
    small = PRESETS["clip-cc12m-tempnet-frozen-small"]()
    return dataclasses.replace(
        small,
        data=dataclasses.replace(small.data, train=small.data.validation, view="central"),
        run=dataclasses.replace(
            small.run, name=name, storage=str(home / "runs"), num_steps=num_steps, checkpoint_every=10 * num_steps
        ),
        model=dataclasses.replace(small.model, path=str(home / "towers"), features=features),
        workers=dataclasses.replace(small.workers, num_workers=1, zero_stage=0, precision="fp32"),
        validation=dataclasses.replace(small.validation, every=10 * num_steps),
        tracking=dataclasses.replace(small.tracking, enabled=False),
    )


def measure(home: Path, num_steps: int) -> None:
    """Print room, speed and equality of stored embeddings, and what a grid of 16 costs on them."""
    save_towers(home / "towers")
    (embeddings,) = prepare_embeddings(make_config(home, "prepare", num_steps))
    num_pairs, num_images = embeddings.pairs.num_pairs, embeddings.pairs.num_images
    files = sum(file.stat().st_size for file in Path(embeddings.directory).glob("*.arrow"))
    predicted = embeddings.num_bytes
    print(
        f"\n{num_pairs} pairs of {num_images} images: {files / num_pairs:.1f} bytes a pair, predicted "
        f"{predicted / num_pairs:.1f} ({files / predicted - 1:+.3%}, the headers of files)"
    )
    timed(make_plan(make_config(home, "warm-up", 2)))
    _, on_towers = timed(make_plan(make_config(home, "towers", num_steps)))
    _, stored = timed(make_plan(make_config(home, "features", num_steps, features=True)))
    steps = [outcome["seconds_trained"] / num_steps for outcome in (on_towers, stored)]
    print(
        f"a step on the towers {1e3 * steps[0]:.1f} ms ({on_towers['data_wait_share']:.0%} waiting for images), from "
        f"embeddings {1e3 * steps[1]:.1f} ms: {steps[0] / steps[1]:.1f} times faster"
    )
    worst, name = largest_difference(stored["validation"], on_towers["validation"])
    print(f"their scores differ by at most {worst:.1e} ({name}; target: 1e-5)")
    sweep = ClipSweep(
        base=make_config(home, "grid", num_steps, features=True), sweep=SweepSection(axes=AXES, band=(0.01, 0.02))
    )
    results = run_sweep(make_sweep(sweep))
    assert not results.failed
    point = {"temperature.rho": 4.5, "optimizer.learning_rate_tempnet": 1e-2}  # the preset's own values
    (row,) = [row for row in results.rows if row.point == point]
    member = read_json(f"{sweep.run.directory}/{row.name}/outcome.json") or {}
    of_grid = member["seconds_trained"] / num_steps
    print(f"a step of the grid of 16 {1e3 * of_grid:.1f} ms: {of_grid / steps[1]:.2f} times that of one run")
    worst, name = largest_difference(member["validation"], stored["validation"])
    print(f"the run of these values alone differs by at most {worst:.1e} ({name}; target: 1e-5)")


def main() -> None:
    """Run the measurement."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--num-steps", type=int, default=100, help="steps of every run")
    arguments = parser.parse_args()
    start_ray()
    with tempfile.TemporaryDirectory(prefix="frozen-towers-") as name:
        measure(Path(name), arguments.num_steps)


if __name__ == "__main__":
    main()
