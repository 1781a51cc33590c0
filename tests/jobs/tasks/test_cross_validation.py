"""Test the parts of a cross-validation of classifiers: cells, folds, what the model gets, estimates and the table."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import ttest_1samp

from jobs import export
from jobs.engine.export import write_task
from jobs.engine.fields import configuration_hash, fixed_values, resolve_fields, with_fields
from jobs.engine.resumption import write_file_list
from jobs.studies.cross_validation import as_markdown, make_rows
from jobs.studies.estimates import estimate
from jobs.tasks.classifier.config import CrossValidationConfig
from jobs.tasks.classifier.plan import make_plan
from jobs.tasks.classifier.task import build_model, read_data, read_fold, sentence_tensors
from jobs.tasks.presets.classifiers import PRESETS
from pipelines.text.tokenization import load_tokenizer, train_wordpiece


@pytest.fixture
def config(tmp_path: Path) -> CrossValidationConfig:
    lines = [f"{'good' if number % 3 else 'bad'}\tfilm number {number}" for number in range(60)]
    (tmp_path / "films.tsv").write_text("\n".join(lines))
    train_wordpiece(lines, 100).save_pretrained(tmp_path / "tokenizer")
    changes = {
        "data.directory": "", "data.file": str(tmp_path / "films.tsv"), "data.num_examples": 0,
        "data.tokenizer": str(tmp_path / "tokenizer"), "model.path": "", "model.hidden_size": 16, "model.num_layers": 1,
        "model.num_heads": 2, "optimizer.batch_size": 16, "run.storage": str(tmp_path), "tracking.enabled": False,
    }  # fmt: skip
    return with_fields(PRESETS["triple-entropy-small"](), changes)


def test_cells_that_are_compared_have_the_same_folds_and_the_same_start(config: CrossValidationConfig) -> None:
    cells = config.cells()
    assert len({cell.run.name for cell in cells}) == len({configuration_hash(cell) for cell in cells}) == 40
    assert [cell.setting.cross_entropy_alone for cell in cells[:4]] == [True, False, True, False]
    (_, train, test), (_, other_train, other_test) = (read_fold(cell) for cell in cells[:2])
    np.testing.assert_array_equal(train.token_ids, other_train.token_ids)
    np.testing.assert_array_equal(test.labels, other_test.labels)
    assert len(train) + len(test) == 60
    assert read_fold(with_fields(cells[0], {"run.seed": 5}))[2].token_ids.tolist() != test.token_ids.tolist()


def test_the_supervised_contrastive_loss_is_a_setting_beside_the_others(config: CrossValidationConfig) -> None:
    grid = replace(config.grid, contrastive_weight=(0.5, 0.9), seeds=(2,), num_folds=2)
    names = [setting.name for setting in grid.settings]
    assert names == ["ce", "supcon-weight0.5-tau0.3", "supcon-weight0.9-tau0.3", config.grid.settings[-1].name]
    cell = replace(config, grid=grid).cells()[2]
    model = build_model(cell, load_tokenizer(str(config.data.tokenizer), needs_eos=False), ("a", "b"))
    assert (model.contrastive_weight, model.contrastive_temperature, model.soft_triple) == (0.9, 0.3, None)
    assert "grid.contrastive_weight" not in fixed_values(config)  # Earlier runs are continued.
    for values, message in (
        ((1.5,), r"grid\.contrastive_weight = 1\.5 must lie in \[0, 1\]"),
        ((0.0,), "cross-entropy alone"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(config.grid, contrastive_weight=values)


def test_a_cell_that_kept_no_model_is_exported_later(
    config: CrossValidationConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = config.cells()[0]
    prepared = make_plan(cell).prepare()
    assert prepared.create_task.args[1] == resolve_fields(cell)  # type: ignore[attr-defined]
    assert [uri for *_, uri in prepared.data_sets.values()] == [config.data.file]
    checkpoint = Path(cell.run.directory) / "checkpoint-00000005"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text('{"world_size": 1}')
    write_file_list(checkpoint, rank=0, world_size=1, group="g")
    write_task(cell)
    plans: list[Any] = []
    monkeypatch.setattr("jobs.engine.export.make_late_export", lambda plan, late: plans.append(plan))
    assert export.main([cell.run.directory]) == 0
    assert plans[0].config.fold.keep_model
    assert not cell.fold.keep_model


@pytest.mark.parametrize(("with_padding", "with_types"), [(False, True), (True, False)])
def test_what_the_model_gets(with_padding: bool, with_types: bool) -> None:
    ids, width = [[5, 6, 0, 0], [7, 8, 9, 0]], 4 if with_padding else 3
    batch = {"input_ids": np.array(ids), "token_type_ids": np.ones((2, 4), np.int8), "lengths": np.array([2, 3])}
    batch["labels"] = np.array([1, 0])
    tensors = sentence_tensors(batch, torch.device("cpu"), with_padding=with_padding, with_types=with_types)
    assert tensors["input_ids"].tolist() == [row[:width] for row in ids]
    assert tensors["attention_mask"].tolist() == [[1, 1, 0, 0][:width], [1, 1, 1, 0][:width]]
    assert ("token_type_ids" in tensors) == with_types


def test_a_part_of_the_data_is_the_same_every_time_and_in_proportion(config: CrossValidationConfig) -> None:
    data = replace(config.data, num_examples=30)
    (_, part), (_, again), (_, other) = (read_data(one, "") for one in (data, data, replace(data, seed=1)))
    assert part.first == again.first != other.first
    assert len(set(part.first)) == 30
    assert np.bincount(part.labels).tolist() == [10, 20]


def test_estimates_are_students_where_training_sets_do_not_overlap() -> None:
    values = np.random.default_rng(0).normal(0.3, 1.0, size=20)
    found, oracle = estimate(values.tolist(), 0.0), ttest_1samp(values, 0.0)
    low, high = oracle.confidence_interval(0.95)
    assert (found.mean, found.p) == pytest.approx((values.mean(), oracle.pvalue))
    assert found.half_width == pytest.approx((high - low) / 2)
    # With five folds the variance of the mean is (1/20 + 1/4) times that of the values, instead of 1/20 of it.
    assert estimate(values.tolist(), 0.25).half_width == pytest.approx(found.half_width * math.sqrt(6))
    assert estimate([1.0, 1.0], 0.25).p == 0.0
    assert math.isnan(estimate([1.0], 0.25).half_width)


def test_the_table_pairs_cells_and_shows_what_failed(config: CrossValidationConfig) -> None:
    config = replace(config, grid=replace(config.grid, seeds=(2,), num_folds=3))
    accuracies = {"ce": [0.5, 0.6, 0.7], "k100": [0.6, 0.55, None]}
    outcomes: dict[str, dict[str, Any]] = {}
    for cell in config.cells():
        value = accuracies[cell.setting.name.split("-")[0]][cell.fold.fold]
        if value is not None:
            outcomes[cell.run.name] = {"validation": {"accuracy": value}}
    baseline, other = make_rows(config, outcomes)
    assert baseline.difference is None
    assert (other.num_failed, other.num_better, other.num_worse) == (1, 1, 1)
    assert other.difference is not None
    assert other.difference.mean == pytest.approx((10.0 - 5.0) / 2)
    text = as_markdown([baseline, other], config)
    assert all(part in text for part in ("| file |", "60.00 ±", "+2.50 ±"))
