"""Training on rewards in one process: gradients against autograd, exact continuation, lost samples, held-out prompts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from evaluation_support import write_lines
from safetensors.torch import load_file
from scipy import stats
from torch import Tensor
from transformers import AutoModelForCausalLM

from jobs import train_reward
from jobs.scoring.generation.formats import Prompt
from jobs.scoring.generation.job import prompt_text
from jobs.scoring.reward.config import LeashSection, RewardConfig, RewardTemperatureSection
from jobs.scoring.reward.job import RewardTrainer, compare_temperatures, export, table, train, verdict
from jobs.scoring.reward.plan import CONSTANTS, ROUNDS, RewardPlan, _hold_out, make_plan
from jobs.scoring.reward.rollouts import Answer, Order, RolloutWorker, work_here
from jobs.scoring.units import NoRewardError
from jobs.scoring.verifiers.verifier import VerifierSection
from pipelines.text.tokenization import load_tokenizer
from tempnet.intervals import Interval
from tempnet.network import TempNet
from tempnet.reward import distinct_advantages, leave_one_out
from tests.jobs.scoring.generation_support import VOCABULARY, generate, make_model, read

PROMPTS = ["def", "the temperature of a token", "x", "class TempNet(nn.Module): a network"]
HELD_OUT = ["for", "a base model", "return"]
FUNCTIONS = """
def vowels(sample):
    text = sample["text"]
    if sample.get("is_bad") and len(text) % 2:
        raise ValueError("an odd length")
    return sum(letter in "aeiou" for letter in text) / max(1, len(text))
def likely_or_not(sample):
    is_likely = sample["text"].strip() == sample["answer"].strip()
    return float(is_likely == (sample["prompt"] in ("def", "x")))
