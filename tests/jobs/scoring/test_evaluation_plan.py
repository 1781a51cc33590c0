"""Test the plan of an evaluation of language models: what names a unit, and what is refused before Ray starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from evaluation_support import MAX_LENGTH, TEXT, make_export, write_lines

from jobs import evaluate_lm
from jobs.engine.config import TrackingSection
from jobs.scoring.language_models.config import EvaluateConfig
from jobs.scoring.language_models.plan import make_plan
from jobs.scoring.models import model_labels
from tempnet.network import TempNet
from tempnet.network_config import TempNetConfig
from tests.jobs.scoring.evaluation_cases import EXAMPLES, write_tasks

OFF = TrackingSection(enabled=False)


def config(export: str, tmp_path: Path, **changes: Any) -> EvaluateConfig:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    defaults = {"models": (export,), "wikitext": str(text), "storage": str(tmp_path / "runs"), "tracking": OFF}
    return EvaluateConfig(**{**defaults, **changes})


def test_the_hash_of_a_unit_changes_with_what_decides_it(export: str, tmp_path: Path) -> None:
    def keys(**changes: Any) -> set[str]:
        return {unit.key for unit in make_plan(config(export, tmp_path, **changes)).units}

    reference = keys(temperatures=("one", "tempnet"))
    assert len(reference) == 2
    assert keys(temperatures=("tempnet", "one")) == reference
    assert keys(temperatures=("tempnet", "one"), batch_size=1, name="other") == reference
    assert keys() < reference
    for changes in ({"temperatures": ("fixed:2",)}, {"max_length": 8}, {"limit": 1}, {"detokenize": False}):
        assert not keys(**changes) & reference
    assert not keys(tempnets=("none",)) & reference  # Without a network the padding counts, too.
    other = make_export(tmp_path / "other", seed=1)
    assert not keys(models=(other,), temperatures=("one", "tempnet")) & reference
    # Another network beside the same base changes only its own column.
    assert len(keys(temperatures=("one", "tempnet"), tempnets=(f"{other}/tempnet",)) & reference) == 1


def test_labels_are_short_and_different() -> None:
    labels = model_labels
    assert labels(("runs/a/export", "/runs/b/export/", "gpt2")) == ["a", "b", "gpt2"]
    assert labels(("x/a/export", "y/a/export")) == ["x/a/export", "y/a/export"]
    assert labels(("m", "m")) == ["m (1)", "m (2)"]


def test_what_cannot_work_is_refused_before_ray_starts(export: str, tmp_path: Path) -> None:
    write_tasks(tmp_path)
    bare = make_export(tmp_path / "bare", with_tempnet=False)
    small = tmp_path / "small"
    make_export(small)
    TempNet(TempNetConfig.for_logits(100, rho=1.0)).save_pretrained(small / "tempnet")
    bad = write_lines(tmp_path / "bad.jsonl", [{"text": "a b"}, {"txt": "c"}])
    own = {"include_path": str(EXAMPLES), "data_dir": str(tmp_path)}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"wikitext": "nowhere.txt"}, r"wikitext = 'nowhere\.txt' is no file"),
        ({"lambada": bad}, r"bad\.jsonl, line 2: no JSON object with a string `text`"),
        ({"wikitext": ""}, "nothing to evaluate on"),
        ({"models": ("nowhere/nothing",)}, "models: 'nowhere/nothing' is no Transformers model"),
        ({"models": (bare,), "temperatures": ("tempnet",)}, "temperature 'tempnet' needs a TempNet, and .*bare has none"),
        ({"temperatures": ()}, "temperatures is empty: name one"),
        ({"temperatures": ("fixed:0",)}, "temperature 'fixed:0' is none of"),
        ({"temperatures": ("tempnet:0.0001",)}, r"tau_max_eval = 0\.0001 is not above tau_min"),
        ({"temperatures": ("fixed:0.5", "fixed:0.50")}, "names something twice"),
        ({"models": (str(small),)}, "built for a vocabulary of 100, the tokenizer of .*small has 320 tokens"),
        ({"tempnets": ("none", "none")}, "tempnets names 2 networks for 1 models"),
        ({"max_length": MAX_LENGTH + 1}, r"more than the 24 positions"),
        ({"tasks": ("wikitext",)}, "use --wikitext FILE"),
        ({"tasks": ("local_arc_easy",), **own, "data_dir": str(small)}, r"reads .*arc_easy_test\.jsonl, which is no file"),
        ({"tasks": ("local_arc_eazy",), **own}, "task 'local_arc_eazy' is unknown: did you mean local_arc_easy or"),
        ({"num_fewshot": -2}, "num_fewshot = -2 must be at least -1"),
    ]  # fmt: skip
    for changes, message in cases:
        with pytest.raises((ValueError, OSError), match=message):
            make_plan(config(export, tmp_path, **changes))


def test_a_refusal_reaches_the_person_with_status_2(
    export: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    for model, wikitext, message in [
        (export, "nowhere.txt", "error: wikitext = 'nowhere.txt' is no file"),
        ("nowhere/nothing", str(text), "error: models: 'nowhere/nothing' is no Transformers model"),
    ]:
        with pytest.raises(SystemExit) as exit_info:
            evaluate_lm.main(["--models", model, "--wikitext", wikitext, "--storage", str(tmp_path)])
        assert exit_info.value.code == 2
        error = capsys.readouterr().err
        assert message in error
        assert "Traceback" not in error
