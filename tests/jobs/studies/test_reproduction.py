"""Reproduction: all experiments resolve, their runs are made in order, and verdicts follow their rule."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from jobs.engine.config import TrackingSection
from jobs.engine.fields import flatten, with_fields
from jobs.reproduce import main
from jobs.studies.estimates import estimate
from jobs.studies.reproduction import launch
from jobs.studies.reproduction.config import ReproduceConfig
from jobs.studies.reproduction.direct import COSINES, measure_gradient_scales
from jobs.studies.reproduction.experiments import (
    EXPERIMENTS,
    Arm,
    Measure,
    Statement,
    Study,
    find,
    read_claim,
)
from jobs.studies.reproduction.papers import _records, papers_page
from jobs.studies.reproduction.plan import Reproduction, list_needed_paths, make_reproduction
from jobs.studies.reproduction.report import (
    UNSEEN,
    Judged,
    StudyResult,
    as_content,
    as_markdown,
    draw,
    gains,
    judge,
    judge_claim,
)
from jobs.studies.reproduction.scoring import FinishedRun, History
from jobs.studies.trials import Trial, find_groups, prepare_once
from jobs.tasks.classifier.config import ClassifierConfig
from jobs.tasks.presets.language_models import PRESETS
from jobs.tasks.presets.sentences import PRESETS as SENTENCES
from jobs.tasks.sentence_encoder.config import SentenceConfig
from tempnet.contrastive.config import ContrastiveLossConfig
from tempnet.contrastive.losses import ContrastiveLoss
from tempnet.rho import check_rho

MEASURES = {"x": Measure(name="x", title="x", value=lambda scores: scores["x"])}


def make(name: str, tmp_path: Path, **options: Any) -> Reproduction:
    """Return the plan of an experiment that stores its runs below `tmp_path` and logs nothing to MLflow."""
    tracking = TrackingSection(enabled=False)
    return make_reproduction(ReproduceConfig(experiment=name, storage=str(tmp_path), tracking=tracking, **options))


@pytest.mark.parametrize("scale", ["small", "full"])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_resolves_without_data(name: str, scale: str, tmp_path: Path) -> None:
    work = make(name, tmp_path, scale=scale)
    for planned in work.studies:
        study = planned.study
        names = [arm.name for arm in study.arms]
        measures = {measure.name for measure in study.measures}
        assert (len(set(names)), len(measures)) == (len(names), len(study.measures))
        assert {arm.after for arm in study.arms} <= {"", *names}
        # Every statement is about arms that are run and measures that exist, and every row of the paper has its arm.
        weights = {weight for statement in study.statements for weight in statement.weights}
        assert {arm for arm, _ in weights} <= set(names)
        assert {measure for _, measure in weights} <= measures
        assert all(len(arm.paper) in (0, len(study.columns)) for arm in study.arms)
        # Every arm has a run of its own for every seed and fold.
        by_name = {arm.name: arm for arm in study.arms}
        by_arm = {name: [run.name for run in planned.runs if run.arm.name == name] for name in names}
        assert all(len(set(runs)) == len(runs) for runs in by_arm.values())
        assert all(len(runs) >= 3 for name, runs in by_arm.items() if by_name[name].preset)
        for run in planned.runs:
            assert run.config.workers.use_gpu == (scale == "full")
            assert run.config.run.directory.startswith(f"{tmp_path}/reproduced/")
            fields = flatten(run.config)
            if scale == "full" and "llama" in fields.get("model.path", "").lower():
                check_rho(fields["temperature.rho"], 32_000)
    description = work.describe()
    assert work.experiment.claim in description
    if work.runs:
        assert ("GPU-hours" if scale == "full" else "core-hours") in description


def test_gradient_scales_are_those_of_the_losses() -> None:
    """Against autograd of the cross-entropy, and of the whole loss for two pairs."""
    found = measure_gradient_scales("small", 0)
    for name, scales in found.items():
        is_free, size = "free" in name, int(name.partition("N = ")[2] or 2)
        tau = float(name.partition("τ = ")[2].partition(",")[0] or 1)
        for at, scale in zip(COSINES, scales.values(), strict=True):
            cosine = torch.tensor(at, dtype=torch.float64, requires_grad=True)
            scores = torch.stack([cosine, *[-cosine] * (size - 1)])
            logits = ((1 + scores) / (1 - scores)).log() if is_free else scores / tau
            (slope,) = torch.autograd.grad(-logits.log_softmax(0)[0], cosine)
            assert scale == pytest.approx(-float(slope), rel=1e-9)
            if "N" not in name:  # Both sides of both pairs have the cosines C and −C.
                config = ContrastiveLossConfig.for_name("temperature_free" if is_free else "clip_fixed", tau=tau)
                text = torch.stack([cosine, (1 - cosine.square()).sqrt()])
                image, ids = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64), torch.arange(2)
                whole = ContrastiveLoss(config)(image, torch.stack([text, -text]), ids, ids, gamma=1.0)["loss"]
                assert scale == pytest.approx(-float(torch.autograd.grad(whole, cosine)[0]), rel=1e-6)
    assert find("tf-f4") is find("TF-F1")


def test_folds_start_from_the_encoder_of_their_seed(tmp_path: Path) -> None:
    planned, over_sizes = make("TripleEntropy", tmp_path, seeds=2).studies
    exports = {run.name: run.config.run.export_directory for run in planned.runs if run.arm.name == "encoder"}
    cells = [run for run in planned.runs if run.arm.name != "encoder"]
    assert len(cells) == 5 * 3 * 2 * 5
    assert len({run.name for run in over_sizes.runs} - {run.name for run in planned.runs}) == 4 * 2 * 5
    assert len({run.after for run in cells}) == 2
    assert planned.test_share == 0.25
    for run in cells:
        assert isinstance(run.config, ClassifierConfig)
        assert run.config.tokenizer == run.config.model.path == exports[run.after]
    with pytest.raises(ValueError, match="has the 4 seeds of its paper"):
        make("TripleEntropy", tmp_path, seeds=5)


def test_settings_that_are_not_the_defaults_have_a_directory_of_their_own(tmp_path: Path) -> None:
    def directory(**options: Any) -> str:
        return Path(ReproduceConfig(experiment="T15", storage=str(tmp_path), **options).run.directory).name

    assert directory() == directory(seeds=3, num_concurrent=1) == "reproduce-T15-small"
    others = [{"seeds": 1}, {"seeds": 1, "steps": 6}, {"change": ("temperature.gamma=0.2",)}, {"arms": ("ρ = 2",)}]
    assert len({directory(), *(directory(**options) for options in others)}) == 5
    assert directory(seeds=1, name="mine") == "mine"


def test_the_history_of_a_run_needs_no_mlflow() -> None:
    scores = [{"step": step, "scores": {"loss": 10.0 - step}} for step in (1, 2, 3, 4)]
    config = with_fields(PRESETS["gpt2-scratch-small"](), {"run.num_steps": 4, "run.name": "a"})
    run = FinishedRun(config=config, outcome={"validations": scores})
    assert History(name="loss", num_points=2).scores([run], {}) == {"a": {"loss@1": 8.0, "loss@2": 6.0}}


def test_steps_changes_and_arms(tmp_path: Path) -> None:
    change = ("optimizer.beta1=0.8", "data.train=elsewhere")
    own = {run.config.run.num_steps for run in make("TripleEntropy", tmp_path, steps=30, seeds=1).runs.values()}
    assert own == {19, 30}  # an arm of 19 steps has no more, and one of 262 no more than the others
    for steps, wanted in ((None, (300, 75)), (1000, (300, 75)), (100, (100, 25))):
        runs = make("T15", tmp_path, steps=steps, seeds=1).runs.values()
        assert {(run.config.run.num_steps, run.config.validation.every) for run in runs} == {wanted}
    work = make("T15", tmp_path, steps=6, change=change, arms=("ρ = 2.5",), seeds=1)
    base, started = work.runs.values()
    assert (base.arm.name, started.arm.name, started.after) == ("base", "ρ = 2.5", base.name)
    assert flatten(started.config)["model.path"] == base.config.run.export_directory
    for fields in (flatten(base.config), flatten(started.config)):
        names = ("run.num_steps", "optimizer.beta1", "data.train")
        assert [fields[name] for name in names] == [6, 0.8, "elsewhere"]
    assert "elsewhere  (MISSING)" in work.describe()
    # Encoders have no field `data.directory`, but the classifiers that start from them do.
    work = make("TripleEntropy", tmp_path, seeds=1, change=("data.directory=elsewhere", "optimizer.beta1=0.8"))
    kinds = {type(run.config): run.config for run in work.runs.values()}
    assert kinds.keys() == {SentenceConfig, ClassifierConfig}
    assert flatten(kinds[ClassifierConfig])["data.directory"] == "elsewhere"
    assert {config.optimizer.beta1 for config in kinds.values()} == {0.8}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["t44"], "experiment 't44' is unknown: did you mean T4"),
        (["T4", "--seeds", "0"], "seeds = 0 must be at least 1"),
        (["T4", "--arms", "dro_newtn"], "arms: 'dro_newtn' is unknown: did you mean 'dro_newton'"),
        (["T4", "--change", "temperature.tau_mx=1"], "there is no field temperature.tau_mx"),
        (["T4", "--change", "optimizer.beta1=2"], "optimizer.beta1 = 2 must lie in [0, 1]"),
        (["T4", "--change", "run.num_steps=abc"], "run.num_steps = 'abc' must be int"),
        (["T4", "--change", "temperature.stop_gradient=false"], "temperature.stop_gradient = 'false' must be bool"),
        (["T4", "--change", "workers.precision=fp16"], "workers.precision = 'fp16' must be 'auto' or 'fp32' or 'bf16'"),
        (["T4", "--change", "run.seed=5"], "change: run.seed cannot be changed"),
        (["T4", "--change", "run.storage=/elsewhere"], "use --storage"),
        (["T4", "--data", "senteval=x"], "data: T4 is not scored on 'senteval': it is scored on no data"),
        (["T13", "--steps", "4"], "T13 trains nothing"),
        (["DeCLUTR", "--data", "sentevl=x"], "it is scored on senteval"),
    ],
)
def test_wrong_values_are_refused_before_anything_starts(
    arguments: list[str], message: str, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    assert message in refusal("reproduce", *arguments, "--storage", tmp_path, "--tracking.no-enabled", "--dry-run")


def test_missing_data_are_named_before_anything_starts_also_those_of_runs_that_start_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Callable[..., str]
) -> None:
    """The encoder could be trained, but the classifiers that start from it would then find no data."""
    monkeypatch.chdir(tmp_path)
    for name, message in (("T4", "data.train: "), ("DeCLUTR", "senteval = 'senteval/data/downstream' does not exist")):
        assert message in refusal("reproduce", name, "--storage", tmp_path, "--tracking.no-enabled")
    monkeypatch.setattr(launch, "make_plan", lambda config: None)
    work = make("TripleEntropy", tmp_path, seeds=1, change=("data.directory=elsewhere",))
    for name in ("data.train", "data.validation", "data.tokenizer"):
        for path in list_needed_paths([run.config for run in work.runs.values()]).get(name, []):
            (tmp_path / path).mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"data\.directory = 'elsewhere' does not exist: use --change data\."):
        launch.run_reproduction(work)


def replicates(**arms: list[float]) -> dict[str, dict[str, dict[str, float]]]:
    """Returns the scores of every arm, one figure `x` per seed."""
    return {arm: {str(seed): {"x": value} for seed, value in enumerate(values)} for arm, values in arms.items()}


def verdict(claim: str, **arms: list[float]) -> str:
    """Returns the verdict on a claim about these arms."""
    return judge(state(claim), replicates(**arms), MEASURES).verdict


def state(claim: str) -> Statement:
    (statement,) = read_claim(claim, ["a", "b"], ["x"])
    assert statement.text == claim
    return statement


def test_verdicts_by_hand() -> None:
    assert verdict("x: a > b", a=[3, 4, 5], b=[1, 2, 3.1]) == "holds"
    assert verdict("x: a > b", a=[1, 2, 3.1], b=[3, 4, 5]) == "does not hold"
    assert verdict("x: a > b", a=[3, 1, 5], b=[1, 2, 4]) == UNSEEN
    # Differences are taken seed by seed, since seeds differ by far more than arms do.
    assert verdict("x: a > b", a=[1.1, 50.12, 99.09], b=[1, 50, 99]) == "holds"
    assert verdict("x: a < b", a=[1, 50, 99], b=[1.1, 50.12, 99.09]) == "holds"
    assert verdict("x: a = b ± 1", a=[1.1, 2.2, 3.3], b=[1.2, 2.1, 3.3]) == "holds"
    assert verdict("x: a = b ± 1", a=[5, 6, 7], b=[1, 2, 3.1]) == "does not hold"
    assert verdict("x: 0 < a < 1", a=[0.4, 0.5, 0.6]) == "holds"
    # There is one seed, or there are no figures, or the arms are equal where a difference is claimed.
    assert verdict("x: a > b", a=[3], b=[1]) == UNSEEN
    assert verdict("x: a > b", a=[3, 4]) == UNSEEN
    assert verdict("x: a > b", a=[3, math.nan], b=[1, 2]) == UNSEEN
    assert verdict("x: a > b", a=[3, 4], b=[3, 4]) == "does not hold"
    assert judge(state("x: a > b"), replicates(a=[3, 4, 5], b=[1, 2]), MEASURES).num_replicates == 2
    # A seed that diverged is not left out of the mean of the others.
    study = Study(title="", arms=(Arm(name="a"),), measures=tuple(MEASURES.values()))
    result = StudyResult.of(study, replicates(a=[3, math.nan, 5]))
    assert result.estimate(study.arms[0], MEASURES["x"]) is None
    # The arm may be worse by up to 1.
    assert verdict("x: a > b − 1", a=[2.9, 3.9, 5], b=[3, 4, 5]) == "holds"


def test_a_measure_that_is_not_random_needs_one_seed() -> None:
    exact = {"x": dataclasses.replace(MEASURES["x"], is_exact=True)}
    assert judge(state("x: 0 < a < 2"), replicates(a=[1]), exact).verdict == "holds"
    assert judge(state("x: 2 < a < 3"), replicates(a=[1]), exact).verdict == "does not hold"


def test_a_claim_is_as_good_as_its_worst_statement_and_a_part_of_it_does_not_make_it_hold(tmp_path: Path) -> None:
    def claim(*verdicts: Any, num_left_out: int = 0) -> str:
        statement = Statement(text="", weights={})
        judged = [Judged(statement=statement, estimate=None, num_replicates=0, verdict=one) for one in verdicts]
        return judge_claim(judged, num_left_out=num_left_out)

    assert claim("holds", UNSEEN, "does not hold") == "does not hold"
    assert claim("holds", UNSEEN) == claim() == UNSEEN
    assert claim("holds", "holds") == "holds"
    whole, part = make("T4", tmp_path), make("T4", tmp_path, arms=("ce", "dro_newton"))
    assert (whole.num_left_out, part.num_left_out, len(part.studies[0].study.statements)) == (0, 2, 1)
    assert claim("holds", num_left_out=2) == UNSEEN
    assert claim("does not hold", num_left_out=2) == "does not hold"


@pytest.mark.parametrize(
    ("claim", "found"),
    [
        ("x: b > a = 1 | c, d", [("x: b > a = 1", {"b": 1, "a = 1": -1}, 0), ("x: b > c, d", {"b": 1, "c, d": -1}, 0)]),
        ("x: a = 1 > b − 1", [("x: a = 1 > b − 1", {"a = 1": 1, "b": -1}, -1)]),
        ("x: b < c, d", [("x: b < c, d", {"c, d": 1, "b": -1}, 0)]),
        ("x: b < c, d − 2", [("x: b < c, d − 2", {"c, d": 1, "b": -1}, 2)]),
        ("x: a = 1 > b > c, d", [("x: b < a = 1", {"a = 1": 1, "b": -1}, 0), ("x: c, d < b", {"b": 1, "c, d": -1}, 0)]),
        ("x: 0.5 < c, d < 2", [("x: 0.5 < c, d < 2", {"c, d": 1}, 0.5)]),
        ("x: a = 1 = b ± 0.5", [("x: a = 1 = b ± 0.5", {"a = 1": 1, "b": -1}, -0.5)]),
    ],
)  # fmt: skip
def test_claims_are_read_as_the_table_shows_them(claim: str, found: list[tuple[str, dict[str, int], float]]) -> None:
    read = list(read_claim(claim, ["a = 1", "b", "c, d"], ["x"]))
    assert [(one.text, {arm: weight for (arm, _), weight in one.weights.items()}, one.low) for one in read] == found
    with pytest.raises(ValueError, match="no known form"):
        list(read_claim("x: a = 1 ≈ b", ["a = 1", "b"], ["x"]))


def test_table_and_json_show_the_paper_beside_ours(tmp_path: Path) -> None:
    work = make("T16", tmp_path)
    (planned,) = work.studies
    scores = {"validation/tau_mean": 2.0, "validation/cross_entropy_tau": 5.0}
    values = {
        arm.name: {run.replicate: scores for run in planned.runs if run.arm.name == arm.name}
        for arm in planned.study.arms
    }
    result = StudyResult.of(planned.study, values)
    table = as_markdown(work, [result], {"a-run": "the disk is gone"})
    assert re.search(r"ρ = 0 +\| +31\.34 \| +62\.66 \| +49\.61 \| 148\.41 ± 0\.00 \| 2\.000 ± 0\.000", table)
    assert "The claim does not hold" in table
    assert "FAILED: a-run: the disk is gone" in table
    content = as_content(work, [result])
    assert content["verdict"] == "does not hold"
    assert content["studies"][0]["statements"][0]["verdict"] == "holds"
    assert content["studies"][0]["arms"][1]["figures"]["tau_mean"]["values"] == [2.0] * 3
    figure = draw([result])
    assert figure is not None
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [arm.name for arm in planned.study.arms]
    means = [bar.lines[0].get_xydata().tolist() for bar in figure.axes[1].containers]
    assert means == [[[2.0, number]] for number in range(3)]


def test_gains_over_cross_entropy_are_paired_and_drawn_over_the_number_of_sentences(tmp_path: Path) -> None:
    work = make("TripleEntropy", tmp_path, seeds=2)
    rng, results = np.random.default_rng(0), []
    for planned in work.studies:
        shared = rng.normal(0.8, 0.05, size=10)
        values: dict[str, dict[str, dict[str, float]]] = {}
        for run in (run for run in planned.runs if run.arm.name != "encoder"):
            assert isinstance(run.config, ClassifierConfig)
            place = run.number * 5 + run.fold
            gain = {"cross-entropy": 0.0, "TripleEntropy": 0.001 * place, "SupCon": -0.01}[run.arm.name.split(", ")[1]]
            size = run.config.data.num_examples
            scores = {"validation/accuracy": shared[place] + gain, "num_train": 0.8 * size, "num_held_out": 0.2 * size}
            values.setdefault(run.arm.name, {})[run.replicate] = scores
        results.append(StudyResult.of(planned.study, values, planned.test_share))
    first, *_ = gains(results[0])
    assert (first.data, first.loss, first.num_sentences) == ("SST2", "TripleEntropy", 1000.0)
    assert first.paper == pytest.approx(89.09 - 88.63)
    wanted = estimate((0.1 * np.arange(10)).tolist(), 0.25)
    assert (first.estimate.mean, first.estimate.half_width) == pytest.approx((wanted.mean, wanted.half_width))
    table = as_markdown(work, results, {})
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| TREC |")
    ]
    assert cells == [["TREC", "1,000", "+2.29", "+0.45 ± 0.41", "", "-1.00 ± 0.00"]]
    figure = draw(results)
    assert figure is not None
    points = figure.axes[-1].containers[0].lines[0].get_xydata()
    assert points == pytest.approx(np.array([[size, 0.45] for size in (*[1000] * 5, 250, 1000, 3500)]))


@pytest.mark.parametrize(
    ("name", "num_at_once", "sizes"),
    [
        ("T15", 16, [6, 6]),  # six ρ on the base of each seed, and not the bases
        ("T15", 4, [4, 2, 4, 2]),
        ("T18", 16, []),  # other losses
        ("T21", 16, []),  # no frozen base
    ],
)
def test_networks_that_differ_in_numbers_train_side_by_side_on_the_base_of_their_seed(
    name: str, num_at_once: int, sizes: list[int], tmp_path: Path
) -> None:
    runs = make(name, tmp_path, seeds=2).runs.values()
    groups = find_groups([Trial(config=run.config, after=run.after) for run in runs], num_at_once)
    assert [len(group) for group in groups] == sizes
    assert all(len({(trial.after, trial.config.run.seed) for trial in group}) == 1 for group in groups)


def test_the_page_of_the_papers_has_every_experiment_and_the_verdicts_of_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["T13", "--storage", str(tmp_path), "--tracking.no-enabled"]) == 0
    assert main(["papers", "--storage", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith(f"{tmp_path}/papers.md\n")
    page = (tmp_path / "papers.md").read_text()
    commands = set(re.findall(r"`jobs.reproduce ([\w-]+)`", page))
    assert commands == set(EXPERIMENTS)
    assert "| `jobs.reproduce T13` | **holds** (3 seeds; statements: 6 hold) |" in page
    assert "| CLIP: 263,172 parameters | 263,172 ± 0 | 263,171.5 to 263,172.5 | holds |" in page
    assert page.count("not run at small scale") > 20
    assert page.count("### ") == 1
    record = json.loads(next(tmp_path.glob("reproduce-*/results.json")).read_text())
    untested = [study | {"statements": []} for study in record["studies"]]
    assert "### " not in papers_page({"T13": record | {"studies": untested}})


def test_of_records_with_as_many_seeds_the_page_has_that_of_the_defaults(tmp_path: Path) -> None:
    for name in ("-f", "-0", ""):
        directory = tmp_path / f"reproduce-T13-small{name}"
        directory.mkdir()
        settings = {"scale": "small", "steps": None, "arms": [], "seeds": 3, "change": [name] * bool(name)}
        record = {"experiment": {"id": "T13"}, "configuration": settings, "studies": []}
        (directory / "results.json").write_text(json.dumps(record))
    assert _records(str(tmp_path))["T13"]["configuration"]["change"] == []


def test_documents_that_a_seed_draws_are_prepared_for_every_seed() -> None:
    prepared: list[tuple[float, int]] = []

    def plan(share: float, seed: int) -> Any:
        values = {"data.train_share": share, "run.seed": seed, "run.name": "any"}
        config = with_fields(SENTENCES["declutr-small-small"](), values)
        seen = SimpleNamespace(data_sets={})
        return SimpleNamespace(config=config, prepare=lambda: prepared.append((share, seed)) or seen)

    prepare_once([plan(share, seed) for share in (1.0, 0.1) for seed in (0, 1)])
    assert prepared == [(1.0, 0), (0.1, 0), (0.1, 1)]
