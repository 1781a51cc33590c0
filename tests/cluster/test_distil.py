"""Test that a language model learns from another one on Ray, whatever the workers and the ZeRO stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from language_model_support import Make, history, train
from tokenizers import Tokenizer

from jobs.tasks.language_model.plan import make_plan

pytestmark = [pytest.mark.cluster, pytest.mark.long]


def test_a_student_learns_from_its_teacher_with_any_workers(
    cluster: dict[str, str], tiny: Make, home: Path, reference: dict[str, Any]
) -> None:
    """The teacher is the language model that the tests share; both students see its tokens."""
    sections: dict[str, dict[str, Any]] = {
        "temperature": {"loss": "distil"},
        "distillation": {"teacher": str(home / "runs" / "gpt2-scratch-small" / "export")},
        "model": {"hidden_size": 32},
    }
    alone = train(tiny("alone", **sections, workers={"num_workers": 1, "zero_stage": 0}))
    together = train(tiny("together", **sections, workers={"num_workers": 2, "zero_stage": 2}))
    losses, expected = history(together, "train/loss"), history(alone, "train/loss")
    assert sorted(losses) == sorted(expected) == list(range(1, 41))
    for step, loss in expected.items():
        assert losses[step] == pytest.approx(loss, abs=1e-5), step
    assert losses[40] < 0.8 * losses[1]
    assert history(together, "train/batch_digest") == history(alone, "train/batch_digest")
    scores = [row["scores"]["cross_entropy"] for row in together["validations"]]
    assert scores[-1] < scores[0]
    assert not any("teacher" in file.name for file in Path(together["export"]).rglob("*"))


def test_a_teacher_with_another_tokenizer_or_none_is_refused(
    cluster: dict[str, str], tiny: Make, home: Path, reference: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"distillation\.teacher = '.*nowhere' is missing: there is no such file"):
        make_plan(tiny("nobody", temperature={"loss": "distil"}, distillation={"teacher": str(tmp_path / "nowhere")}))
    other = tmp_path / "tokenizer"
    other.mkdir()
    tokenizer = Tokenizer.from_file(str(home / "data" / "sample" / "tokenizer" / "tokenizer.json"))
    tokenizer.add_tokens(["another"])
    tokenizer.save(str(other / "tokenizer.json"))
    teacher = str(home / "runs" / "gpt2-scratch-small" / "export")
    config = tiny("other", temperature={"loss": "distil"}, distillation={"teacher": teacher})
    with pytest.raises(ValueError, match=r"is not the tokenizer of distillation\.teacher = "):
        make_plan(tiny("other", temperature={"loss": "distil"}, distillation={"teacher": teacher},
                       data={"tokenizer": str(other / "tokenizer.json")}))  # fmt: skip
    assert make_plan(config).memory.total > 0
