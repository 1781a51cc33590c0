"""What a worker does for a step: it generates groups of texts, has them judged, and computes their share of the gradient.

A worker's answer depends on its order alone: every text has a random stream of its own, keyed by the seed, the prompt, the
number of the sample and the step. Which worker does it, and how often, changes nothing.
"""

from __future__ import annotations

import math
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import ray
import torch
from ray.exceptions import RayTaskError
from ray.util import ActorPool
from torch import Tensor

from jobs.engine.worker import CPU_ENVIRONMENT
from jobs.scoring.generation.processors import TemperatureRule
from jobs.scoring.generation.sampling import Generated, Request, Sampler
from jobs.scoring.reward.learning import GroupRewards, Learner, Rollout
from jobs.scoring.reward.plan import RewardPlan, make_network
from jobs.scoring.verifiers.panel import Judgement, Panel
from jobs.scoring.verifiers.verifier import Sample
from pipelines.actor_start import wait_until_started
from pipelines.text.tokenization import load_tokenizer
from tempnet.inference import can_fold
from tempnet.intervals import Interval, mean_interval
from tempnet.reward import distinct_reward

Temperature = dict[str, Tensor] | TemperatureRule | float
"""Weights of the TempNet, a rule, or a constant."""
# Of how many tokens the temperature of one is kept, to be given to other tokens.
_TOKENS_PER_KEPT_TAU = 4
# A worker that dies, for instance with its machine, is started again by Ray, and its order carried out again, this often.
_NUM_RETRIES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A part of a step: questions to ask at the temperatures of a TempNet, or at those of a rule or constant."""

    step: int
    """Number of the step, which is part of the random seed of its texts; negative for texts that nothing learns from."""
    places: tuple[tuple[int, int], ...]
    """Places of the questions among all that may be asked, each with the number of its first sample."""
    temperature: Temperature
    """What gives every token its temperature."""
    kl_weight: float | None = None
    """λ; None: nothing is learned, and no gradient computed."""
    reference: float = 1.0
    """The constant temperature that the divergence is measured from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSums:
    """What came of one group of texts: sums over those with a reward."""

    place: int
    """Place of the question among all that may be asked."""
    texts: int
    """Number of texts with a reward."""
    reward: float
    """Sum of their rewards."""
    distinct: float
    """Sum over distinct answers of their best reward."""
    tokens: float
    """Number of their tokens."""
    kl: float
    """Divergence of their tokens, in nats."""
    tau: float
    """Temperatures of their tokens."""
    tau_square: float
    """Squares of these."""
    entropy: float = 0.0
    """Entropies of their tokens at τ = 1, in nats, if the plan has them measured."""
    taus: tuple[float, ...] = ()
    """Some of the temperatures that a TempNet gave their tokens."""


@dataclass(slots=True, kw_only=True)
class Answer:
    """What came of an order; answers can be added."""

    groups: list[GroupSums] = field(default_factory=list)
    """The groups that have a text with a reward."""
    gradient: dict[str, Tensor] = field(default_factory=dict)
    """Sum over texts of the gradient of the loss, by the name of the parameter; empty if nothing is learned."""
    failures: Counter[str] = field(default_factory=Counter)
    """Number of texts lost to the verifier, by reason."""
    first_failure: str = ""
    """What the first failure says."""

    def add(self, other: Answer) -> None:
        """Add another answer to this one."""
        for name, value in other.gradient.items():
            self.gradient[name] = self.gradient[name] + value if name in self.gradient else value
        self.groups += other.groups
        self.failures.update(other.failures)
        self.first_failure = self.first_failure or other.first_failure

    def total(self, name: str) -> float:
        """Return the sum over groups of one of their sums."""
        return math.fsum(getattr(group, name) for group in self.groups)

    def mean(self, name: str) -> float:
        """Return the mean over texts of a sum; NaN if no text has a reward."""
        return self.total(name) / self.total("texts") if self.groups else math.nan

    def by_prompt(self, measure: str) -> dict[int, float]:
        """Return the mean over texts of `reward` or `distinct`, by the place of the question."""
        texts, sums = Counter[int](), Counter[int]()
        for group in self.groups:
            texts[group.place] += group.texts
            sums[group.place] += getattr(group, measure)
        return {place: sums[place] / texts[place] for place in texts}

    def figures(self) -> dict[str, float]:
        """Return means over texts, and mean and standard deviation of τ over their tokens."""
        num_tokens = max(1.0, self.total("tokens"))
        tau = self.total("tau") / num_tokens
        means = {name: self.mean(name) for name in ("reward", "distinct", "kl", "tokens")}
        deviation = math.sqrt(max(0.0, self.total("tau_square") / num_tokens - tau * tau))
        counts = {"texts": self.total("texts"), "lost": float(sum(self.failures.values()))}
        return means | {"tau_mean": tau, "tau_deviation": deviation} | counts


def gain(own: Answer, other: Answer, measure: str) -> Interval:
    """Return by how much one answer is ahead of another per text, with the interval over the prompts that both have."""
    ours, theirs = own.by_prompt(measure), other.by_prompt(measure)
    return mean_interval([ours[place] - theirs[place] for place in ours if place in theirs])


