"""Run the README's lines that render files for a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from readme_support import lines_like, run_line
from schema_support import problems_of

from jobs.submission.render.files import render_files
from jobs.submission.values import ClusterValues


def test_rendering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (line,) = lines_like("jobs.submit render *")
    run_line(line)
    assert {str(path.relative_to("infra")) for path in Path("infra").rglob("*.*")} >= set(
        render_files(ClusterValues())
    ) - {"image/Dockerfile"}


def test_writing_a_ray_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (line,) = lines_like("jobs.submit rayjob *")
    run_line(line)
    manifest = yaml.safe_load(Path("ray-job.yaml").read_text())
    assert problems_of(manifest) == []
    assert manifest["metadata"]["name"] == "gpt2-scratch"
    assert "--data.train s3://bucket/openwebtext2/train" in manifest["spec"]["entrypoint"]
