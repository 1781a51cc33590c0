"""What a worker does for a step: it generates groups of texts, has them judged, and computes their share of the gradient.

A worker's answer depends on its order alone: every text has a random stream of its own, keyed by the seed, the prompt, the
number of the sample and the step. Which worker does it, and how often, changes nothing.

For the gradient the base reads the texts once, without a graph. What a token's gradient needs of its logits are three
numbers (`tempnet.reward`); the graph of the TempNet is built for some tokens at a time, so that memory does not grow with
the texts.

Shapes: B texts, T new tokens of the longest text, N new tokens of all texts, d hidden size.
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
from typing import Any, NamedTuple

import ray
import torch
from ray.exceptions import RayTaskError
from ray.util import ActorPool
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from jobs.engine.worker import CPU_ENVIRONMENT
from jobs.scoring.generation.sampling import Generated, Request, Sampler, TemperatureRule
from jobs.scoring.reward.plan import NUM_TOKENS_AT_A_TIME, RewardPlan, make_network
from jobs.scoring.verifiers.verifier import Panel, Sample
from pipelines.text.tokenization import load_tokenizer
from tempnet.intervals import Interval, mean_interval
from tempnet.models.output_head import find_output_head
from tempnet.network import TempNet
from tempnet.reward import (
    TokenStatistics,
    distinct_advantages,
    distinct_reward,
    leave_one_out,
    surrogate_loss,
    token_advantages,
    token_statistics,
)

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
    kl_weight: float | None = None
    """λ; None: nothing is learned, and no gradient computed."""
    reference: float = 1.0


class GroupSums(NamedTuple):
    """What came of one group of texts: sums over those with a reward."""

    place: int
    texts: int
    reward: float
    distinct: float
    """Sum over distinct answers of their best reward."""
    tokens: float
    kl: float
    tau: float
    tau_square: float
    entropy: float
    """Entropies of the tokens at τ = 1, in nats, if the plan has them measured."""
    taus: tuple[float, ...]
    """Some of the temperatures that a TempNet gave the tokens."""


@dataclass(slots=True, kw_only=True)
class Answer:
    """What came of an order; answers can be added."""

    groups: list[GroupSums] = field(default_factory=list)
    gradient: dict[str, Tensor] = field(default_factory=dict)
    """Sum over texts of the gradient of the loss, by the name of the parameter; empty if nothing is learned."""
    failures: Counter[str] = field(default_factory=Counter)
    first_failure: str = ""

    def add(self, other: Answer) -> None:
        for name, value in other.gradient.items():
            self.gradient[name] = self.gradient[name] + value if name in self.gradient else value
        self.groups += other.groups
        self.failures.update(other.failures)
        self.first_failure = self.first_failure or other.first_failure

    def total(self, name: str) -> float:
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


class _Tokens(NamedTuple):
    """The new tokens of a batch, one after the other: (N,), with the hidden states (N, d) that they are drawn from."""

    ids: Tensor
    hidden: Tensor
    rows: Tensor
    """The text of each token."""
    columns: Tensor
    """Its place among the new tokens of the text."""


class Learner:
    """Computes gradients for a base model and its TempNet, both on one device; the base gets none."""

    def __init__(self, base: PreTrainedModel, network: TempNet) -> None:
        self._base, self._network = base, network
        head = find_output_head(base)
        if head is None:
            raise ValueError(
                f"model = {base.name_or_path}: its logits are not computed from the last hidden state in a way that is "
                "known, and the gradient of its temperatures needs that state"
            )
        self._head = head

    def gradient(
        self,
        requests: Sequence[Request],
        texts: Sequence[Generated],
        advantages: Sequence[tuple[list[int], Tensor]],
        kl_weight: float,
        reference: float,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return the sum over texts of the gradient of −(advantage·log p − λ·KL), and what :meth:`measure` returns.

        The texts (B,) are drawn at the temperatures of the TempNet as it is. `advantages` are, for every group, the places
        of its texts in the batch and their advantages.
        """
        tokens = self._read(requests, texts)
        statistics, tau = self._statistics(tokens, None, reference)
        kl = statistics.kl.new_zeros(len(texts), int(tokens.columns.max()) + 1)  # (B, T)
        kl[tokens.rows, tokens.columns] = statistics.kl
        weights, is_valid = torch.zeros_like(kl), torch.zeros(len(texts), dtype=torch.bool, device=kl.device)
        for places, values in advantages:
            weights[places] = token_advantages(values.to(kl), kl[places], kl_weight)
            is_valid[places] = True
        self._network.zero_grad()
        for part in is_valid[tokens.rows].nonzero().squeeze(-1).split(NUM_TOKENS_AT_A_TIME):
            found = TokenStatistics(statistics.score[part], statistics.kl[part], statistics.kl_slope[part])
            weight = weights[tokens.rows[part], tokens.columns[part]]
            surrogate_loss(self._tau(tokens.hidden[part]), found, weight, kl_weight).backward()
        gradient = {
            name: (torch.zeros_like(value) if value.grad is None else value.grad).cpu()
            for name, value in self._network.named_parameters()
        }
        return gradient, _sums(tokens, statistics.kl, tau, len(texts))

    def measure(self, requests: Sequence[Request], texts: Sequence[Generated], reference: float) -> Tensor:
        """Return the sums of 1, divergence, τ and τ² over the tokens of texts that were drawn at their τ: (B, 4)."""
        tokens = self._read(requests, texts)
        given = torch.tensor([value for text in texts for value in text.tau or ()], device=tokens.ids.device)
        statistics, tau = self._statistics(tokens, given, reference)
        return _sums(tokens, statistics.kl, tau, len(texts))

    @torch.no_grad()
    def _read(self, requests: Sequence[Request], texts: Sequence[Generated]) -> _Tokens:
        """Run the base over the texts, padded on the right, where causal attention does not see it."""
        device = self._base.device
        # Nothing is drawn after the last token.
        read = [[*request.ids, *text.ids[:-1]] for request, text in zip(requests, texts, strict=True)]
        ids = pad_sequence([torch.tensor(row) for row in read], batch_first=True).to(device)
        rows = [row for row, text in enumerate(texts) for _ in text.ids]
        columns = [column for text in texts for column in range(len(text.ids))]
        places = [len(requests[row].ids) - 1 + column for row, column in zip(rows, columns, strict=True)]
        return _Tokens(
            ids=torch.tensor([token for text in texts for token in text.ids], device=device),
            hidden=self._base.base_model(input_ids=ids, use_cache=False)[0][rows, places],
            rows=torch.tensor(rows, device=device),
            columns=torch.tensor(columns, device=device),
        )

    @torch.no_grad()
    def _statistics(self, tokens: _Tokens, given: Tensor | None, reference: float) -> tuple[TokenStatistics, Tensor]:
        """Return statistics and temperatures (N,), at given temperatures or at those of the TempNet."""
        parts, taus = [], []
        for part in torch.arange(len(tokens.ids), device=tokens.ids.device).split(NUM_TOKENS_AT_A_TIME):
            logits = self._logits(tokens.hidden[part])
            tau = self._tau(tokens.hidden[part], logits) if given is None else given[part]
            parts.append(token_statistics(logits, tokens.ids[part], tau, reference))
            taus.append(tau)
        fields = (torch.cat([getattr(part, name) for part in parts]) for name in ("score", "kl", "kl_slope"))
        return TokenStatistics(*fields), torch.cat(taus)

    @torch.no_grad()
    def _logits(self, hidden: Tensor) -> Tensor:
        return self._head.logits(self._base, hidden, self._network.config.input_size).float()

    def _tau(self, hidden: Tensor, logits: Tensor | None = None) -> Tensor:
        if self._network.config.reads_logits:
            return self._network(self._logits(hidden) if logits is None else logits, hidden)
        return self._network.from_first_product(self._network.state_product(self._network.normalize_state(hidden)))


