"""What temperatures could gain of a reward: no choice is judged by what it was made from, and nothing is measured twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from evaluation_support import write_lines
from scipy import stats

from jobs import calibrate
from jobs.engine.command_line import ending_in_one_line
from jobs.scoring.config import PoolSection
from jobs.scoring.headroom.config import RewardHeadroom
from jobs.scoring.headroom.rewards import MEASURED_FILE, Rewards, conclude, measure, plan_of, table
from jobs.scoring.reward.rollouts import work_here
from jobs.scoring.units import UnitStore
from jobs.scoring.verifiers.verifier import VerifierSection
from tests.jobs.scoring.generation_support import make_model

NAMES = ("1", "0.5", "phases 1 0.2", "entropy 0.2 1")
FACTS = {"mean_tokens": 8.0, "mean_entropy": 0.5, "measure": "reward"}


def rewards_of(means: dict[str, np.ndarray], noise: float = 0.0, seed: int = 0) -> Rewards:
    """Return halves of texts whose mean rewards are given ones, and noise of their own."""
    rng = np.random.default_rng(seed)
    halves = {name: [mean + noise * rng.standard_normal(len(mean)) for _ in (0, 1)] for name, mean in means.items()}
    return {name: [dict(enumerate(half.tolist())) for half in pair] for name, pair in halves.items()}


def test_gains_are_those_of_what_the_other_prompts_choose_with_students_interval() -> None:
    rng = np.random.default_rng(1)
    prompts = rng.uniform(0.2, 0.8, 20)
    lead = rng.normal(0.1, 0.05, 20)
    means = {"1": prompts, "0.5": prompts + 0.02, "phases 1 0.2": prompts + 0.02 + lead, "entropy 0.2 1": prompts - 0.1}
    values = conclude(rewards_of(means), FACTS, least_gain=0.01)
    rows = values["rows"]
    assert rows["constant"]["gain"]["mean"] == pytest.approx(0.02)
    half_width = stats.t.ppf(0.975, 19) * stats.sem(lead)
    for name in ("phases", "token"):
        assert rows[name]["gain"] == pytest.approx({"mean": lead.mean(), "half_width": half_width})
        assert rows[name]["chosen"] == "phases 1 0.2"
    assert rows["entropy"]["chosen"] == "0.5"  # the best constant is among the rules
    assert values["verdict"] == "worth it"


def test_noise_is_not_taken_for_a_gain() -> None:
    """The best of many by chance would lead by more than a standard deviation."""
    gains: dict[str, list[float]] = {"token": [], "prompt": []}
    for seed in range(40):
        means = {name: np.full(30, 0.5) for name in (*NAMES, *(f"0.{digit}" for digit in range(10, 20)))}
        values = conclude(rewards_of(means, noise=0.1, seed=seed), FACTS, least_gain=0.0)
        for name, found in gains.items():
            found.append(values["rows"][name]["gain"]["mean"])
    for found in gains.values():
        assert abs(np.mean(found)) < 3 * stats.sem(found)


def test_prompts_that_want_different_constants_are_worth_one_each() -> None:
    wants = np.arange(20) % 4 < 2
    means = {"1": np.where(wants, 0.9, 0.1), "0.5": np.where(wants, 0.1, 0.9)}
    values = conclude(rewards_of(means), FACTS, least_gain=0.01)
    assert values["rows"]["prompt"]["gain"]["mean"] == pytest.approx(0.4)
    assert values["rows"]["token"]["gain"]["mean"] == pytest.approx(0.0)
    assert values["verdict"] == "worth it"


def test_prompts_whose_texts_tell_no_constants_apart_get_the_one_that_is_best_for_all() -> None:
    """Most prompts are too hard for any text to be right; τ = 1, the first that is tried, is no choice for them."""
    rng = np.random.default_rng(0)
    shares = {"1": 0.0, "0.5": 0.1, "0.2": 0.05}
    rewards = {
        name: [dict(enumerate((rng.binomial(8, share, 1000) / 8).tolist())) for _ in (0, 1)]
        for name, share in shares.items()
    }
    gain = conclude(rewards, FACTS, least_gain=0.01)["rows"]["prompt"]["gain"]
    # A prompt with a right text at .2 and none at .5 is the only one that gets the worse one.
    worse = (1 - 0.95**8) * 0.9**8
    assert -0.05 * 3 * worse < gain["mean"] < 0.0


def test_temperatures_are_compared_on_the_prompts_that_all_of_them_have() -> None:
    rewards = rewards_of({name: np.random.default_rng(place).uniform(size=12) for place, name in enumerate(NAMES)})
    del rewards["0.5"][1][3]
    found = conclude(rewards, FACTS, least_gain=0.01)
    for halves in rewards.values():
        for half in halves:
            half.pop(3, None)
    assert found == conclude(rewards, FACTS, least_gain=0.01)
    assert found["num_prompts"] == 11


def test_a_rule_is_measured_once_and_its_temperatures_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "length_rewards.py").write_text(
        "def by_length(sample): return min(1.0, len(sample['text']) / 40)\nnever = len\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    prompts = write_lines(tmp_path / "prompts.jsonl", [{"prompt": prompt} for prompt in ("def", "x", "class", "for")])
    config = RewardHeadroom(
        model=str(make_model(tmp_path / "model", "gpt2", 64, tempnet=False)),
        prompts=prompts,
        verifier=VerifierSection(name="length_rewards:by_length"),
        texts_per_prompt=4,
        max_new_tokens=4,
        prompts_at_a_time=4,
    )
    plan, store, orders = plan_of(config), UnitStore(str(tmp_path / "out")), []
    store.claim({})
    with work_here(plan) as work:
        found = measure(plan, lambda new: (orders.extend(new), work(new))[1], store)
        answer = work([order for order in orders if getattr(order.temperature, "kind", "") == "phases"][:1])[0]
        rule = next(order.temperature for order in orders if getattr(order.temperature, "kind", "") == "phases")
        assert answer.figures()["tau_mean"] == pytest.approx(sum(rule.values) / 2, abs=0.26)  # 4 tokens, or fewer
        assert 0.0 < found["mean_entropy"] < np.log(304)
        again = measure(plan, lambda new: pytest.fail("measured again"), store)
    assert again["rewards"] == found["rewards"]
    assert len(found["rewards"]) == 35
    values = store.read_json(MEASURED_FILE) or {}
    store.write({MEASURED_FILE: values | {"failures": {"raised": 2}, "first_failure": "oh"}})
    again = measure(plan, lambda new: pytest.fail("measured again"), store)
    own = replace(config, prompts="my prompts.jsonl", trust_remote_code=True, workers=PoolSection(num_workers=3))
    shown = table(conclude(again["rewards"], again, least_gain=0.01), own).splitlines()
    assert shown[-2] == "LOST 2 texts to the verifier: raised 2; the first: oh"
    options = "--verifier.name length_rewards:by_length --max-new-tokens 4 --prompts-at-a-time 4 --trust-remote-code"
    command = f"jobs.train_reward --model {config.model} --prompts 'my prompts.jsonl' {options} --workers.num-workers 3"
    assert shown[-1].endswith(command)
    wider = plan_of(replace(config, workers=PoolSection(num_workers=3, cpus_per_worker=2.0))).record
    assert {name for name in wider if wider[name] != plan.record[name]} == {"prompts_per_step"}
    lost = plan_of(replace(config, verifier=VerifierSection(name="length_rewards:never")))
    with work_here(lost) as work, pytest.raises(SystemExit, match="1"), ending_in_one_line():
        measure(lost, work, UnitStore(str(tmp_path / "lost")))
    *_, said = capsys.readouterr().err.splitlines()
    assert said.startswith("error: verifier.name = length_rewards:never gave no text of a step a reward")
    options = f"--model {config.model} --prompts {prompts} --max-new-tokens 4 --verifier.name no-such".split()
    with pytest.raises(SystemExit):
        calibrate.main(["headroom", *options])
    assert "verifier.name = 'no-such' is none of exact, gsm8k and unit-tests" in capsys.readouterr().err