def never(sample): return float("nan")
"""
WEIGHT, REFERENCE = 0.2, 0.7


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("reward-model"), "gpt2", 64, tempnet=False)


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("code")
    (directory / "own_rewards.py").write_text(FUNCTIONS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        yield directory


def plan_of(
    model: Path, place: Path, verifier: str = "own_rewards:vowels", answers: Sequence[str] = PROMPTS, **changes: Any
) -> RewardPlan:
    lines = [
        {"prompt": prompt, "id": f"p{i}", "is_bad": i == 1, "answer": answer}
        for i, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True))
    ]
    temperature: dict[str, Any] = {"hidden_size": 8, "num_prototypes": 4, **changes.pop("temperature", {})}
    fields: dict[str, Any] = {
        "num_steps": 4,
        "prompts_per_step": 3,
        "group_size": 4,
        "max_new_tokens": 5,
        "checkpoint_every": 2,
        "leash": LeashSection(target_kl=0.5),
        **changes,
    }
    return make_plan(
        RewardConfig(
            model=str(model),
            prompts=write_lines(place / "prompts.jsonl", lines),
            storage=str(place / "runs"),
            verifier=VerifierSection(name=verifier),
            temperature=RewardTemperatureSection(**temperature),
            **fields,
        )
    )


@pytest.fixture
def make(model: Path, code: Path, tmp_path: Path) -> Any:
    parts = {"input": "both", "input_shift": "mean", "pooling": "parametric"}

    def plan(**changes: Any) -> RewardPlan:
        return plan_of(model, tmp_path, **{**changes, "temperature": parts | changes.get("temperature", {})})

    return plan


@pytest.fixture
def begin(make: Any) -> Iterator[Any]:
    with ExitStack() as workers:

        def trainer(plan: RewardPlan | None = None, **changes: Any) -> RewardTrainer:
            plan = plan or make(**changes)
            return RewardTrainer(plan, workers.enter_context(work_here(plan)))

        yield trainer


def be_silent(line: str) -> None:
    pass


class Watched(RolloutWorker):
    """A worker that remembers the texts of its last order, and their rewards."""

    def __init__(self, plan: RewardPlan) -> None:
        super().__init__(plan)
        judge = self.panel.judge

        def keep(samples: Any) -> Any:
            self.judgement = judge(samples)
            return self.judgement

        self.panel.judge = keep  # type: ignore[method-assign]

    def _read(self, prompts: Any, texts: Any) -> Any:
        self.prompts, self.texts = prompts, texts
        return super()._read(prompts, texts)


def reference(worker: Watched, network: TempNet, model: Path, is_distinct: bool) -> dict[str, Tensor]:
    """Return the gradient of an order in float64 by autograd, text by text, from the logits of the whole model."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    network = network.double().train()
    size, loss = 4, torch.zeros((), dtype=torch.float64)
    for start in range(0, len(worker.texts), size):
        places = [i for i in range(start, start + size) if worker.judgement.rewards[i] is not None]
        rewards = torch.tensor([worker.judgement.rewards[i] for i in places], dtype=torch.float64)
        answers = [" ".join(worker.texts[i].text.split()) for i in places]
        advantages = distinct_advantages(rewards, answers) if is_distinct else leave_one_out(rewards)
        kls, log_probs = [], []
        for i in places:
            prompt, new = worker.prompts[i], worker.texts[i].ids
            with torch.no_grad():
                out = base(torch.tensor([[*prompt, *new]]), output_hidden_states=True)
            part = slice(len(prompt) - 1, len(prompt) + len(new) - 1)
            logits = out.logits[0, part, :VOCABULARY]
            tau = network(logits, out.hidden_states[-1][0, part])
            torch.testing.assert_close(tau.float(), torch.tensor(worker.texts[i].tau), atol=1e-4, rtol=1e-4)
            log_p, log_base = (logits / tau[:, None]).log_softmax(-1), (logits / REFERENCE).log_softmax(-1)
            kls.append((log_p.exp() * (log_p - log_base)).sum(-1))
            log_probs.append(log_p.gather(-1, torch.tensor(new)[:, None]).squeeze(-1))
        for own, (kl, log_prob) in enumerate(zip(kls, log_probs, strict=True)):
            for t in range(len(kl)):
                later = kl[t + 1 :].sum().detach()
                others = [other[t + 1 :].sum().detach() for place, other in enumerate(kls) if place != own]
                charge = later - (sum(others) / len(others) if others else later)
                loss = loss - (advantages[own] - WEIGHT * charge) * log_prob[t] + WEIGHT * kl[t]
    names, parameters = zip(*network.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


@pytest.mark.parametrize(("reward", "reads"), [("each", "both"), ("distinct", "hidden")])
def test_the_gradient_is_that_of_autograd(make: Any, model: Path, reward: str, reads: str) -> None:
    plan = make(reward=reward, prompts_at_a_time=3, temperature={"input": reads})
    worker, trainer = Watched(plan), RewardTrainer(plan, lambda orders: [])
    weights = {name: value + 0.5 * torch.randn_like(value) for name, value in trainer.weights().items()}
    places = tuple(plan.places_of_step(3))
    order = Order(step=3, places=places, temperature=weights, kl_weight=WEIGHT, reference=REFERENCE)
    answer = worker.run(order)
    trainer.network.load_state_dict(weights)
    expected = reference(worker, trainer.network, model, reward == "distinct")
    assert answer.failures.total() + answer.total("texts") == 12
    for name, value in answer.gradient.items():
        torch.testing.assert_close(value.double(), expected[name], atol=2e-5, rtol=2e-4, msg=name)
    worker.close()


def test_answers_depend_on_the_order_alone_and_not_on_the_batch(make: Any) -> None:
    one, three = make(), make(prompts_at_a_time=3)
    first, second = RolloutWorker(one), RolloutWorker(three)
    weights, places = RewardTrainer(one, lambda orders: []).weights(), tuple(one.places_of_step(0))
    whole = second.run(Order(step=0, places=places, temperature=weights, kl_weight=WEIGHT))
    parts = Answer()
    for place in reversed(places):
        first.run(Order(step=7, places=(place,), temperature=0.7))  # what a worker did before changes nothing
        parts.add(first.run(Order(step=0, places=(place,), temperature=weights, kl_weight=WEIGHT)))
    for name, value in whole.gradient.items():
        torch.testing.assert_close(parts.gradient[name], value, atol=1e-5, rtol=1e-4)
    assert parts.figures() == pytest.approx(whole.figures(), rel=1e-4, abs=1e-6)
    assert parts.failures == whole.failures
    first.close()
    second.close()


def test_a_run_that_was_stopped_twice_goes_on_exactly(make: Any, begin: Any, tmp_path: Path) -> None:
    plan, run = make(num_steps=5), tmp_path / "parts"
    whole = begin(plan)
    train(whole, str(tmp_path / "whole"), say=be_silent)

    for last in (1, 3):  # before the first checkpoint, and a step after it

        def stop(figures: Any, step: int, last: int = last) -> None:
            if step == last:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            train(begin(plan), str(run), say=be_silent, log=stop)
    lines: list[str] = []
    resumed = begin(plan)
    train(resumed, str(run), say=lines.append)
    assert lines[0] == "continues after step 2 of 5"
    assert resumed.history == whole.history
    assert (resumed.constants, resumed.best_constant) == (whole.constants, whole.best_constant)
    assert list(compare_temperatures(resumed).items()) == list(compare_temperatures(whole).items())
    ours, theirs = (load_file(tmp_path / name / "checkpoint.safetensors") for name in ("parts", "whole"))
    assert ours.keys() == theirs.keys()
    assert any(name.startswith("exp_avg") for name in theirs)
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name
    file = run / "checkpoint.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"checkpoint.safetensors is damaged"):
        train(begin(plan), str(run), say=be_silent)


def test_what_the_verifier_loses_is_counted_and_a_step_without_rewards_ends_the_run(begin: Any, tmp_path: Path) -> None:
    trainer = begin()
    lines: list[str] = []
    train(trainer, str(tmp_path / "run"), say=lines.append)
    lost = sum(step["lost"] for step in [*trainer.history, *trainer.constants.values()])
    assert trainer.result()["failures"] == {"raised": lost}
    assert lost > 0
    assert "an odd length" in trainer.result()["first_failure"]
    assert any("LOST" in line for line in lines)
    with pytest.raises(NoRewardError, match=r"own_rewards:never gave no text of a step a reward, 12 were lost: nan"):
        begin(verifier="own_rewards:never").begin()


def test_a_constant_is_the_start_and_temperatures_earn_more_where_it_cannot(
    begin: Any, tmp_path: Path, model: Path
) -> None:
    """Right is what the model says at τ = 0 for two prompts, and any text but that for the two others."""
    base, tokenizer = AutoModelForCausalLM.from_pretrained(model).eval(), load_tokenizer(str(model))
    prompts = [torch.tensor([prompt_text((prompt,), [], tokenizer, False)[1]]) for prompt in PROMPTS]
    greedy = [tokenizer.decode(base.generate(ids, do_sample=False, max_new_tokens=1)[0][-1:]) for ids in prompts]
    trainer = begin(
        verifier="own_rewards:likely_or_not",
        answers=greedy,
        num_steps=120,
        group_size=16,
        max_new_tokens=1,
        prompts_at_a_time=3,
        learning_rate=0.05,
        leash=LeashSection(reset_steps=10.0),
        temperature={"input": "hidden", "hidden_size": 16, "num_prototypes": 8},
    )
    lines: list[str] = []
    train(trainer, str(tmp_path / "run"), say=lines.append)
    # All constants earn a half, and where they cannot be told apart the texts that vary most are those to learn from.
    assert trainer.reference == 1.0
    assert trainer.result()["target_kl"] == pytest.approx(-4.0 * math.log(trainer.constants[1.0]["reward"]))
    assert f"best constant τ = {trainer.best_constant:g}" in lines[0]
    start = trainer.passed[0]
    result = trainer.result() | compare_temperatures(trainer)
    temperatures = result["temperatures"]
    # Which texts are drawn depends on the last digits of the computation: leads of .10 and .14 were seen, of 512 texts.
    assert temperatures["learned"]["reward"] > temperatures["constant"]["reward"] + 0.04
    assert result["gains"]["shuffled"]["mean"] > 0.04
    assert temperatures["one"]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert temperatures["mean_shift"]["tau_deviation"] == pytest.approx(0.0, abs=1e-3)
    assert temperatures["shuffled"]["tau_mean"] == pytest.approx(temperatures["mean_shift"]["tau_mean"], rel=0.1)
    assert result["best_goal"] in (0, *trainer.plan.goal_steps)
    export(trainer, result | {"export": str(tmp_path / "export")})
    card = (tmp_path / "export" / "README.md").read_text()
    assert f"{result['verdict']}: {100 * result['gains']['constant']['mean']:.1f} ± " in card
    (tmp_path / "prompts.txt").write_text("def\n")
    generate(tmp_path / "export", tmp_path / "prompts.txt", tmp_path / "texts.jsonl")
    record = read(tmp_path / "texts.jsonl")[0]
    (ids,) = [question.ids for question in trainer.plan.questions if question.prompt.turns == ("def",)]
    found = base(torch.tensor([ids]), output_hidden_states=True)
    inputs = (found.logits[0, -1:, :VOCABULARY], found.hidden_states[-1][0, -1:])
    assert record["tau"][0] == pytest.approx(trainer.network(*inputs).item(), rel=1e-4)
    trainer.network.load_state_dict(start)
    assert trainer.network(*inputs).item() == pytest.approx(trainer.best_constant, rel=1e-4)


def test_the_verdict_needs_an_interval_clear_of_0() -> None:
    clear, wide, unknown, below = (Interval(0.2, 0.1), Interval(0.2, 0.3), Interval(0.2, math.nan), Interval(-0.2, 0.1))
    found = [verdict(gain, is_start=False) for gain in (clear, wide, unknown, below)]
    assert found == ["better", "cannot be told", "cannot be told", "not better"]
    assert verdict(clear, is_start=True) == "not better"  # nothing was learned: the lead is that of the texts


@pytest.fixture(scope="module")
def measured(model: Path, code: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """Yield a run with held-out prompts: its outcome, and what it asked until the end of training and then."""
    place = tmp_path_factory.mktemp("measured")
    held_out = write_lines(place / "held-out.jsonl", [{"prompt": prompt} for prompt in HELD_OUT])
    plan = plan_of(model, place, num_steps=3, prompts_at_a_time=2, held_out_prompts=held_out)
    asked: list[tuple[Order, Answer]] = []

    with work_here(plan) as work:

        def run(orders: Sequence[Order]) -> list[Answer]:
            answers = work(orders)
            asked.extend(zip(orders, answers, strict=True))
            return answers

        trainer = RewardTrainer(plan, run)
        train(trainer, str(place / "run"), say=be_silent)
        number = len(asked)
        outcome = trainer.result() | compare_temperatures(trainer)
        parts = {"training": asked[:number], "comparison": asked[number:]}
        yield SimpleNamespace(plan=plan, trainer=trainer, outcome=outcome, **parts)


def test_held_out_prompts_are_measured_beside_their_rivals_and_never_learned_from(measured: SimpleNamespace) -> None:
    """The reference adds up rewards prompt by prompt, and takes the interval of their differences from SciPy."""
    assert {place for order, _ in measured.training for place, _ in order.places} <= set(range(len(PROMPTS)))
    asked = [(order, answer) for order, answer in measured.comparison if order.places[0][0] >= len(PROMPTS)]
    outcome, rewards = measured.outcome, dict[str, dict[int, list[float]]]()
    for order, answer in asked:
        key = f"{order.temperature:.3f}" if isinstance(order.temperature, float) else type(order.temperature).__name__
        for group in answer.groups:
            assert measured.plan.asked[group.place].prompt.turns[0] in HELD_OUT
            rewards.setdefault(key, {}).setdefault(group.place, []).append(group.reward / group.texts)
    shift, best = (outcome["temperatures"][name]["tau_mean"] for name in ("mean_shift", "constant"))
    keys = {"mean_shift": f"{shift:.3f}", "shuffled": "TemperatureRule", "constant": f"{best:.3f}", "one": "1.000"}
    own = np.array([np.mean(rewards["dict"][place]) for place in sorted(rewards["dict"])])
    for name, key in keys.items():
        gains = own - np.array([np.mean(rewards[key][place]) for place in sorted(rewards[key])])
        half_width = stats.t.ppf(0.975, len(gains) - 1) * stats.sem(gains)
        found = outcome["gains"][name]
        assert (found["mean"], found["half_width"]) == pytest.approx((gains.mean(), half_width)), name
    assert outcome["temperatures"]["learned"]["reward"] == pytest.approx(own.mean())
    assert (outcome["num_prompts"], outcome["prompts"]) == (len(HELD_OUT), "held-out")
    shown = table(outcome | {"num_too_long": 0})
    assert f"{outcome['verdict']}: {100 * outcome['gains']['constant']['mean']:.1f} ±" in shown


def test_the_best_constant_is_that_of_the_last_round(measured: SimpleNamespace) -> None:
    rewards = dict[float, list[Answer]]()
    for order, answer in measured.training:
        if order.step <= -1001:
            assert isinstance(order.temperature, float)
            rewards.setdefault(order.temperature, []).append(answer)
    assert rewards.keys() == set(CONSTANTS)

    def mean(constant: float) -> float:
        whole = Answer()
        for answer in rewards[constant]:
            whole.add(answer)
        return whole.mean("reward")

    most = max(map(len, rewards.values()))
    left = [constant for constant in CONSTANTS if len(rewards[constant]) == most]
    assert len(left) == ROUNDS[-1][0]
    best = measured.trainer.best_constant
    assert best == max(left, key=mean)
    assert mean(best) == pytest.approx(measured.trainer.constants[best]["reward"])


def test_a_prompt_that_comes_twice_is_not_both_held_out_and_learned_from() -> None:
    config = RewardConfig(model="m", prompts="p", verifier=VerifierSection(name="exact"), held_out_share=0.4)
    prompts = [Prompt(id=number, turns=(f"question {number % 5}",)) for number in range(20)]
    learned, held_out = _hold_out(config, prompts)
    assert len({prompt.turns for prompt in held_out}) == 2
    assert not {prompt.turns for prompt in learned} & {prompt.turns for prompt in held_out}
    assert sorted(prompt.id for prompt in (*learned, *held_out)) == list(range(20))


def test_a_share_of_the_prompts_is_held_out_where_no_file_is(model: Path, code: Path, tmp_path: Path) -> None:
    plan = plan_of(model, tmp_path, held_out_share=0.5)
    assert {one.prompt.turns[0] for one in plan.asked} == set(PROMPTS)
    assert len(plan.questions) == len(plan.held_out) == 2
    assert not plan_of(model, tmp_path, held_out_share=0.4).held_out  # a single prompt has no interval


def test_a_dry_run_counts_what_a_run_asks_for_and_starts_nothing(
    measured: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = measured.plan.config
    arguments = [
        "--model", config.model, "--prompts", config.prompts, "--held-out-prompts", config.held_out_prompts,
        "--verifier.name", config.verifier.name, "--storage", str(tmp_path / "elsewhere"), "--num-steps", "3",
        "--prompts-per-step", "3", "--group-size", "4", "--prompts-at-a-time", "2", "--max-new-tokens", "5",
        "--leash.target-kl", "0.5", "--temperature.hidden-size", "8",
        "--temperature.num-prototypes", "4", "--dry-run",
    ]  # fmt: skip
    assert train_reward.main(arguments) == 0
    shown = capsys.readouterr().out
    assert not (tmp_path / "elsewhere").exists()
    orders = [order for order, _ in measured.training + measured.comparison]
    num_texts = sum(len(order.places) for order in orders) * config.group_size
    line = re.search(r"^texts +([\d,]+) to learn from, ([\d,]+) to choose", shown, re.MULTILINE)
    assert line is not None
    numbers = [int(number.replace(",", "")) for number in line.groups()]
    assert numbers == [3 * 3 * 4, num_texts - 3 * 3 * 4]
    assert re.search(rf"^tokens +at most {num_texts * 5:,} new ones", shown, re.MULTILINE)
    assert f"{AutoModelForCausalLM.from_pretrained(config.model).num_parameters():,} parameters in float32" in shown
    num_parameters = sum(parameter.numel() for parameter in measured.trainer.network.parameters())
    assert f"{num_parameters:,} parameters, reads hidden" in shown