RunOrders = Callable[[Sequence[Order]], list[Answer]]
"""Carries out orders, and returns their answers in the same order."""


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
        is_network = isinstance(order.temperature, dict)
        if isinstance(order.temperature, dict):
            self.network.load_state_dict(order.temperature)
            self.sampler.set_temperature(self.network)
        else:
            self.sampler.set_temperature(order.temperature)
        requests = self._requests(order)
        generated = self.sampler(requests)
        judgement = self.panel.judge(self._samples(order, generated))
        rollouts = [
            Rollout(prompt=request.ids, new=text.ids, tau=text.tau or [])
            for request, text in zip(requests, generated, strict=True)
        ]
        groups = self._groups(order, generated, judgement)
        answer = Answer(failures=Counter(judgement.failures), first_failure=judgement.first_failure)
        if order.kl_weight is None:
            texts = self.learner.measure(rollouts, order.reference)
        else:
            answer.gradient, texts = self.learner.gradient(rollouts, groups, order.kl_weight, order.reference)
        for group in groups:
            tokens, kl, tau, tau_square = texts[group.places].sum(0).tolist()
            taus = [tau for place in group.places for tau in rollouts[place].tau]
            kept = random.Random(f"{order.step}/{group.question}").sample(taus, -(-len(taus) // _TOKENS_PER_KEPT_TAU))
            answer.groups.append(
                GroupSums(
                    place=group.question,
                    texts=len(group.places),
                    reward=sum(group.rewards),
                    distinct=distinct_reward(group.rewards, group.answers) * len(group.places),
                    tokens=tokens,
                    kl=kl,
                    tau=tau,
                    tau_square=tau_square,
                    entropy=sum(sum(generated[place].entropy or ()) for place in group.places),
                    taus=tuple(kept) if is_network and order.kl_weight is None else (),
                )
            )
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

    def _groups(self, order: Order, generated: Sequence[Generated], judgement: Judgement) -> list[GroupRewards]:
        """Return the groups, without one whose texts were all lost."""
        size, groups = self.plan.config.group_size, []
        for number, (question, _) in enumerate(order.places):
            places = range(number * size, (number + 1) * size)
            known = {place: reward for place in places if (reward := judgement.rewards[place]) is not None}
            if known:
                groups.append(
                    GroupRewards(
                        question=question,
                        places=list(known),
                        rewards=list(known.values()),
                        answers=[" ".join(generated[place].text.split()) for place in known],
                        is_distinct=self.plan.config.reward == "distinct",
                    )
                )
        return groups

    def close(self) -> None:
        """End the processes of the verifier."""
        self.panel.close()


@contextmanager
def work_here(plan: RewardPlan) -> Iterator[RunOrders]:
    """Yield what carries out orders in this process, one after another."""
    with closing(RolloutWorker(plan)) as worker:
        yield lambda orders: [worker.run(order) for order in orders]


class _RolloutActor:
    """Ray actor around a worker, which it makes with its first call, so that errors are raised there."""

    def __init__(self, plan: RewardPlan, num_threads: int, search_path: Sequence[str]) -> None:
        torch.set_num_threads(num_threads)
        # A function that verifies may lie where only the driver would look for it.
        sys.path += [path for path in search_path if path not in sys.path]
        self._plan = plan
        self._worker: RolloutWorker | None = None

    def run(self, order: Order, temperature: Temperature) -> Answer:
        """Carry out an order, whose weights come as an argument of their own, once for all orders of a step."""
        self._worker = self._worker or RolloutWorker(self._plan)
        return self._worker.run(replace(order, temperature=temperature))


@contextmanager
def work_in_pool(plan: RewardPlan) -> Iterator[RunOrders]:
    """Yield what carries out orders in a pool of Ray actors, whose number and size `plan.config.workers` says.

    What a worker raises, such as ValueError for a model that does not fit, is raised here; so is RayActorError if a worker
    dies again and again.
    """
    pool = plan.config.workers
    kind: Any = ray.remote(_RolloutActor).options(
        num_cpus=pool.cpus_per_worker,
        num_gpus=pool.num_gpus,
        max_restarts=_NUM_RETRIES,
        max_task_retries=_NUM_RETRIES,
        runtime_env={"env_vars": CPU_ENVIRONMENT},
    )
    search_path = [path or os.getcwd() for path in sys.path]
    shared_plan = ray.put(plan)
    num_actors = min(pool.num_workers, -(-plan.config.prompts_per_step // plan.config.prompts_at_a_time))
    actors = [kind.remote(shared_plan, max(1, int(pool.cpus_per_worker)), search_path) for _ in range(num_actors)]

    def run(orders: Sequence[Order]) -> list[Answer]:
        shared = ray.put(orders[0].temperature)  # the weights travel once for all orders of the step, by reference
        waiting = [replace(order, temperature=0.0) for order in orders]
        try:
            return list(ActorPool(actors).map(lambda actor, order: actor.run.remote(order, shared), waiting))
        except RayTaskError as error:
            raise error.cause from None

    try:
        for actor in actors:
            wait_until_started(actor)
        yield run
    finally:
        for actor in actors:
            ray.kill(actor)
