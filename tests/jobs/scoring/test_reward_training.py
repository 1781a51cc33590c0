"""Training on rewards in one process: gradients against autograd, exact continuation, lost samples, and the export."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from jobs.scoring.reward.comparison import compare_temperatures
from jobs.scoring.reward.config import LeashSection, RewardConfig, RewardTemperatureSection, VerifierSection
from jobs.scoring.reward.job import export, train
from jobs.scoring.reward.plan import RewardPlan, make_plan
from jobs.scoring.reward.rollouts import Answer, Order, RolloutWorker
from jobs.scoring.reward.trainer import NoRewardError, RewardTrainer
from pipelines.text.tokenization import load_tokenizer
from tempnet.network import TempNet
from tempnet.reward import distinct_advantages, leave_one_out
from tests.jobs.scoring.generation_support import VOCABULARY, generate, make_model, read

PROMPTS = ["def", "the temperature of a token", "x", "class TempNet(nn.Module): a network"]
FUNCTIONS = """
def vowels(sample):
    text = sample["text"]
    if sample.get("is_bad") and len(text) % 2:
        raise ValueError("an odd length")
    return sum(letter in "aeiou" for letter in text) / max(1, len(text))
def never(sample): return float("nan")
"""
WEIGHT = 0.2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("reward-model"), "gpt2", 64, tempnet=False)


@pytest.fixture
def make(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes a plan; its verifier is a function of this module's `FUNCTIONS`."""
    (tmp_path / "own_rewards.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    prompts = tmp_path / "prompts.jsonl"

    def plan(verifier: str = "own_rewards:vowels", answers: Sequence[str] = PROMPTS, **changes: Any) -> RewardPlan:
        lines = [
            {"prompt": prompt, "id": f"p{i}", "is_bad": i == 1, "answer": answer}
            for i, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True))
        ]
        prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
        temperature = {
            "hidden_size": 8,
            "num_prototypes": 4,
            "input": "both",
            "input_shift": "mean",
            "pooling": "parametric",
        }
        temperature |= changes.pop("temperature", {})
        fields = {
            "num_steps": 4,
            "prompts_per_step": 3,
            "group_size": 4,
            "max_new_tokens": 5,
            "checkpoint_every": 2,
            "leash": LeashSection(target_kl=0.5, num_base_batches=1),
            **changes,
        }
        return make_plan(
            RewardConfig(
                model=str(model),
                prompts=str(prompts),
                storage=str(tmp_path / "runs"),
                verifier=VerifierSection(name=verifier),
                temperature=RewardTemperatureSection(**temperature),  # type: ignore[arg-type]
                **fields,
            )
        )

    return plan


def trainer_of(plan: RewardPlan, worker: RolloutWorker) -> RewardTrainer:
    return RewardTrainer(plan, lambda orders: [worker.run(order) for order in orders])


class Watched(RolloutWorker):
    """A worker that remembers the texts of its last order, and their rewards."""

    def __init__(self, plan: RewardPlan) -> None:
        super().__init__(plan)
        sample, judge = self.sampler, self.panel.judge

        def keep(requests: Any) -> Any:
            self.requests, self.texts = requests, sample(requests)
            return self.texts

        def keep_judgement(samples: Any) -> Any:
            self.judgement = judge(samples)
            return self.judgement

        keep.set_temperature, keep.base = sample.set_temperature, sample.base  # type: ignore[attr-defined]
        self.sampler, self.panel.judge = keep, keep_judgement  # type: ignore[assignment, method-assign]


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
            prompt, new = worker.requests[i].ids, worker.texts[i].ids
            with torch.no_grad():
                out = base(torch.tensor([[*prompt, *new]]), output_hidden_states=True)
            part = slice(len(prompt) - 1, len(prompt) + len(new) - 1)
            logits = out.logits[0, part, :VOCABULARY]
            tau = network(logits, out.hidden_states[-1][0, part])
            torch.testing.assert_close(tau.float(), torch.tensor(worker.texts[i].tau), atol=1e-4, rtol=1e-4)
            log_p, log_base = (logits / tau[:, None]).log_softmax(-1), logits.log_softmax(-1)
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


@pytest.mark.parametrize("reward", ["each", "distinct"])
@pytest.mark.parametrize("reads", ["logits", "hidden", "both"])
def test_the_gradient_is_that_of_autograd(make: Any, model: Path, reward: str, reads: str) -> None:
    plan = make(reward=reward, prompts_at_a_time=3, temperature={"input": reads})
    worker, trainer = Watched(plan), trainer_of(plan, None)  # type: ignore[arg-type]
    weights = {name: value + 0.5 * torch.randn_like(value) for name, value in trainer.weights().items()}
    answer = worker.run(Order(step=3, places=tuple(plan.places_of_step(3)), temperature=weights, kl_weight=WEIGHT))
    trainer.network.load_state_dict(weights)
    expected = reference(worker, trainer.network, model, reward == "distinct")
    assert answer.sums["lost"] + answer.sums["texts"] == 12
    for name, value in answer.gradient.items():
        torch.testing.assert_close(value.double(), expected[name], atol=2e-5, rtol=2e-4, msg=name)
    worker.close()