def _sums(tokens: _Tokens, kl: Tensor, tau: Tensor, num_texts: int) -> Tensor:
    values = torch.stack([torch.ones_like(tau), kl, tau, tau.square()], dim=-1).double().cpu()
    return values.new_zeros(num_texts, values.shape[-1]).index_add_(0, tokens.rows.cpu(), values)


class RolloutWorker:
    """The base model, the TempNet and the verifier of one process."""

    def __init__(self, plan: RewardPlan) -> None:
        self.plan = plan
        self.network = make_network(plan)
        self.sampler = Sampler(plan.generation, load_tokenizer(plan.config.model), self.network, plan.stop)
        if plan.network.reads_state and self.sampler.fold is None:
            raise ValueError(
                f"temperature.input = {plan.config.temperature.input}: the logits of {plan.config.model} are not W h (an "
                "output bias, a soft-cap, a scale), so that generation does not know the hidden state: choose logits"
            )
        self.learner = Learner(self.sampler.base, self.network)
        self.panel = Panel(plan.config.verifier, num_at_a_time=max(1, int(plan.config.workers.cpus_per_worker)))

    def run(self, order: Order) -> Answer:
        is_network = isinstance(order.temperature, dict)
        if isinstance(order.temperature, dict):
            self.network.load_state_dict(order.temperature)
        self.sampler.set_temperature(self.network if isinstance(order.temperature, dict) else order.temperature)
        size, is_distinct = self.plan.config.group_size, self.plan.config.reward == "distinct"
        asked = [(self.plan.asked[place], first + number) for place, first in order.places for number in range(size)]
        requests = [
            Request(key=(question.prompt.id, sample, order.step), prompt=question.text, ids=list(question.ids))
            for question, sample in asked
        ]
        generated = self.sampler(requests)
        judgement = self.panel.judge(
            [
                Sample(prompt=question.text, text=text.text, fields=question.prompt.fields)
                for (question, _), text in zip(asked, generated, strict=True)
            ]
        )
        groups: list[tuple[int, list[int], list[float], list[str]]] = []  # question, its texts, rewards and answers
        for number, (question, _) in enumerate(order.places):
            texts = range(number * size, (number + 1) * size)
            known = {text: reward for text in texts if (reward := judgement.rewards[text]) is not None}
            if known:  # else all its texts were lost
                said = [" ".join(generated[text].text.split()) for text in known]
                groups.append((question, list(known), list(known.values()), said))
        answer = Answer(failures=Counter(judgement.failures), first_failure=judgement.first_failure)
        if order.kl_weight is None:
            sums = self.learner.measure(requests, generated, order.reference)
        else:
            advantages = []
            for _, members, rewards, said in groups:
                values = torch.tensor(rewards, dtype=torch.float64)
                advantages.append(
                    (members, distinct_advantages(values, said) if is_distinct else leave_one_out(values))
                )
            answer.gradient, sums = self.learner.gradient(
                requests, generated, advantages, order.kl_weight, order.reference
            )
        for place, members, rewards, said in groups:
            tokens, kl, tau, tau_square = sums[members].sum(0).tolist()
            taus = [value for text in members for value in generated[text].tau or ()]
            kept = random.Random(f"{order.step}/{place}").sample(taus, -(-len(taus) // _TOKENS_PER_KEPT_TAU))
            answer.groups.append(
                GroupSums(
                    place=place,
                    texts=len(members),
                    reward=sum(rewards),
                    distinct=distinct_reward(rewards, said) * len(members),
                    tokens=tokens,
                    kl=kl,
                    tau=tau,
                    tau_square=tau_square,
                    entropy=sum(sum(generated[text].entropy or ()) for text in members),
                    taus=tuple(kept) if is_network and order.kl_weight is None else (),
                )
            )
        return answer

    def close(self) -> None:
        self.panel.close()


@contextmanager
def work_here(plan: RewardPlan) -> Iterator[RunOrders]:
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
    from jobs.engine.ray_private import wait_until_started  # the workers, which import this module, need none of it

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
