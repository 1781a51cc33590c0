"""Tests what `jobs.calibrate tau-max` saves, where it saves it, and what it leaves unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
from prediction_support import save_tiny_model

from jobs.calibrate import main
from tempnet.loading import load_tempnet


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def arguments(model: Path, prompts: Path, *more: str) -> list[str]:
    sizes = ["--num-new-tokens", "4", "--tolerance", "0.2", "--mean-tau", "0.5"]
    return ["tau-max", "--model", str(model), "--prompts", str(prompts), *sizes, *more]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("ab\ncd\nef\ngh\n")
    return path


def test_only_the_networks_configuration_changes(tmp_path: Path, prompts: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    before = contents(model)
    assert main(arguments(model, prompts, "--dry-run")) == 0
    assert contents(model) == before
    # Naming the model as the place of the TempNet must not write over the model itself.
    assert main(arguments(model, prompts, "--tempnet", str(model))) == 0
    after = contents(model)
    assert {name for name in after if after[name] != before.get(name)} == {"tempnet/config.json"}
    assert load_tempnet(model).config.tau_max_eval is not None


def test_nowhere_to_save_is_said_before_anything_is_loaded(
    tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments(tmp_path, prompts))  # This directory holds neither a model nor a TempNet.
    assert stop.value.code == 2
    assert "nowhere to save tau_max_eval" in capsys.readouterr().err
