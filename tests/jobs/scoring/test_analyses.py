"""Tests of the analyses: which records make which group, what is refused, and that the figures are those of scipy."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from jobs.scoring.analyses.config import Instructions, Subjectivity
from jobs.scoring.analyses.groups import analyse, conclusion, figures, table
from jobs.scoring.analyses.records import Record, Records, first_verb, read_instructions, read_subjectivity

COLUMNS = ["question", "human_ans_spans", "question_subj_level", "answer_subj_level"]


def write_csv(path: Path, rows: list[list[object]], columns: list[str] = COLUMNS) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])


def test_questions_and_answers_in_groups_of_subjectivity(tmp_path: Path) -> None:
    write_csv(tmp_path / "a" / "test.csv", [["Is it good?", "yes, very", 1, 4], ["How large?", "2 m", 5, 2]])
    write_csv(tmp_path / "dev.CSV", [["Why?", "ANSWERNOTFOUND", 1, 1], ["Who?", " ", 2, 2], ["When?", "now", 7, 3]])
    read = read_subjectivity(str(tmp_path), "question")
    assert read.records == [
        Record("Is it good?\nyes, very", "1, most subjective"),
        Record("How large?\n2 m", "5, least subjective"),
    ]
    assert read.groups == ["5, least subjective", "1, most subjective"]
    assert read.left_out == Counter({"without an answer": 2, "without a level from 1 to 5": 1})
    assert [record.group for record in read_subjectivity(str(tmp_path), "answer").records] == ["4", "2", "3"]
    assert read_subjectivity(str(tmp_path / "a" / "test.csv"), "question").records == read.records


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
    assert [record.group for record in read.records] == ["write", "write", "explain"]
    assert read.records[1].text == "Please write a list\nof fruit\nApple"
    assert read.groups == ["write", "explain"]
    reasons = {"not begun with a verb": 1, "not a record of Alpaca": 1}
    assert read.left_out == Counter({**reasons, "not begun with one of the 2 most frequent verbs": 1})


@pytest.mark.parametrize(
    ("instruction", "verb"),
    [("Create", "create"), ("  can you please NAME two", "name"), ("How many?", ""), ("3 reasons", ""), ("Éclair", "")],
)
def test_the_first_word_is_the_verb_unless_it_cannot_be_one(instruction: str, verb: str) -> None:
    assert first_verb(instruction) == verb


def test_what_cannot_be_analysed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no such file or directory"):
        read_subjectivity(str(tmp_path / "nowhere"), "question")
    with pytest.raises(FileNotFoundError, match=r"holds no \.csv file"):
        read_subjectivity(str(tmp_path), "question")
    write_csv(tmp_path / "other.csv", [[1]], ["x"])
    with pytest.raises(
        ValueError, match=r"other\.csv is no file of SubjQA: it has no column human_ans_spans, question"
    ):
        read_subjectivity(str(tmp_path), "question")
    write_csv(tmp_path / "other.csv", [["Why?", "so", 1, 1]])
    with pytest.raises(ValueError, match="has 1 records in 1 groups, and 2 are needed; left out: there are no others"):
        read_subjectivity(str(tmp_path), "question")
    write_csv(tmp_path / "other.csv", [["Why?", "so", 1, 1], ["Who?", "I", 2, 1], ["When?"]])
    few = read_subjectivity(str(tmp_path), "question")
    assert few.left_out == Counter({"without an answer": 1})
    output = tmp_path / "output"
    with pytest.raises(
        ValueError, match="has 2 records that can be used, and an interval of a rank correlation needs 4"
    ):
        analyse(Subjectivity(model="m", data=str(tmp_path), output=str(output)), few, "title")
    (tmp_path / "a.json").write_text(json.dumps([{"instruction": f"{verb} it"} for verb in ("sort", "name")]))
    instructions = read_instructions(str(tmp_path / "a.json"), 20)
    with pytest.raises(OSError, match="nowhere"):
        analyse(Instructions(model=str(tmp_path / "nowhere"), data="d", output=str(output)), instructions, "title")
    assert not output.exists()
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no list of records"):
        read_instructions(str(tmp_path / "a.json"), 20)
    with pytest.raises(ValueError, match="num_verbs = 1"):
        Instructions(model="m", data="d", output="o", num_verbs=1)
    with pytest.raises(ValueError, match="data is empty"):
        Subjectivity(model="m", data="", output="o")


def test_figures_of_ordered_groups_are_those_of_scipy() -> None:
    rng = np.random.default_rng(0)
    names = ["low", "middle", "high"]
    groups = [names[number] for number in rng.integers(3, size=300)]
    tau = 1 + 0.1 * np.array([names.index(group) for group in groups]) + rng.normal(0, 0.2, 300)
    values = figures(Records([], names, Counter({"x": 2}), True), groups, tau)
    for row in values["groups"]:
        chosen = tau[np.array(groups) == row["group"]]
        assert row["mean"] == pytest.approx(chosen.mean())
        assert row["half_width"] == pytest.approx(1.96 * chosen.std(ddof=1) / len(chosen) ** 0.5)
    positions = [names.index(group) for group in groups]
    assert values["spearman"]["mean"] == pytest.approx(spearmanr(tau, positions).statistic)
    assert conclusion(values).startswith("τ rises from the first group to the last: Spearman +0.")
    assert conclusion(values).endswith("300 records; left out: 2 x")
    shuffled = figures(Records([], names, Counter(), True), groups, rng.permutation(tau))
    assert conclusion(shuffled).startswith("no trend of τ can be seen")
    assert table(values).count("\n") == 4


def test_groups_without_order_are_listed_by_their_mean() -> None:
    values = figures(Records([], ["a", "b"], Counter(), False), ["a", "b", "b", "a"], np.array([1.0, 2.0, 4.0, 1.5]))
    assert values["spearman"] is None
    assert table(values).index("| b") < table(values).index("| a")
    assert conclusion(values).startswith("lowest a 1.2500 ± 0.4900, highest b 3.0000 ± 1.9600")
    single = figures(Records([], ["a", "b"], Counter(), False), ["a", "b"], np.array([1.0, 2.0]))
    assert conclusion(single).startswith("lowest a 1.0000, highest b 2.0000")
    json.dumps(single, allow_nan=False)
