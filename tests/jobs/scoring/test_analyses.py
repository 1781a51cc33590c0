"""Test the analyses: which records make which group, what is refused, and that the figures are those of scipy."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlflow import MlflowClient
from scipy.stats import spearmanr, ttest_ind

from jobs.engine.config import TrackingSection
from jobs.scoring.analyses import pairs as noise
from jobs.scoring.analyses.config import Openness, Phase, Subjectivity
from jobs.scoring.analyses.curves import analyse_openness
from jobs.scoring.analyses.pairs import analyse_phase
from jobs.scoring.analyses.texts import (
    Records,
    analyse,
    conclusion,
    figures,
    first_verb,
    read_instructions,
    read_subjectivity,
)
from pipelines.images.captions import CaptionNoise
from tempnet.intervals import mean_interval

COLUMNS = ["question", "human_ans_spans", "question_subj_level", "answer_subj_level"]


def write_csv(path: Path, rows: list[list[object]], columns: list[str] = COLUMNS) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])


def test_questions_and_answers_in_groups_of_subjectivity(tmp_path: Path) -> None:
    write_csv(tmp_path / "a" / "test.csv", [["Is it good?", "yes, very", 1, 4], ["How large?", "2 m", 5, 2]])
    write_csv(tmp_path / "__MACOSX" / "._test.csv", [], ["what an archive of macOS holds beside each file"])
    write_csv(tmp_path / "dev.CSV", [["Why?", "ANSWERNOTFOUND", 1, 1], ["Who?", " ", 2, 2], ["When?", "now", 7, 3]])
    read = read_subjectivity(str(tmp_path), "question")
    assert read.records == [
        ("Is it good?\nyes, very", "1, most subjective"),
        ("How large?\n2 m", "5, least subjective"),
    ]
    assert read.groups == ["5, least subjective", "1, most subjective"]
    assert read.left_out == Counter({"without an answer": 2, "without a level from 1 to 5": 1})
    assert [group for _, group in read_subjectivity(str(tmp_path), "answer").records] == ["4", "2", "3"]
    assert read_subjectivity(str(tmp_path / "a" / "test.csv"), "question").records == read.records
    # The query of a URI stays at its end.
    assert read_subjectivity(f"file://{tmp_path}?region=x", "question").records == read.records


def test_instructions_in_groups_of_their_verb(tmp_path: Path) -> None:
    entries = [
        {"instruction": "Write a poem.", "input": "", "output": "Roses"},
        {"instruction": "Please write a list", "input": "of fruit", "output": "Apple"},
        {"instruction": "Explain gravity", "input": "", "output": "It pulls."},
        {"instruction": "What is it?", "input": "", "output": "x"},
        {"instruction": "Sort these", "input": "", "output": "x"},
        {"instruction": 3},
    ]
    (tmp_path / "alpaca.json").write_text(json.dumps(entries))
    read = read_instructions(str(tmp_path / "alpaca.json"), 2)
    assert [group for _, group in read.records] == ["write", "write", "explain"]
    assert read.records[1][0] == "Please write a list\nof fruit\nApple"
    assert read.groups == ["write", "explain"]
    reasons = {"not begun with a verb": 1, "not a record of Alpaca": 1}
    assert read.left_out == Counter({**reasons, "not begun with one of the 2 most frequent verbs": 1})
    words = {"Create": "create", "  can you please NAME two": "name", "How many?": "", "3 reasons": "", "Éclair": ""}
    assert {instruction: first_verb(instruction) for instruction in words} == words


def test_what_cannot_be_analysed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no \.csv file"):
        read_subjectivity(str(tmp_path), "question")
    write_csv(tmp_path / "a.csv", [[1]], ["x"])
    with pytest.raises(ValueError, match=r"a\.csv is no file of SubjQA: it has no column human_ans_spans, question"):
        read_subjectivity(str(tmp_path), "question")
    write_csv(tmp_path / "a.csv", [["Why?", "so", 1, 1]])
    with pytest.raises(ValueError, match="has 1 records in 1 groups, and 2 are needed; left out: there are no others"):
        read_subjectivity(str(tmp_path), "question")
    write_csv(tmp_path / "a.csv", [["Why?", "so", 1, 1], ["Who?", "I", 2, 1], ["When?"]])
    few = read_subjectivity(str(tmp_path), "question")
    assert few.left_out == Counter({"without an answer": 1})
    output = tmp_path / "output"
    with pytest.raises(ValueError, match="has 2 records that can be used, and an interval of a rank correlation needs"):
        analyse(Subjectivity(model="m", data=str(tmp_path), output=str(output)), few, "title")
    assert not output.exists()
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no list of records"):
        read_instructions(str(tmp_path / "a.json"), 20)


def test_figures_of_ordered_groups_are_those_of_scipy() -> None:
    rng = np.random.default_rng(0)
    names = ["low", "middle", "high"]
    groups = [names[number] for number in rng.integers(3, size=300)]
    tau = 1 + 0.1 * np.array([names.index(group) for group in groups]) + rng.normal(0, 0.2, 300)
    values = figures(Records([], names, Counter({"x": 2}), True), groups, tau)
    for row in values["groups"]:
        assert row["mean"] == pytest.approx(tau[np.array(groups) == row["group"]].mean())
    positions = [names.index(group) for group in groups]
    assert values["spearman"]["mean"] == pytest.approx(spearmanr(tau, positions).statistic)
    assert conclusion(values).startswith("τ rises from the first group to the last: Spearman +0.")
    assert conclusion(values).endswith("300 records; left out: 2 x")
    shuffled = figures(Records([], names, Counter(), True), groups, rng.permutation(tau))
    assert conclusion(shuffled).startswith("no trend of τ can be seen")


def write_outcome(run: Path, rows: dict[int, dict[str, float]], **others: Any) -> str:
    run.mkdir(parents=True)
    validations = [{"step": step, "scores": scores} for step, scores in rows.items()]
    outcome = {"validations": validations, "mlflow_run_id": f"id-{run.name}", **others}
    (run / "outcome.json").write_text(json.dumps(outcome))
    return str(run)


def scores(spearman: float, tau: float) -> dict[str, float]:
    return {"tau_entropy_spearman": spearman, "tau_mean": tau, "cross_entropy": 5.0}


def test_openness_along_the_training_of_several_seeds(
    tmp_path: Path, tracking_uri: str, capsys: pytest.CaptureFixture[str]
) -> None:
    validations = [{50: scores(0.1 * i, 1.0), 100: scores(-0.9 - 0.01 * i, 0.5 + i)} for i in range(3)]
    runs = tuple(write_outcome(tmp_path / f"seed-{seed}", rows) for seed, rows in enumerate(validations))
    output, tracking = tmp_path / "output", TrackingSection(uri=tracking_uri, experiment="analyses")
    curves = analyse_openness(Openness(runs=runs, output=str(output), tracking=tracking))
    assert list(curves) == [50, 100]
    assert curves[100]["Spearman(τ, entropy at τ = 1)"] == mean_interval([-0.9, -0.91, -0.92])
    assert [row["mean τ"] for row in curves.values()] == [(1.0, 0.0), mean_interval([0.5, 1.5, 2.5])]
    said = capsys.readouterr().out
    assert "Spearman(τ, entropy) is 0.1 ± 0.25 at step 50 and -0.91 ± 0.025 at step 100; 3 runs" in said
    assert json.loads((output / "results.json").read_text())["num_runs"] == 3
    assert {"results.md", "training.png"} <= {file.name for file in output.iterdir()}
    client = MlflowClient(tracking_uri)
    experiment = client.get_experiment_by_name("analyses")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.metrics["spearman"] == pytest.approx(-0.91)


def test_runs_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    first = write_outcome(tmp_path / "first", {50: scores(0.1, 1.0)})
    other = write_outcome(tmp_path / "other", {60: scores(0.1, 1.0)})
    images = write_outcome(tmp_path / "images", {50: {"tau_mean": 0.02}}, rho=1.0, num_pairs_train=9)
    output = {"output": str(tmp_path / "output"), "storage": str(tmp_path / "store")}
    for runs, message in (
        ((first, other), r"other was validated at steps \[60\], and .*first at \[50\]"),
        ((images,), "images has no validation of temperatures of a language model"),
    ):
        with pytest.raises(ValueError, match=message):
            analyse_openness(Openness(runs=runs, **output))
    with pytest.raises(ValueError, match="has 1 finished trials of dual encoders with a ρ: at least 2 values of ρ are"):
        analyse_phase(Phase(sweep=str(tmp_path), images="images", label="number", **output))
    assert not (tmp_path / "output").exists()


def test_noisy_pairs_are_those_of_the_noise_and_of_the_median() -> None:
    captions = CaptionNoise(share=0.3, seed=5)
    ids, numbers = np.arange(1000, 1400), np.random.default_rng(0).permutation(400).astype(float)
    numbers[7] = np.nan
    groups = noise.group_pairs(ids, numbers, captions)
    noisy = [captions.apply("one two three", int(pair))[0] != "one two three" for pair in ids]
    assert groups["noisy"].tolist() == noisy
    assert groups["clean"].tolist() == [not of_pair for of_pair in noisy]
    assert groups["noisy and frequent"].tolist() == list(np.array(noisy) & (numbers > np.nanmedian(numbers)))
    with pytest.raises(ValueError, match="every group needs 2 pairs; of 3 pairs are noisy 0, noisy and frequent 0"):
        noise.group_pairs(np.arange(3), np.arange(3.0), CaptionNoise(share=1e-9))


def test_differences_of_noisy_pairs_have_the_error_of_welch() -> None:
    rng = np.random.default_rng(2)
    is_noisy = np.arange(300) < 60
    groups = {"clean": ~is_noisy, "noisy": is_noisy, "noisy and frequent": np.arange(300) < 20}
    tau = {"images": rng.normal(1.0, 0.2, 300), "captions": rng.normal(1.0, 0.2, 300) + is_noisy}
    values = noise.figures(groups, tau, np.arange(300))
    for noun, of_kind in tau.items():
        welch = ttest_ind(of_kind[is_noisy], of_kind[~is_noisy], equal_var=False)
        difference = values["differences"][noun]
        low, high = welch.confidence_interval(0.95)
        assert difference == pytest.approx({"mean": (low + high) / 2, "half_width": (high - low) / 2})
    assert [row["num_pairs"] for row in values["groups"]] == [240, 60, 20]
    assert values["groups"][2]["images"]["mean"] == pytest.approx(tau["images"][:20].mean())
    assert "τ of noisy pairs' images is not seen to differ" in noise.conclude_noise(values)
    assert "τ of noisy pairs' captions is higher (+1" in noise.conclude_noise(values)
    # Captions of an image are not independent, so that they do not narrow the interval of a group.
    image = np.repeat(np.arange(300), 5)
    repeated = noise.figures(
        {name: chosen[image] for name, chosen in groups.items()}, {noun: one[image] for noun, one in tau.items()}, image
    )
    for one, other in zip(repeated["groups"], values["groups"], strict=True):
        assert one["images"] == pytest.approx(other["images"])
