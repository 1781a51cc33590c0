"""The training loop: order texts, add up the answers, make one optimizer step, let λ follow; nothing here knows of Ray.

    constants   some are tried on the training prompts. Of those that cannot be told apart from the best, the one nearest to
                1, whose texts vary most, is where the network starts and what the divergence is measured from, so that
                it is spent on differences between tokens, and not on a level that a constant has, too
    steps       the goal of the divergence rises from 0 to the largest that is tried; λ follows it
    choice      the weights at several goals are compared on new texts of the training prompts, and the best are kept

The state after a step is the weights of the TempNet, those at the goals that were passed, the moments of Adam, the
controller of λ and the figures of all steps, in one safetensors file whose header holds the rest as JSON. Everything random
is drawn by the workers from keys, so that a run that goes on from a checkpoint is the run that was never stopped.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from jobs.scoring.reward.plan import CONSTANTS, ROUNDS, RewardPlan, make_network, start_at
from jobs.scoring.reward.rollouts import Answer, Order, RunOrders, Temperature, gain
from jobs.scoring.units import NoRewardError
from pipelines.storage import exists, read_bytes, write_bytes
from tempnet.controllers import KLController, divergence_of_success
from tempnet.network import TempNet

Figures = dict[str, float]

CHECKPOINT_FILE = "checkpoint.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq")
# Share of the steps at the end in which the learning rate falls to 0. Before, the goal rises.
_DECAY_SHARE = 0.2
# AdamW's β₂: a step's gradient is so noisy that its square is best averaged over tens of steps.
_BETAS = (0.9, 0.98)
# First numbers of the steps whose texts nothing learns from; each goes down from there.
_FIRST_CONSTANT, _FIRST_CHOICE = -1001, -2001


class RewardTrainer:
    def __init__(self, plan: RewardPlan, run_orders: RunOrders) -> None:
        self.plan = plan
        self.network: TempNet = make_network(plan)
        self.step = 0
        self.history: list[Figures] = []
        self.constants: dict[float, Figures] = {}
        """Constant → its figures on training prompts, for all that were tried; empty before they are."""
        self.best_constant = self.reference = 1.0
        """The constant with the most reward, and the one that the divergence is measured from."""
        self.passed: dict[int, dict[str, Tensor]] = {}
        """Step → weights at the goals that were reached; 0: those of the best constant."""
        self.failures: Counter[str] = Counter()
        """Number of texts lost to the verifier, by reason."""
        self.first_failure = ""
        self.optimizer = torch.optim.AdamW(
            self.network.parameters(), lr=plan.config.learning_rate, betas=_BETAS, weight_decay=0.0
        )
        self.controller: KLController | None = None
        self._run_orders = run_orders

    def begin(self) -> None:
        """Try constants on the training prompts, and set the start of the network, the reference and the largest goal."""
        found = self.choose({constant: constant for constant in CONSTANTS}, _FIRST_CONSTANT)
        self.constants = {constant: answer.figures() for constant, answer in found.items()}
        self.best_constant, best = next(iter(found.items()))
        equal = [
            tau for tau, answer in found.items() if not gain(best, answer, self.measure).low > 0.0 or answer is best
        ]
        self.reference = min(equal, key=lambda tau: abs(math.log(tau)))
        leash, config = self.plan.config.leash, self.plan.config
        target, reward = leash.target_kl, self.constants[self.reference]["reward"]
        if target is None:
            try:
                target = leash.allowance * divergence_of_success(reward)
            except ValueError:
                raise ValueError(
                    f"the mean reward of {config.model} at τ = {self.reference:g}, its best constant, is {reward:g}, over "
                    f"{self.constants[self.reference]['texts']:.0f} texts: no goal of the divergence follows from it. A "
                    "model that is never right has nothing to learn from, one that always is has nothing to learn; else give "
                    "--leash.target-kl"
                ) from None
        self.controller = self._make_controller(target)
        self.passed = {0: self.weights()}
        if not config.temperature.path:
            self.passed = {0: start_at(self.network, self.best_constant)}
            start_at(self.network, self.reference)

    def _make_controller(self, target: float) -> KLController:
        leash = self.plan.config.leash
        return KLController(
            leash.weight,
            target=target,
            gain=leash.gain,
            reset_steps=leash.reset_steps or 1.0,
            ramp_steps=(1.0 - _DECAY_SHARE) * self.plan.config.num_steps,
        )

    def choose(self, candidates: Mapping[Any, Temperature], first: int) -> dict[Any, Answer]:
        """Return what was measured of temperatures on training prompts, the best first; of equally good ones the first given.

        All get a step's worth of texts; those that are ahead get more, the same ones each.
        """
        whole: dict[Any, Answer] = {name: Answer() for name in candidates}
        ranked, num_before = list(candidates), 0
        for num_left, num_batches in ROUNDS:
            ranked = ranked[:num_left]
            for name in ranked:
                for number in range(num_before, num_before + num_batches):
                    whole[name].add(
                        self.ask(candidates[name], self.plan.places_of_step(first - number), first - number)
                    )
            num_before += num_batches
            ranked.sort(key=lambda name: -whole[name].mean(self.measure))  # stable
            ranked += [name for name in whole if name not in ranked]
        return {name: whole[name] for name in ranked}

    @property
    def measure(self) -> str:
        """What is learned from: `reward`, or `distinct` reward."""
        return "distinct" if self.plan.config.reward == "distinct" else "reward"

    def train_step(self) -> Figures:
        assert self.controller is not None, "constants are tried before the first step"
        config, weight = self.plan.config, self.controller.weight
        answer = self.ask(self.weights(), self.plan.places_of_step(self.step), self.step, weight)
        num_texts = answer.total("texts")
        for name, parameter in self.network.named_parameters():
            parameter.grad = answer.gradient[name] / num_texts
        norm = nn.utils.clip_grad_norm_(self.network.parameters(), config.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate * min(1.0, (1.0 - self.step / config.num_steps) / _DECAY_SHARE)
        self.optimizer.step()
        figures = answer.figures() | {"kl_weight": weight, "gradient_norm": norm.item()}
        if config.leash.reset_steps:
            self.controller.update(figures["kl"])
        self.step += 1
        self.history.append(figures)
        if self.step in self.plan.goal_steps:
            self.passed[self.step] = self.weights()
        return figures

    def finish(self) -> dict[int, Answer]:
        """Give the network the weights of the goal whose texts are best, and return what was measured, the best first.

        Goals are named by the step that they were reached at; 0 is the network that gives the best constant to every token.
        """
        found = self.choose(self.passed, _FIRST_CHOICE)
        self.network.load_state_dict(self.passed[next(iter(found))])
        return found

    def weights(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.network.state_dict().items()}

    def result(self, num_last: int = 10) -> dict[str, Any]:
        """Return what the run has come to: constants, the last steps' mean figures, λ and the largest goal, and losses."""
        assert self.controller is not None
        last = self.history[-num_last:]
        means = {name: sum(step[name] for step in last) / len(last) for name in last[0]} if last else {}
        return {
            "num_steps": self.step,
            "base": self.constants[1.0],
            "constants": {f"{constant:g}": figures for constant, figures in self.constants.items()},
            "best_constant": self.best_constant,
            "reference": self.reference,
            "last_steps": means,
            "target_kl": self.controller.target,
            "kl_weight": self.controller.weight,
            "failures": dict(self.failures),
            "first_failure": self.first_failure,
        }

    def save(self, directory: str) -> None:
        """Write the state; a reader finds this checkpoint or the one before, whenever the process is killed."""
        assert self.controller is not None
        tensors = {f"network.{name}": value for name, value in self.weights().items()}
        for name, parameter in self.network.named_parameters():
            moments = self.optimizer.state[parameter]
            tensors |= {f"{key}.{name}": moments.get(key, torch.zeros_like(parameter)).clone() for key in _MOMENTS}
        for step, weights in self.passed.items():
            tensors |= {f"passed.{step}.{name}": value for name, value in weights.items()}
        state = {
            "step": self.step,
            "controller": self.controller.state(),
            "constants": list(self.constants.items()),
            "best_constant": self.best_constant,
            "reference": self.reference,
            "history": self.history,
            "failures": dict(self.failures),
            "first_failure": self.first_failure,
        }
        whole = {name: value.detach().contiguous() for name, value in tensors.items()}
        write_bytes(f"{directory}/{CHECKPOINT_FILE}", save(whole, metadata={"state": json.dumps(state)}))

    def load(self, directory: str) -> bool:
        """Take the state of the checkpoint in a directory, and return whether there is one."""
        uri = f"{directory}/{CHECKPOINT_FILE}"
        if not exists(uri):
            return False
        content = read_bytes(uri)

        def part(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

        try:
            tensors = load(content)
            # A safetensors file begins with the length of its JSON header in 8 bytes.
            header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
            state = json.loads(header["__metadata__"]["state"])
            self.network.load_state_dict(part("network."))
            for name, parameter in self.network.named_parameters():
                moments = {moment: tensors[f"{moment}.{name}"] for moment in _MOMENTS}
                self.optimizer.state[parameter] = {"step": torch.tensor(float(state["step"])), **moments}
            steps = [step for step in (0, *self.plan.goal_steps) if step <= state["step"]]
            self.passed = {step: part(f"passed.{step}.") for step in steps}
            self.controller = self._make_controller(state["controller"]["target"])
            self.controller.restore(state["controller"])
            self.constants = dict(state["constants"])
            for name in ("step", "history", "reference", "best_constant", "first_failure"):
                setattr(self, name, state[name])
            self.failures = Counter(state["failures"])
        except (SafetensorError, RuntimeError, ValueError, KeyError) as error:
            raise ValueError(
                f"{uri} is damaged or of another version: {error!s:.200}; delete it to begin anew"
            ) from error
        return True

    def ask(
        self, temperature: Temperature, places: Sequence[tuple[int, int]], step: int, kl_weight: float | None = None
    ) -> Answer:
        """Return the sum of the answers to questions, added in their order."""
        size = self.plan.config.prompts_at_a_time
        order = Order(step=step, places=(), temperature=temperature, kl_weight=kl_weight, reference=self.reference)
        parts = [tuple(places[start : start + size]) for start in range(0, len(places), size)]
        whole = Answer()
        for answer in self._run_orders([replace(order, places=part) for part in parts]):
            whole.add(answer)
        self.failures.update(whole.failures)
        self.first_failure = self.first_failure or whole.first_failure
        if not whole.groups:
            raise NoRewardError(
                f"verifier.name = {self.plan.config.verifier.name} gave no text of a step a reward, "
                f"{sum(whole.failures.values())} were lost: {whole.first_failure}"
            )
        return whole
