"""What a worker does for a step: it generates groups of texts, has them judged, and computes their share of the gradient.

A worker's answer depends on its order alone: every text has a random stream of its own, keyed by the seed, the prompt, the
number of the sample and the step. Which worker does it, and how often, changes nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from jobs.scoring.generation.sampling import Generated, Request, Sampler
from jobs.scoring.reward.learning import GroupRewards, Learner, Rollout
from jobs.scoring.reward.plan import RewardPlan, make_network
from jobs.scoring.verifiers.panel import Judgement, Panel
from jobs.scoring.verifiers.verifier import Sample
from pipelines.text.tokenization import load_tokenizer
from tempnet.inference import can_fold
from tempnet.reward import distinct_reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A part of a step: questions to ask at the temperatures of a TempNet, or at a constant one."""

    step: int
    """Number of the step, which is part of the random seed of its texts; negative for texts that nothing learns from."""
    places: tuple[tuple[int, int], ...]
    """Places of the questions among all that may be asked, each with the number of its first sample."""
    temperature: dict[str, Tensor] | float
    """Weights of the TempNet, or a constant temperature, from which no gradient is computed."""
    kl_weight: float = 0.0
    """λ."""


@dataclass(slots=True, kw_only=True)
class Answer:
    """What came of an order: sums over texts, so that answers can be added."""

    gradient: dict[str, Tensor] = field(default_factory=dict)
    """Sum over texts of the gradient of the loss, by the name of the parameter; empty for a constant temperature."""
    sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """`texts` with a reward, their `reward`, `distinct` and `kl`; `tokens`, `tau` and `tau_square`; `lost` texts."""
    failures: Counter[str] = field(default_factory=Counter)
    """Number of texts lost to the verifier, by reason."""
    first_failure: str = ""
    """What the first failure says."""

    def add(self, other: Answer) -> None:
        """Add another answer to this one."""
        for name, value in other.gradient.items():
            self.gradient[name] = self.gradient[name] + value if name in self.gradient else value
        for name, number in other.sums.items():
            self.sums[name] += number
        self.failures.update(other.failures)
        self.first_failure = self.first_failure or other.first_failure

    def mean(self, name: str) -> float:
        """Return the mean over texts of a sum; NaN if no text has a reward."""
        return self.sums[name] / self.sums["texts"] if self.sums["texts"] else float("nan")


class RolloutWorker:
    """The base model, the TempNet and the verifier of one process.

    Raises:
        ValueError: if the model does not fit the TempNet, or there is no such device.
    """

    def __init__(self, plan: RewardPlan) -> None:
        self.plan = plan
        self.network = make_network(plan)
        self.sampler = Sampler(plan.generation, load_tokenizer(plan.config.model), self.network, plan.stop)
        if plan.network.reads_state and not can_fold(self.sampler.base, self.network):
            raise ValueError(
                f"temperature.input = {plan.config.temperature.input}: the logits of {plan.config.model} are not W h (an "
                "output bias, a soft-cap, a scale), so that generation does not know the hidden state: choose logits"
            )
        self.learner = Learner(self.sampler.base, self.network)
        num_at_a_time = max(1, int(plan.config.workers.cpus_per_worker))
        self.panel = Panel(plan.config.verifier, num_at_a_time=num_at_a_time)

    def run(self, order: Order) -> Answer:
        """Carry out an order."""
        is_learned = not isinstance(order.temperature, float)
        if isinstance(order.temperature, float):
            self.sampler.set_temperature(order.temperature)
        else:
            self.network.load_state_dict(order.temperature)
            self.sampler.set_temperature(self.network)
        requests = self._requests(order)
        generated = self.sampler(requests)
        judgement = self.panel.judge(self._samples(order, generated))
        rollouts = [
            Rollout(prompt=request.ids, new=text.ids, tau=text.tau or [])
            for request, text in zip(requests, generated, strict=True)
        ]
        groups = self._groups(generated, judgement)
        answer = Answer(failures=Counter(judgement.failures), first_failure=judgement.first_failure)
        answer.sums["lost"] = sum(judgement.failures.values())
        for group in groups:
            answer.sums["texts"] += len(group.places)
            answer.sums["reward"] += sum(group.rewards)
            answer.sums["distinct"] += distinct_reward(group.rewards, group.answers) * len(group.places)
        if is_learned:
            answer.gradient = self.learner.gradient(rollouts, groups, order.kl_weight, answer.sums)
        else:
            self.learner.add_statistics(rollouts, groups, answer.sums)
        return answer

    def _requests(self, order: Order) -> list[Request]:
        requests = []
        for place, first in order.places:
            question = self.plan.asked[place]
            requests += [
                Request(key=(question.prompt.id, sample, order.step), prompt=question.text, ids=list(question.ids))
                for sample in range(first, first + self.plan.config.group_size)
            ]
        return requests

    def _samples(self, order: Order, generated: Sequence[Generated]) -> list[Sample]:
        size, samples = self.plan.config.group_size, []
        for number, text in enumerate(generated):
            question = self.plan.asked[order.places[number // size][0]]
            samples.append(Sample(prompt=question.text, text=text.text, fields=question.prompt.fields))
        return samples

    def _groups(self, generated: Sequence[Generated], judgement: Judgement) -> list[GroupRewards]:
        """Return the groups, without one whose texts were all lost."""
        size, groups = self.plan.config.group_size, []
        for start in range(0, len(generated), size):
            valid = [place for place in range(start, start + size) if judgement.rewards[place] is not None]
            rewards = [reward for place in valid if (reward := judgement.rewards[place]) is not None]
            group = GroupRewards(
                places=valid,
                rewards=rewards,
                answers=[" ".join(generated[place].text.split()) for place in valid],
                is_distinct=self.plan.config.reward == "distinct",
            )
            groups += [group] if valid else []
        return groups

    def close(self) -> None:
        """End the processes of the verifier."""
        self.panel.close()
