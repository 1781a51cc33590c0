"""The runs of an experiment: their order, their data, changes to them, and what is refused before they start."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from jobs.engine.config import TrackingSection
from jobs.engine.identity import flatten, with_fields
from jobs.reproduce import main
from jobs.scoring.config import LanguageModelPool
from jobs.studies.reproduction import launch
from jobs.studies.reproduction.config import ReproduceConfig
from jobs.studies.reproduction.cost import cost_of
from jobs.studies.reproduction.plan import Reproduction, make_reproduction
from jobs.studies.reproduction.runs import list_needed_paths
from jobs.studies.reproduction.scoring import FinishedRun, History, Place
from jobs.studies.trials.trial import Outcomes, Rounds
from jobs.tasks.classifier.config import ClassifierConfig
from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.presets.language_models import PRESETS
from jobs.tasks.sentence_encoder.config import SentenceConfig


def make(name: str, tmp_path: Path, **options: Any) -> Reproduction:
    """Returns the plan of an experiment that stores its runs below `tmp_path` and logs nothing to MLflow."""
    tracking = TrackingSection(enabled=False)
    return make_reproduction(ReproduceConfig(experiment=name, storage=str(tmp_path), tracking=tracking, **options))


def test_bases_are_run_first_and_runs_that_start_from_a_failed_base_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[list[str]] = []
    work = make("T15", tmp_path, seeds=2)
    runs = work.runs
    bad = next(run.name for run in runs.values() if run.arm.name == "base" and run.replicate.seed == 1)

    def trials(rounds: Rounds, **options: Any) -> Outcomes:
        outcomes, wanted = Outcomes(finished={}, failed={}), next(rounds)
        while True:
            names = [trial.name for trial in wanted]
            batches.append(names)
            finished = {
                name: {"validation": {"tau_mean": 5.0 - runs[name].config.temperature.rho, "cross_entropy_tau": 5.0}}  # type: ignore[attr-defined]
                if runs[name].after
                else {"validation": {"tau_mean": 1.0, "cross_entropy_tau": 5.0}}
                for name in names
                if name != bad
            }
            outcomes = Outcomes(
                finished={**outcomes.finished, **finished},
                failed={**outcomes.failed, **({bad: "the disk is gone"} if bad in names else {})},
            )
            try:
                wanted = rounds.send(outcomes)
            except StopIteration:
                return outcomes

    class NoData:
        data_cpus = 0.0

    monkeypatch.setattr(launch, "run_trials", trials)
    monkeypatch.setattr(launch, "start_ray", lambda: None)
    monkeypatch.setattr(launch, "_check", lambda work: [NoData()])
    monkeypatch.setattr(launch, "prepare_once", lambda plans: {})
    results = launch.run_reproduction(work)
    assert [len(batch) for batch in batches] == [2, 6]
    assert len(results.failed) == 7
    assert results.failed[bad] == "the disk is gone"
    assert all(
        reason == f"{bad}, the run that it starts from, failed"
        for name, reason in results.failed.items()
        if name != bad
    )
    assert re.search(r"ρ = 1\.5 \(paper: ρ = 8\) +\| +1\.65 \| +56\.66 \| +3\.500 \|", results.table)
    assert (Path(work.config.run.directory) / "results.json").is_file()


def test_the_progress_shows_no_perplexity_of_a_clip(tmp_path: Path) -> None:
    work = make("T18", tmp_path, seeds=1)
    measures = launch.find_measures(work)
    assert measures.keys() == work.runs.keys()
    for run, shown in measures.items():
        titles = {measure.title for measure in shown}
        is_text = isinstance(work.runs[run].config, LanguageModelConfig)
        assert ("mean recall, %" in titles, "perplexity" in titles) == (not is_text, is_text), run


def test_settings_that_are_not_the_defaults_have_a_directory_of_their_own(tmp_path: Path) -> None:
    def directory(**options: Any) -> str:
        return Path(ReproduceConfig(experiment="T15", storage=str(tmp_path), **options).run.directory).name

    assert directory() == directory(seeds=3, num_concurrent=1) == "reproduce-T15-small"
    others = [{"seeds": 1}, {"seeds": 1, "steps": 6}, {"change": ("temperature.gamma=0.2",)}, {"arms": ("ρ = 2",)}]
    assert len({directory(), *(directory(**options) for options in others)}) == 5
    assert directory(seeds=1, name="mine") == "mine"


@pytest.mark.parametrize(("name", "path"), [("T10", "/models/llama-7b"), ("DeCLUTR", "/models/roberta")])
def test_a_users_own_weights_cost_what_the_presets_do(name: str, path: str, tmp_path: Path) -> None:
    usual = make(name, tmp_path, scale="full")
    own = make(name, tmp_path, scale="full", change=(f"model.path={path}",))
    costs = [cost_of([run.config for run in work.runs.values()]) for work in (usual, own)]
    assert costs[1].hours == pytest.approx(costs[0].hours)
    assert "GPU-hours" in own.describe()


def test_the_history_of_a_run_needs_no_mlflow() -> None:
    scores = [{"step": step, "scores": {"loss": 10.0 - step}} for step in (1, 2, 3, 4)]
    config = PRESETS["gpt2-scratch-small"]()
    config = with_fields(config, {"run.num_steps": 4, "run.name": "a"})
    run = FinishedRun(config=config, outcome={"validations": scores, "mlflow_run_id": None})
    place = Place(directory="", data={}, workers=LanguageModelPool())
    assert History(score="loss", num_points=2).scores([run], place) == {"a": {"loss@1": 8.0, "loss@2": 6.0}}


def test_steps_changes_and_arms(tmp_path: Path) -> None:
    options = {"steps": 6, "change": ("optimizer.beta1=0.8", "data.train=elsewhere"), "arms": ("ρ = 2.5",), "seeds": 1}
    work = make("T15", tmp_path, **options)
    assert [run.arm.name for run in work.runs.values()] == ["base", "ρ = 2.5"]
    for run in work.runs.values():
        config = run.config
        assert isinstance(config, LanguageModelConfig)
        assert (config.run.num_steps, config.optimizer.beta1, config.data.train) == (6, 0.8, "elsewhere")
    assert "elsewhere  (MISSING)" in work.describe()


def test_a_change_applies_to_the_runs_that_have_the_field(tmp_path: Path) -> None:
    """Encoders have no field `data.directory`, but the classifiers that start from them do."""
    work = make("TripleEntropy", tmp_path, seeds=1, change=("data.directory=elsewhere", "optimizer.beta1=0.8"))
    kinds = {type(run.config): run.config for run in work.runs.values()}
    assert kinds.keys() == {SentenceConfig, ClassifierConfig}
    assert flatten(kinds[ClassifierConfig])["data.directory"] == "elsewhere"
    assert {config.optimizer.beta1 for config in kinds.values()} == {0.8}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["t44"], "experiment 't44' is unknown: did you mean T4"),
        (["decluter"], "did you mean DeCLUTR"),
        (["T4", "--seeds", "0"], "seeds = 0 must be at least 1"),
        (["T4", "--steps", "0"], "steps = 0 must be at least 1"),
        (["T4", "--arms", "dro_newtn"], "arms: 'dro_newtn' is unknown: did you mean 'dro_newton'"),
        (["T4", "--change", "temperature.tau_mx=1"], "there is no field temperature.tau_mx"),
        (["T4", "--change", "optimizer.beta1=2"], "optimizer.beta1 = 2 must lie in [0, 1]"),
        (["T4", "--change", "run.num_steps=abc"], "run.num_steps = 'abc' must be int"),
        (["T4", "--change", "run.num_steps=1.5"], "run.num_steps = 1.5 must be int"),
        (["T4", "--change", "temperature.stop_gradient=false"], "temperature.stop_gradient = 'false' must be bool"),
        (["T4", "--change", "workers.precision=fp16"], "workers.precision = 'fp16' must be 'auto' or 'fp32' or 'bf16'"),
        (
            ["T4", "--change", "optimizer.learning_rate_base=fast"],
            "optimizer.learning_rate_base = 'fast' must be float",
        ),
        (["T4", "--change", "model.hidden_size=None"], "model.hidden_size = None must be int"),
        (["T4", "--change", "run.seed=5"], "change: run.seed cannot be changed"),
        (["T4", "--change", "run.storage=/elsewhere"], "use --storage"),
        (["T4", "--data", "senteval=x"], "data: T4 is not scored on 'senteval': it is scored on no data"),
        (["T13", "--steps", "4"], "T13 trains nothing"),
        (["DeCLUTR", "--data", "sentevl=x"], "it is scored on senteval"),
    ],
)
def test_wrong_values_are_refused_before_anything_starts(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--storage", str(tmp_path), "--tracking.no-enabled", "--dry-run"])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_missing_data_are_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, message in (("T4", "data.train: "), ("DeCLUTR", "senteval = 'senteval/data/downstream' does not exist")):
        with pytest.raises(SystemExit):
            main([name, "--storage", str(tmp_path), "--tracking.no-enabled"])
        assert message in capsys.readouterr().err


def test_missing_data_of_runs_that_start_later_are_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The encoder could be trained, but the classifiers that start from it would then find no data."""
    monkeypatch.setattr(launch, "find_planner", lambda config: lambda config: None)
    work = make("TripleEntropy", tmp_path, seeds=1, change=("data.directory=elsewhere",))
    for name in ("data.train", "data.validation", "data.tokenizer"):
        for path in list_needed_paths([run.config for run in work.runs.values()]).get(name, []):
            (tmp_path / path).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        FileNotFoundError, match=r"data\.directory = 'elsewhere' does not exist: use --change data\.directory="
    ):
        launch.run_reproduction(work)
