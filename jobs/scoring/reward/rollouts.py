"""What a worker does for a step: it generates groups of texts, has them judged, and computes their share of the gradient.

A worker's answer depends on its order alone, whichever worker it is: the random stream of a text is keyed by the seed, the
prompt, the number of the sample and the step.

For the gradient the base reads the texts once, without a graph, since a token's gradient needs three numbers of its logits
(`tempnet.reward`). The graph of the TempNet is built for some tokens at a time, so that memory does not grow with the texts.

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

from jobs.engine.worker import CPU_ENVIRONMENT
from jobs.scoring.generation.sampling import Generated, Sampler, TemperatureRule
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
_TOKENS_PER_KEPT_TAU = 4  # of how many tokens the temperature of one is kept, to be given to other tokens
_NUM_RETRIES = 2  # how often Ray starts a worker again that has died, and carries out its order again


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
    distinct: float  # the best reward of every distinct answer
    tokens: float
    kl: float
    tau: float
    tau_square: float
    entropy: float  # of the tokens at τ = 1, in nats, if the plan has it measured
    taus: tuple[float, ...]  # some of the temperatures that a TempNet gave the tokens


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
    """Return by how much one answer is ahead of another per text, over the prompts that both have."""
    ours, theirs = own.by_prompt(measure), other.by_prompt(measure)
    return mean_interval([ours[place] - theirs[place] for place in ours if place in theirs])


RunOrders = Callable[[Sequence[Order]], list[Answer]]
"""Carries out orders, and returns their answers in the same order."""


class _Tokens(NamedTuple):
    """The new tokens of a batch, one after the other: (N,)."""

    ids: Tensor
    hidden: Tensor  # (N, d): what they are drawn from
    rows: Tensor  # the text of each token
    columns: Tensor  # its place among the new tokens of the text


class RolloutWorker:
    """The base model, the TempNet and the verifier of one process; the base gets no gradient."""

    def __init__(self, plan: RewardPlan) -> None:
        self.plan, model = plan, plan.config.model
        self.network = make_network(plan)
        self.sampler = Sampler(plan.generation, load_tokenizer(model), self.network, plan.stop)
        self._base = self.sampler.base
        if plan.network.reads_state and self.sampler.fold is None:
            raise ValueError(
                f"temperature.input = {plan.config.temperature.input}: the logits of {model} are not W h (an output bias, a "
                "soft-cap, a scale), so that generation does not know the hidden state: choose logits"
            )
        head = find_output_head(self._base)
        if head is None:
            raise ValueError(
                f"model = {model}: its logits are not computed from the last hidden state in a way that is known, and the "
                "gradient of its temperatures needs that state"
            )
        self._head = head
        self.panel = Panel(plan.config.verifier, num_at_a_time=max(1, int(plan.config.workers.cpus_per_worker)))

    def run(self, order: Order) -> Answer:
        """Carry out an order; the gradient is that of texts drawn at the temperatures of the TempNet as it is."""
        temperature: TempNet | TemperatureRule | float = self.network
        if isinstance(order.temperature, dict):
            self.network.load_state_dict(order.temperature)
        else:
            temperature = order.temperature
        self.sampler.set_temperature(temperature)
        size = self.plan.config.group_size
        asked = [(self.plan.asked[place], first + number) for place, first in order.places for number in range(size)]
        prompts = [question.ids for question, _ in asked]
        generated = self.sampler([(question.prompt.id, sample, order.step) for question, sample in asked], prompts)
        samples = [
            Sample(prompt=question.text, text=text.text, fields=question.prompt.fields)
            for (question, _), text in zip(asked, generated, strict=True)
        ]
        judgement = self.panel.judge(samples)
        tokens, given = self._read(prompts, generated), None
        if order.kl_weight is None:
            given = torch.tensor([value for text in generated for value in text.tau or ()], device=tokens.ids.device)
        statistics, tau = self._statistics(tokens, given, order.reference)
        terms = torch.stack([torch.ones_like(tau), statistics.kl, tau, tau.square()], dim=-1).double().cpu()  # (N, 4)
        sums = terms.new_zeros(len(generated), 4).index_add_(0, tokens.rows.cpu(), terms)
        answer = Answer(failures=Counter(judgement.failures), first_failure=judgement.first_failure)
        advantages: list[tuple[list[int], Tensor]] = []
        for number, (place, _) in enumerate(order.places):
            texts = range(number * size, (number + 1) * size)
            known = {text: reward for text in texts if (reward := judgement.rewards[text]) is not None}
            if not known:  # all its texts were lost
                continue
            members, rewards = list(known), torch.tensor(list(known.values()), dtype=torch.float64)
            said = [" ".join(generated[text].text.split()) for text in members]
            is_distinct = self.plan.config.reward == "distinct"
            advantages.append((members, distinct_advantages(rewards, said) if is_distinct else leave_one_out(rewards)))
            num_tokens, kl, tau_sum, tau_square = sums[members].sum(0).tolist()
            taus = [value for text in members for value in generated[text].tau or ()]
            kept = random.Random(f"{order.step}/{place}").sample(taus, -(-len(taus) // _TOKENS_PER_KEPT_TAU))
            answer.groups.append(
                GroupSums(
                    place=place,
                    texts=len(members),
                    reward=sum(known.values()),
                    distinct=distinct_reward(list(known.values()), said) * len(members),
                    tokens=num_tokens,
                    kl=kl,
                    tau=tau_sum,
                    tau_square=tau_square,
                    entropy=sum(sum(generated[text].entropy or ()) for text in members),
                    taus=tuple(kept) if temperature is self.network and order.kl_weight is None else (),
                )
            )
        if order.kl_weight is not None:
            answer.gradient = self._gradient(tokens, statistics, advantages, order.kl_weight)
        return answer

    def _gradient(
        self,
        tokens: _Tokens,
        statistics: TokenStatistics,
        advantages: Sequence[tuple[list[int], Tensor]],
        kl_weight: float,
    ) -> dict[str, Tensor]:
        """Return the sum over texts of the gradient of −(advantage·log p − λ·KL).

        `advantages` are, for every group, the places of its texts in the batch and their advantages.
        """
        kl = statistics.kl.new_zeros(int(tokens.rows.max()) + 1, int(tokens.columns.max()) + 1)  # (B, T)
        kl[tokens.rows, tokens.columns] = statistics.kl
        weights, is_valid = torch.zeros_like(kl), torch.zeros(len(kl), dtype=torch.bool, device=kl.device)
        for places, values in advantages:
            weights[places] = token_advantages(values.to(kl), kl[places], kl_weight)
            is_valid[places] = True
        self.network.zero_grad()
        for part in is_valid[tokens.rows].nonzero().squeeze(-1).split(NUM_TOKENS_AT_A_TIME):
            found = TokenStatistics(statistics.score[part], statistics.kl[part], statistics.kl_slope[part])
            weight = weights[tokens.rows[part], tokens.columns[part]]
            surrogate_loss(self._tau(tokens.hidden[part]), found, weight, kl_weight).backward()
        return {
            name: (torch.zeros_like(value) if value.grad is None else value.grad).cpu()
            for name, value in self.network.named_parameters()
        }

    @torch.no_grad()
    def _read(self, prompts: Sequence[Sequence[int]], texts: Sequence[Generated]) -> _Tokens:
        """Run the base over the texts, padded on the right, where causal attention does not see it."""
        device = self._base.device
        # Nothing is drawn after the last token.
        read = [[*prompt, *text.ids[:-1]] for prompt, text in zip(prompts, texts, strict=True)]
        ids = pad_sequence([torch.tensor(row) for row in read], batch_first=True).to(device)
        rows = [row for row, text in enumerate(texts) for _ in text.ids]
        columns = [column for text in texts for column in range(len(text.ids))]
        places = [len(prompts[row]) - 1 + column for row, column in zip(rows, columns, strict=True)]
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
        return self._head.logits(self._base, hidden, self.network.config.input_size).float()

    def _tau(self, hidden: Tensor, logits: Tensor | None = None) -> Tensor:
        if self.network.config.reads_logits:
            return self.network(self._logits(hidden) if logits is None else logits, hidden)
        return self.network.from_first_product(self.network.state_product(self.network.normalize_state(hidden)))

    def close(self) -> None:
        self.panel.close()


@contextmanager
def work_here(plan: RewardPlan) -> Iterator[RunOrders]:
    with closing(RolloutWorker(plan)) as worker:
        yield lambda orders: [worker.run(order) for order in orders]


class _RolloutActor:
    """A worker, made with the first call, so that errors are raised there."""

    def __init__(self, plan: RewardPlan, num_threads: int, search_path: Sequence[str]) -> None:
        torch.set_num_threads(num_threads)
        # A function that verifies may lie where only the driver would look for it.
        sys.path += [path for path in search_path if path not in sys.path]
        self._plan = plan
        self._worker: RolloutWorker | None = None

    def run(self, order: Order, temperature: Temperature) -> Answer:
        self._worker = self._worker or RolloutWorker(self._plan)
        return self._worker.run(replace(order, temperature=temperature))


@contextmanager
def work_in_pool(plan: RewardPlan) -> Iterator[RunOrders]:
    """Yield what carries out orders in a pool of Ray actors; it raises what a worker raises.

    RayActorError is raised if a worker dies again and again.
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
