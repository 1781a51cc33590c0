"""Tests that wrong classifier configurations are named before anything starts, and tests cells, folds and tables."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import ttest_1samp

from jobs.engine.command_line import parse_preset
from jobs.engine.identity import configuration_hash
from jobs.studies.cross_validation.cross_validation import make_cross_validation
from jobs.studies.cross_validation.table import as_markdown, make_rows
from jobs.studies.estimates import estimate
from jobs.tasks.classifier.config import CrossValidationConfig
from jobs.tasks.classifier.data import folds, read_data, read_fold
from jobs.tasks.classifier.task import sentence_tensors
from jobs.tasks.presets.classifiers import PRESETS
from pipelines.problems import TooManyProblemsError
from pipelines.text.tokenization import load_tokenizer, train_bpe, train_wordpiece

SMALL = ["--model.path", "", "--model.hidden-size", "16", "--model.num-layers", "1", "--model.num-heads", "2"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("labelled")
    lines = [f"{'good' if number % 3 else 'bad'}\tfilm number {number}" for number in range(60)]
    (directory / "films.tsv").write_text("\n".join(lines))
    (directory / "rare.tsv").write_text("\n".join([*lines, "odd\tone", "odd\ttwo", "odd\tthree"]))
    (directory / "single.tsv").write_text("\n".join([*lines, "odd\tone"]))
    (directory / "broken.tsv").write_text("\n".join([*lines, "bad", "bad"]))
    (directory / "alike.tsv").write_text("good\tx\ngood\ty\n")
    (directory / "downstream" / "CR").mkdir(parents=True)
    train_wordpiece(lines, 100).save_pretrained(directory / "tokenizer")
    train_bpe(lines, 300).save_pretrained(directory / "bpe")
    return directory


def small(data: Path, *arguments: str, file: str = "films.tsv") -> CrossValidationConfig:
    config, _ = parse_preset(
        {name: lambda preset=preset: _without_directory(preset()) for name, preset in PRESETS.items()},
        [
            "triple-entropy-small",
            f"--data.file={data / file}",
            f"--data.tokenizer={data / 'tokenizer'}",
            f"--run.storage={data}",
            "--optimizer.batch-size=16",
            *SMALL,
            *arguments,
        ],
        job="train_classifier",
        purpose="",
    )
    return config


def _without_directory(config: CrossValidationConfig) -> CrossValidationConfig:
    return replace(config, data=replace(config.data, directory="", file="-", num_examples=0))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_consistent(name: str) -> None:
    config = PRESETS[name]()
    assert config.run.name == name
    grid = config.grid
    assert len(grid.settings) == (1 + 4 * 5 * 7 * 7 * 5 if "grid" in name else 2)
    assert grid.settings[0].name == "ce"
    assert (grid.seeds, grid.num_folds) == ((2, 16, 128, 2048), 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--grid.num-centers", "0"], "grid.num_centers = 0 must be positive"),
        (["--grid.beta", "0.9", "1.1"], "grid.beta = 1.1 must lie in [0, 1]"),
        (["--grid.gamma", "0"], "grid.gamma = 0 must be positive and finite"),
        (["--grid.margin", "-1"], "grid.margin = -1 must not be negative"),
        (["--grid.seeds", "1", "1"], "grid.seeds names 1 twice"),
        (["--grid.num-folds", "1"], "grid.num_folds = 1 must be at least 2"),
        (["--run.seed", "3"], "run.seed = 3: the seeds of a cross-validation are grid.seeds"),
        (["--data.directory", "x"], "give either data.directory, in SentEval's layout, or data.file"),
        (["--data.tasks", "CR"], "data.tasks = ('CR',) is for data.directory, and data.file is given"),
        (["--data.num-examples", "-1"], "data.num_examples = -1 must not be negative"),
        (["--optimizer.micro-batch-size", "4"], "optimizer.micro_batch_size = 4: the mean over the tokens"),
        (["--workers.zero-stage", "3"], "workers.zero_stage = 3"),
        (["--centers.learning-rate", "0"], "centers.learning_rate = 0.0 must be positive"),
        (["--data.tokenizer", ""], "data.tokenizer is empty, and there is no model.path"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_values_are_refused_with_their_name(
    data: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        small(data, *arguments)
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("file", "arguments", "message"),
    [
        ("rare.tsv", [], r"grid\.num_folds = 5: class 'odd' of rare has 3 of the 63 sentences; choose at most 3"),
        ("single.tsv", [], r"class 'odd' of single has 1 of the 61 sentences, too few to be trained on and held out"),
        ("films.tsv", ["--data.num-examples", "61"], r"data\.num_examples = 61 is more than the 60 sentences of films"),
        ("films.tsv", ["--optimizer.batch-size", "64"], r"optimizer\.batch_size = 64 is more than the 48 sentences"),
        ("films.tsv", ["--data.classes", "good", "poor"], r"data\.file: .*no sentence of the class poor"),
        ("alike.tsv", [], r"data\.file: .* holds 1 class \(good\)"),
        ("nothing.tsv", [], r"data\.file: .*nothing\.tsv"),
        ("tokenizer", [], r"data\.file: .*directory"),
        ("films.tsv", ["--model.path", "nowhere"], r"model\.path = 'nowhere' holds no text model"),
    ],
)
def test_data_and_models_that_do_not_serve_are_refused(
    data: Path, file: str, arguments: list[str], message: str
) -> None:
    with pytest.raises((ValueError, OSError), match=message):
        make_cross_validation(small(data, *arguments, file=file))


def test_too_many_broken_lines_end_the_job_and_few_are_counted(data: Path) -> None:
    with pytest.raises(TooManyProblemsError, match=r"broken: 2 of 62 lines .*broken\.tsv:61"):
        make_cross_validation(small(data, file="broken.tsv"))
    work = make_cross_validation(small(data, "--data.max-bad-share", "0.1", file="broken.tsv"))
    assert work.examples[0].problems == {"missing_field": 2}
    # A line whose label is none of the classes is left out, too.
    task, examples = read_data(
        small(data, "--data.classes", "good", "bad", "--data.max-bad-share", "0.1", file="single.tsv").data, ""
    )
    assert task.problems == {"unknown_label": 1}
    assert len(examples) == 60


def test_an_empty_directory_is_refused(data: Path) -> None:
    config = small(data)
    with pytest.raises(FileNotFoundError, match=r"data\.directory: .* holds no folder of MR"):
        make_cross_validation(replace(config, data=replace(config.data, file="", directory=str(data / "tokenizer"))))
    with pytest.raises(FileNotFoundError, match=r"data\.directory: .*custrev\.neg"):
        make_cross_validation(replace(config, data=replace(config.data, file="", directory=str(data / "downstream"))))


def test_a_tokenizer_without_padding_is_refused(data: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.tokenizer = .*bpe' has no padding token"):
        make_cross_validation(small(data, "--data.tokenizer", str(data / "bpe")))


def test_a_plan_says_what_will_happen(data: Path) -> None:
    text = make_cross_validation(small(data, "--grid.num-centers", "3", "5")).describe()
    for part in (
        "1 tasks × 3 settings × 4 seeds × 5 folds = 60",
        "ce, k3-gamma0.1-scale3.3-margin0.3-beta0.9, k5-gamma",
        "48 sentences to train on (25.0 epochs), 12 held out, 2 classes (bad, good)",
        "centres 160",
    ):
        assert part in text


def test_a_plan_says_which_share_of_the_sentences_is_cut(data: Path) -> None:
    tokenizer = load_tokenizer(str(data / "tokenizer"), needs_eos=False)
    lengths = [len(tokenizer(f"film number {number}")["input_ids"]) for number in range(60)]
    least = min(lengths)
    share = sum(length > least for length in lengths) / 60
    assert 0 < share < 1
    text = make_cross_validation(small(data, "--data.num-tokens", str(least))).describe()
    assert f"{share:.2%} of the sentences were cut to {least} tokens" in text


def test_cells_that_are_compared_have_the_same_folds_and_the_same_start(data: Path) -> None:
    config = small(data)
    cells = config.cells()
    assert len({cell.run.name for cell in cells}) == len({configuration_hash(cell) for cell in cells}) == 40
    assert [cell.setting.cross_entropy_alone for cell in cells[:4]] == [True, False, True, False]
    (_, train, test), (_, other_train, other_test) = (read_fold(cell) for cell in cells[:2])
    np.testing.assert_array_equal(train.token_ids, other_train.token_ids)
    np.testing.assert_array_equal(test.labels, other_test.labels)


@pytest.mark.parametrize("with_padding", [False, True])
@pytest.mark.parametrize("with_types", [False, True])
def test_what_the_model_gets(with_padding: bool, with_types: bool) -> None:
    batch = {
        "input_ids": np.array([[5, 6, 0, 0], [7, 8, 9, 0]], dtype=np.int32),
        "token_type_ids": np.array([[0, 1, 0, 0], [0, 0, 1, 0]], dtype=np.int8),
        "lengths": np.array([2, 3]),
        "labels": np.array([1, 0]),
    }
    tensors = sentence_tensors(batch, torch.device("cpu"), with_padding=with_padding, with_types=with_types)
    width = 4 if with_padding else 3
    assert tensors["input_ids"].tolist() == [row[:width] for row in batch["input_ids"].tolist()]
    assert tensors["attention_mask"].tolist() == [[1, 1, 0, 0][:width], [1, 1, 1, 0][:width]]
    assert tensors["labels"].tolist() == [1, 0]
    assert ("token_type_ids" in tensors) == with_types


def test_folds_divide_the_sentences_and_keep_the_classes_in_proportion() -> None:
    labels = np.repeat([0, 1, 2], [50, 30, 20])
    found = folds(labels, 5, seed=2)
    assert sorted(np.concatenate([outside for _, outside in found]).tolist()) == list(range(100))
    for inside, outside in found:
        assert not set(inside) & set(outside)
        assert np.bincount(labels[outside]).tolist() == [10, 6, 4]
    again, other = folds(labels, 5, seed=2), folds(labels, 5, seed=16)
    np.testing.assert_array_equal(found[0][1], again[0][1])
    assert set(found[0][1]) != set(other[0][1])


def test_a_part_of_the_data_is_the_same_every_time_and_in_proportion(data: Path) -> None:
    config = small(data, "--data.num-examples", "30")
    (_, part), (_, again) = read_data(config.data, ""), read_data(config.data, "")
    assert part.first == again.first
    assert len(set(part.first)) == 30
    assert np.bincount(part.labels).tolist() == [10, 20]
    _, other = read_data(replace(config.data, seed=1), "")
    assert part.first != other.first


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


def test_the_table_pairs_cells_and_shows_what_failed(data: Path) -> None:
    config = small(data, "--grid.seeds", "2", "--grid.num-folds", "3")
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
    assert "| file |" in text
    assert "60.00 ±" in text
    assert "+2.50 ±" in text
