"""Verdicts follow their rule, and table, JSON file and picture show the figures that they are based on."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.engine.config import TrackingSection
from jobs.studies.estimates import Estimate
from jobs.studies.reproduction.config import ReproduceConfig
from jobs.studies.reproduction.experiment import Statement, above, below, between, equal, falling, score
from jobs.studies.reproduction.picture import draw, has_picture
from jobs.studies.reproduction.plan import Reproduction, make_reproduction
from jobs.studies.reproduction.table import StudyResult, as_content, as_markdown
from jobs.studies.reproduction.verdicts import UNSEEN, Judged, judge, judge_claim, judge_estimate

MEASURES = {"x": score("x", "x", "x")}
FIGURES = st.lists(st.floats(-100, 100), min_size=2, max_size=6)


def make(name: str, tmp_path: Path, **options: Any) -> Reproduction:
    """Returns the plan of an experiment that stores its runs below `tmp_path` and logs nothing to MLflow."""
    tracking = TrackingSection(enabled=False)
    return make_reproduction(ReproduceConfig(experiment=name, storage=str(tmp_path), tracking=tracking, **options))


def replicates(**arms: list[float]) -> dict[str, dict[str, dict[str, float]]]:
    """Returns the scores of every arm, one figure `x` per seed."""
    return {arm: {str(seed): {"x": value} for seed, value in enumerate(values)} for arm, values in arms.items()}


def verdict(statement: Statement, **arms: list[float]) -> str:
    """Returns the verdict on a statement about these arms."""
    return judge(statement, replicates(**arms), MEASURES).verdict


def test_verdicts_by_hand() -> None:
    assert verdict(above("a", "b", "x"), a=[3, 4, 5], b=[1, 2, 3.1]) == "holds"
    assert verdict(above("a", "b", "x"), a=[1, 2, 3.1], b=[3, 4, 5]) == "does not hold"
    assert verdict(above("a", "b", "x"), a=[3, 1, 5], b=[1, 2, 4]) == UNSEEN
    # Differences are taken seed by seed, since seeds differ by far more than arms do.
    assert verdict(above("a", "b", "x"), a=[1.1, 50.12, 99.09], b=[1, 50, 99]) == "holds"
    assert verdict(below("a", "b", "x"), a=[1, 50, 99], b=[1.1, 50.12, 99.09]) == "holds"
    assert verdict(equal("a", "b", "x", within=1), a=[1.1, 2.2, 3.3], b=[1.2, 2.1, 3.3]) == "holds"
    assert verdict(equal("a", "b", "x", within=1), a=[5, 6, 7], b=[1, 2, 3.1]) == "does not hold"
    assert verdict(between("a", "x", 0, 1), a=[0.4, 0.5, 0.6]) == "holds"
    # There is one seed, or there are no figures, or the arms are equal where a difference is claimed.
    assert verdict(above("a", "b", "x"), a=[3], b=[1]) == UNSEEN
    assert verdict(above("a", "b", "x"), a=[3, 4]) == UNSEEN
    assert verdict(above("a", "b", "x"), a=[3, math.nan], b=[1, 2]) == UNSEEN
    assert verdict(above("a", "b", "x"), a=[3, 4], b=[3, 4]) == "does not hold"
    # The arm may be worse by up to 1.
    assert verdict(above("a", "b", "x", by=-1), a=[2.9, 3.9, 5], b=[3, 4, 5]) == "holds"


def test_only_seeds_that_all_arms_have_count() -> None:
    found = judge(above("a", "b", "x"), replicates(a=[3, 4, 5], b=[1, 2]), MEASURES)
    assert found.num_replicates == 2


def test_a_measure_that_is_not_random_needs_one_seed() -> None:
    exact = {"x": score("x", "x", "x")}
    exact["x"] = type(exact["x"])(name="x", title="x", value=exact["x"].value, is_exact=True)
    assert judge(between("a", "x", 0, 2), replicates(a=[1]), exact).verdict == "holds"
    assert judge(between("a", "x", 2, 3), replicates(a=[1]), exact).verdict == "does not hold"


@given(a=FIGURES, shift=st.floats(-50, 50))
def test_the_opposite_statement_has_the_opposite_verdict(a: list[float], shift: float) -> None:
    b = [value * 0.5 + shift for value in a]
    forth, back = verdict(above("a", "b", "x"), a=a, b=b), verdict(below("a", "b", "x"), a=a, b=b)
    assert not (forth == "holds" and back != "does not hold")
    assert not (back == "holds" and forth != "does not hold")


@given(
    mean=st.floats(-10, 10),
    half=st.floats(0, 10),
    low=st.floats(-10, 10),
    width=st.floats(0.1, 10),
    wider=st.floats(0, 10),
)
def test_a_wider_interval_decides_less_and_a_wider_bound_more(
    mean: float, half: float, low: float, width: float, wider: float
) -> None:
    def decide(half: float, low: float, high: float) -> str:
        return judge_estimate(Statement(text="", weights={}, low=low, high=high), Estimate(mean, half, 0.0))

    first = decide(half, low, low + width)
    assert decide(half + wider, low, low + width) in (first, UNSEEN)
    if first == "holds":
        assert decide(half, low - wider, low + width + wider) == "holds"
    if decide(half, low - wider, low + width + wider) == "does not hold":
        assert first == "does not hold"


@given(st.lists(st.sampled_from(["holds", "does not hold", UNSEEN]), max_size=5))
def test_a_claim_is_as_good_as_its_worst_statement(verdicts: list[Any]) -> None:
    statement = Statement(text="", weights={})
    judged = [Judged(statement=statement, estimate=None, num_replicates=0, verdict=one) for one in verdicts]
    if "does not hold" in verdicts:
        assert judge_claim(judged) == "does not hold"
    elif verdicts and set(verdicts) == {"holds"}:
        assert judge_claim(judged) == "holds"
    else:
        assert judge_claim(judged) == UNSEEN


def test_falling_is_a_chain() -> None:
    chain = falling(["a", "b", "c"], "x")
    values = replicates(a=[3, 4], b=[2, 2.9], c=[0, 1.1])
    assert [judge(one, values, MEASURES).verdict for one in chain] == ["holds", "holds"]


def test_table_and_json_show_the_paper_beside_ours(tmp_path: Path) -> None:
    work = make("T16", tmp_path)
    (planned,) = work.studies
    scores = {"validation/tau_mean": 2.0, "validation/cross_entropy_tau": 5.0}
    values = {
        arm.name: {run.replicate.name: scores for run in planned.runs if run.arm.name == arm.name}
        for arm in planned.study.arms
    }
    measures = {measure.name: measure for measure in planned.study.measures}
    judged = [judge(one, values, measures) for one in planned.study.statements]
    result = StudyResult(study=planned.study, replicates=values, judged=judged, test_share=0.0)
    table = as_markdown(work, [result], {"a-run": "the disk is gone"})
    assert re.search(r"ρ = 0 +\| +31\.34 \| +62\.66 \| +49\.61 \| 148\.41 ± 0\.00 \| 2\.000 ± 0\.000", table)
    assert "The claim does not hold" in table
    assert "FAILED: a-run: the disk is gone" in table
    content = as_content(work, [result])
    assert content["verdict"] == "does not hold"
    assert content["studies"][0]["statements"][0]["verdict"] == "holds"
    assert content["studies"][0]["arms"][1]["figures"]["tau_mean"]["values"] == [2.0] * 3


def test_the_picture_has_a_line_for_every_arm_with_its_interval(tmp_path: Path) -> None:
    (planned,) = make("T16", tmp_path).studies
    values = {
        arm.name: {str(seed): {"validation/tau_mean": number + seed} for seed in range(3)}
        for number, arm in enumerate(planned.study.arms)
    }
    result = StudyResult(study=planned.study, replicates=values, judged=[], test_share=0.0)
    assert has_picture([result])
    (panel,) = draw([result]).axes  # mean τ is the only measure that has figures
    assert panel.get_xlabel() == "mean τ"
    assert [label.get_text() for label in panel.get_yticklabels()] == [arm.name for arm in planned.study.arms]
    means = [bar.lines[0].get_xydata().tolist() for bar in panel.containers]
    assert means == [[[number + 1.0, number]] for number in range(3)]
    half_width = 4.302652729911275 / math.sqrt(3)
    (ends,) = panel.containers[0].lines[2][0].get_segments()
    assert ends[:, 0] == pytest.approx([1 - half_width, 1 + half_width])


def test_the_history_of_training_is_drawn_as_a_curve(tmp_path: Path) -> None:
    planned, *_ = make("F4", tmp_path).studies
    score = planned.study.scoring.score  # type: ignore[union-attr]
    scores = {f"{score}@{point}": math.log(100 / point) for point in range(1, 5)}
    values = {arm.name: {"0": scores, "1": scores} for arm in planned.study.arms}
    result = StudyResult(study=planned.study, replicates=values, judged=[], test_share=0.0)
    (panel,) = draw([result]).axes
    assert panel.get_ylabel() == "perplexity"
    for bar in panel.containers:
        assert bar.lines[0].get_xydata() == pytest.approx(np.array([[0.25, 100], [0.5, 50], [0.75, 100 / 3], [1, 25]]))


def test_a_part_of_a_claim_does_not_make_it_hold(tmp_path: Path) -> None:
    whole = make("T4", tmp_path)
    part = make("T4", tmp_path, arms=("ce", "dro_newton"))
    assert whole.num_left_out == 0
    assert part.num_left_out == len(whole.studies[0].study.statements) - len(part.studies[0].study.statements) > 0
    (statement,) = part.studies[0].study.statements
    judged = Judged(statement=statement, estimate=None, num_replicates=3, verdict="holds")
    assert judge_claim([judged]) == "holds"
    assert judge_claim([judged], num_left_out=part.num_left_out) == UNSEEN
    failed = Judged(statement=statement, estimate=None, num_replicates=3, verdict="does not hold")
    assert judge_claim([failed], num_left_out=part.num_left_out) == "does not hold"
