"""The training loop: order texts, add up the answers, make one optimizer step, let λ follow; nothing here knows of Ray.

The state after a step is the weights of the TempNet, the moments of Adam, the controller of λ and the figures of all steps
(`jobs.scoring.reward.checkpoint`). Everything random is drawn by the workers from keys, so that a run that goes on from a
checkpoint is the run that was never stopped.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from jobs.scoring.reward.plan import RewardPlan, make_network
from jobs.scoring.reward.rollouts import Answer, Order
from tempnet.network import TempNet
from tempnet.reward_leash import KLController, divergence_of_success

RunOrders = Callable[[Sequence[Order]], list[Answer]]
"""Carries out orders, and returns their answers in the same order."""
Figures = dict[str, float]

# AdamW's β₂: a step's gradient is so noisy that its square is best averaged over tens of steps.
_BETAS = (0.9, 0.98)
# The step of the texts for held-out prompts, which no other texts have.
_HELD_OUT_STEP = -3001


class NoRewardError(RuntimeError):
    """No text of a step got a reward: the verifier fails for all of them, and nothing can be learned."""


class RewardTrainer:
    """The TempNet, its optimizer and the controller of λ.

    Args:
        plan: the plan of the run.
        run_orders: carries out orders, in this process or in others.
    """

    def __init__(self, plan: RewardPlan, run_orders: RunOrders) -> None:
        self.plan = plan
        self.network: TempNet = make_network(plan)
        self.step = 0
        """Number of steps made."""
        self.history: list[Figures] = []
        """Figures of every step."""
        self.base: Figures = {}
        """Figures of the model at τ = 1; empty before they are measured."""
        self.failures: Counter[str] = Counter()
        """Number of texts lost to the verifier, by reason."""
        self.first_failure = ""
        self.optimizer = torch.optim.AdamW(
            self.network.parameters(), lr=plan.config.learning_rate, betas=_BETAS, weight_decay=0.0
        )
        self.controller: KLController | None = None
        self._run_orders = run_orders

    def measure_base(self) -> Figures:
        """Measure the model at τ = 1, and set the target of the divergence and the first λ.

        Raises:
            ValueError: if the target is to be derived from a model that is never right, or always.
            NoRewardError: if the verifier fails for all texts.
        """
        leash = self.plan.config.leash
        self.base = self.evaluate(1.0, num_batches=leash.num_base_batches)
        target = leash.target_kl
        if target is None:
            try:
                target = leash.allowance * divergence_of_success(self.base["reward"])
            except ValueError:
                raise ValueError(
                    f"the mean reward of {self.plan.config.model} at τ = 1 is {self.base['reward']:g}, over "
                    f"{self.base['texts']:.0f} texts: leash.target_kl cannot be derived from it. A model that is never right "
                    "has nothing to learn from; else give --leash.target-kl"
                ) from None
        self.controller = self.make_controller(target)
        return self.base

    def make_controller(self, target: float) -> KLController:
        """Return the controller of λ before its first step."""
        leash = self.plan.config.leash
        return KLController(
            leash.weight,
            target=target,
            gain=leash.gain,
            reset_steps=leash.reset_steps or 1.0,
            ramp_steps=leash.ramp_share * self.plan.config.num_steps,
        )

    def evaluate(self, temperature: float | None, *, num_batches: int, first: int = -1) -> Figures:
        """Return mean figures of texts at a constant temperature, or at those of the TempNet (None); nothing is learned.

        Args:
            temperature: the constant.
            num_batches: number of steps' worth of texts.
            first: number of the first of these steps, negative, so that the texts are none that training sees; they go
                down from there.
        """
        answer = Answer()
        for number in range(num_batches):
            answer.add(self._carry_out(first - number, temperature if temperature is not None else self.weights(), 0.0))
        self._check_rewards(answer)
        return _figures(answer)

    def evaluate_held_out(self, temperature: float | None) -> Figures:
        """Return mean figures of a group of texts for every held-out prompt; see :meth:`evaluate`."""
        chosen = temperature if temperature is not None else self.weights()
        answer = self._ask(self.plan.held_out_places(), _HELD_OUT_STEP, chosen, 0.0)
        self._check_rewards(answer)
        return _figures(answer)

    def train_step(self) -> Figures:
        """Make one step and return its figures.

        Raises:
            NoRewardError: if the verifier fails for all texts of the step.
        """
        assert self.controller is not None, "the base is measured before the first step"
        config, weight = self.plan.config, self.controller.weight
        answer = self._carry_out(self.step, self.weights(), weight)
        self._check_rewards(answer)
        for name, parameter in self.network.named_parameters():
            parameter.grad = answer.gradient[name] / answer.sums["texts"]
        norm = nn.utils.clip_grad_norm_(self.network.parameters(), config.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate * (1.0 - self.step / config.num_steps)
        self.optimizer.step()
        figures = _figures(answer) | {"kl_weight": weight, "gradient_norm": norm.item()}
        if config.leash.reset_steps:
            self.controller.update(figures["kl"])
        self.step += 1
        self.history.append(figures)
        return figures

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of the TempNet's weights."""
        return {name: value.detach().clone() for name, value in self.network.state_dict().items()}

    def result(self, num_last: int = 10) -> dict[str, Any]:
        """Return what the run has come to: the last steps' mean figures, λ and its target, and what was lost."""
        assert self.controller is not None
        last = self.history[-num_last:]
        means = {name: sum(step[name] for step in last) / len(last) for name in last[0]} if last else {}
        return {
            "num_steps": self.step,
            "base": self.base,
            "last_steps": means,
            "target_kl": self.controller.target,
            "kl_weight": self.controller.weight,
            "failures": dict(self.failures),
            "first_failure": self.first_failure,
        }

    def _carry_out(self, step: int, temperature: dict[str, Tensor] | float, kl_weight: float) -> Answer:
        """Return the sum of the answers to a step's questions."""
        return self._ask(self.plan.places_of_step(step), step, temperature, kl_weight)

    def _ask(
        self, places: Sequence[tuple[int, int]], step: int, temperature: dict[str, Tensor] | float, kl_weight: float
    ) -> Answer:
        """Return the sum of the answers to questions, added in their order."""
        size = self.plan.config.prompts_at_a_time
        orders = [
            Order(step=step, places=tuple(places[start : start + size]), temperature=temperature, kl_weight=kl_weight)
            for start in range(0, len(places), size)
        ]
        whole = Answer()
        for answer in self._run_orders(orders):
            whole.add(answer)
        self.failures.update(whole.failures)
        self.first_failure = self.first_failure or whole.first_failure
        return whole

    def _check_rewards(self, answer: Answer) -> None:
        if not answer.sums["texts"]:
            name, num_lost = self.plan.config.verifier.name, f"{answer.sums['lost']:.0f}"
            raise NoRewardError(
                f"verifier.name = {name} gave no text of a step a reward, {num_lost} were lost: {answer.first_failure}"
            )


def _figures(answer: Answer) -> Figures:
    """Return the figures of an answer: means over texts, and mean and standard deviation of τ over their tokens."""
    sums = answer.sums
    tau = sums["tau"] / max(1, sums["tokens"])
    return {
        "reward": answer.mean("reward"),
        "distinct": answer.mean("distinct"),
        "kl": answer.mean("kl"),
        "tau_mean": tau,
        "tau_deviation": math.sqrt(max(0.0, sums["tau_square"] / max(1, sums["tokens"]) - tau * tau)),
        "tokens": answer.mean("tokens"),
        "texts": float(sums["texts"]),
        "lost": float(sums["lost"]),
    }
