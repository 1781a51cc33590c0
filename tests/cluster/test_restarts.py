"""A scoring job that is killed and started again with two workers ends as one with one worker that ran through.

That the figures are right is tested without Ray, in `tests/jobs/scoring/test_whole_jobs.py`.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from clip_support import make_classes, make_clip, make_dual_encoder_with_tempnets, make_pairs
from evaluation_support import LAMBADA, TEXT, make_export, write_lines
from prediction_support import save_tiny_model, some_texts
from support import run_until, write_jsonl_zst

pytestmark = [pytest.mark.cluster, pytest.mark.long]

POOL = "--workers.cpus-per-worker 0.5"
PAIRS = f"--images IN/pairs --output OUT --max-bad-share 0.1 {POOL}"
JOBS = {
    "evaluate_lm --models IN/a/export IN/b/export --temperatures one tempnet fixed:0.7 --wikitext IN/text.txt "
    f"--lambada IN/lambada.jsonl --storage OUT --batch-size 3 --tracking.no-enabled {POOL}": ["*/units/*.json"],
    "evaluate_clip --models IN/dual IN/clip --retrieval p=IN/pairs --zero-shot c=IN/classes.tar --templates cifar "
    f"--max-bad-share 0.1 --storage OUT --tracking.no-enabled {POOL}": ["*/embeddings/*"],
    "predict_temperatures --model IN/tiny --text IN/texts --output OUT --per-token --part-characters 500 "
    f"--max-bad-share 0.1 {POOL}": ["part-*.parquet"],
    f"predict_temperatures --model IN/dual --part-pairs 7 --with-embeddings {PAIRS}": ["part-*.parquet"],
    f"calibrate headroom --model IN/clip --folds 3 --gallery-images 3 --storage OUT --tracking.no-enabled {PAIRS}": [
        "embeddings/*", "part-00001-*.parquet",
    ],
}  # fmt: skip
"""Maps commands to the files under OUT, one for each finished unit, in the order of the work."""

RESULTS = ("results.json", "_summary.json", "headroom.json")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("inputs")
    for seed, name in enumerate("ab"):
        make_export(place / name / "export", seed=seed)
    (place / "text.txt").write_text(TEXT)
    write_lines(place / "lambada.jsonl", LAMBADA)
    save_tiny_model(place / "tiny")
    for number in range(2):
        write_jsonl_zst(place / "texts" / f"{number}.jsonl.zst", some_texts(12, seed=number))
    with Path(write_lines(place / "texts" / "2.jsonl", [{"text": "a b c"}] * 20)).open("a") as file:
        file.write("no JSON\n")
    make_dual_encoder_with_tempnets(place / "dual")
    make_clip(place / "clip")
    make_pairs(place / "pairs", num_images=50)
    make_classes(place / "classes.tar")
    return place


def outcome(output: Path) -> dict[str, Any]:
    """Return name → content of the tables and figures in a directory."""
    found: dict[str, Any] = {path.name: path.read_bytes() for path in output.glob("part-*.parquet")}
    for path in [path for name in RESULTS for path in output.rglob(name)]:
        values = json.loads(path.read_text())
        found[path.name] = values.get("columns", values)
    return found


@pytest.mark.parametrize("command", JOBS, ids=[" ".join(command.split()[:3]) for command in JOBS])
def test_a_job_that_was_killed_goes_on(
    command: str, inputs: Path, cluster: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    module, *words = f"jobs.{command}".replace("IN/", f"{inputs}/").split()
    whole, parts = ([word.replace("OUT", str(tmp_path / name)) for word in words] for name in ("whole", "parts"))
    main = importlib.import_module(module).main
    assert main(whole) == 0
    expected = outcome(tmp_path / "whole")

    def units(name: str) -> list[Path]:
        return [path for pattern in JOBS[command] for path in sorted((tmp_path / name).glob(pattern))]

    run_until(lambda: len(units("parts")) > len(JOBS[command]), module, parts, cluster)
    num_kept = len(units("whole")) - 1  # If the job was quick, everything was there.
    kept, last = units("parts")[:num_kept], units("parts")[num_kept:]
    for path in [*last, *(path for name in RESULTS for path in (tmp_path / "parts").rglob(name))]:
        path.unlink()
    times = {path: path.stat().st_mtime_ns for path in kept}
    assert main([*parts, "--workers.num-workers", "2"]) == 0
    assert {path: path.stat().st_mtime_ns for path in kept} == times
    assert outcome(tmp_path / "parts") == expected != {}