def test_answers_depend_on_the_order_alone_and_not_on_the_batch(make: Any) -> None:
    one, three = make(), make(prompts_at_a_time=3)
    first, second = RolloutWorker(one), RolloutWorker(three)
    weights, places = trainer_of(one, first).weights(), tuple(one.places_of_step(0))
    whole = second.run(Order(step=0, places=places, temperature=weights, kl_weight=WEIGHT))
    parts = Answer()
    for place in reversed(places):
        first.run(Order(step=7, places=(place,), temperature=0.7))  # what a worker did before changes nothing
        parts.add(first.run(Order(step=0, places=(place,), temperature=weights, kl_weight=WEIGHT)))
    for name, value in whole.gradient.items():
        torch.testing.assert_close(parts.gradient[name], value, atol=1e-5, rtol=1e-4)
    assert parts.sums["reward"] == pytest.approx(whole.sums["reward"])
    assert parts.failures == whole.failures
    first.close()
    second.close()


def test_a_run_that_was_stopped_goes_on_exactly(make: Any, tmp_path: Path) -> None:
    plan = make(num_steps=5)
    worker = RolloutWorker(plan)
    whole = trainer_of(plan, worker)
    train(whole, str(tmp_path / "whole"), say=lambda line: None)

    class Stopped(Exception):
        pass

    def stop(figures: Any, step: int) -> None:
        if step == 3:  # a step after the checkpoint
            raise Stopped

    with pytest.raises(Stopped):
        train(trainer_of(plan, worker), str(tmp_path / "parts"), say=lambda line: None, log=stop)
    lines: list[str] = []
    resumed = trainer_of(plan, worker)
    train(resumed, str(tmp_path / "parts"), say=lines.append)
    assert lines[0] == "continues after step 2 of 5"
    assert resumed.history == whole.history
    assert resumed.base == whole.base
    for name, value in whole.weights().items():
        assert torch.equal(value, resumed.weights()[name]), name
    worker.close()


def test_a_damaged_checkpoint_is_named(make: Any, tmp_path: Path) -> None:
    plan = make()
    worker = RolloutWorker(plan)
    train(trainer_of(plan, worker), str(tmp_path / "run"), say=lambda line: None)
    file = tmp_path / "run" / "checkpoint.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"checkpoint.safetensors is damaged"):
        train(trainer_of(plan, worker), str(tmp_path / "run"), say=lambda line: None)
    worker.close()


def test_what_the_verifier_loses_is_counted_and_a_step_without_rewards_ends_the_run(make: Any, tmp_path: Path) -> None:
    plan = make()
    worker = RolloutWorker(plan)
    trainer = trainer_of(plan, worker)
    lines: list[str] = []
    train(trainer, str(tmp_path / "run"), say=lines.append)
    lost = sum(step["lost"] for step in trainer.history) + trainer.base["lost"]
    assert trainer.result()["failures"] == {"raised": lost}
    assert lost > 0
    assert "an odd length" in trainer.result()["first_failure"]
    assert any("LOST" in line for line in lines)
    worker.close()
    plan = make(verifier="own_rewards:never")
    worker = RolloutWorker(plan)
    with pytest.raises(NoRewardError, match=r"own_rewards:never gave no text of a step a reward, 12 were lost: nan"):
        trainer_of(plan, worker).measure_base()
    worker.close()


def test_the_target_is_the_divergence_of_success_and_the_reward_rises(make: Any, tmp_path: Path, model: Path) -> None:
    """Right is what the model says at τ = 0, so that lower temperatures are rewarded."""
    base, tokenizer = AutoModelForCausalLM.from_pretrained(model).eval(), load_tokenizer(str(model))
    plan = make(
        verifier="exact",
        answers=[
            tokenizer.decode(
                base.generate(tokenizer(prompt, return_tensors="pt").input_ids, do_sample=False, max_new_tokens=2)[0][
                    -2:
                ]
            )
            for prompt in PROMPTS
        ],
        num_steps=60,
        group_size=16,
        max_new_tokens=2,
        prompts_at_a_time=3,
        learning_rate=0.1,
        leash=LeashSection(num_base_batches=4, reset_steps=5.0),
        temperature={"input": "hidden", "hidden_size": 16, "num_prototypes": 8},
    )
    worker = RolloutWorker(plan)
    trainer = trainer_of(plan, worker)
    train(trainer, str(tmp_path / "run"))
    result = trainer.result() | compare_temperatures(trainer)
    assert result["target_kl"] == pytest.approx(-1.2 * math.log(trainer.base["reward"]))
    temperatures = result["temperatures"]
    # Which texts are drawn depends on the last digits of the computation: .6 to 1 was seen.
    assert temperatures["learned"]["reward"] > 0.5 > 0.2 > temperatures["one"]["reward"]
    assert temperatures["one"]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert temperatures["mean_shift"]["tau_deviation"] == pytest.approx(0.0, abs=1e-3)
    worker.close()
    export(trainer, str(tmp_path / "export"))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def\n")
    generate(tmp_path / "export", prompts, tmp_path / "texts.jsonl")
    record = read(tmp_path / "texts.jsonl")[0]
    ids = load_tokenizer(str(model))(record["prompt"] + record["text"]).input_ids
    base = AutoModelForCausalLM.from_pretrained(model).eval()
    hidden = base(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
    logits = base(torch.tensor([ids])).logits[0, :, :VOCABULARY]
    place = len(load_tokenizer(str(model))(record["prompt"]).input_ids) - 1
    assert record["tau"][0] == pytest.approx(trainer.network(logits, hidden)[place].item(), rel=1e-4)
