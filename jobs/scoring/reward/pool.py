"""A pool of Ray actors that carry out orders, each with the base model, a TempNet and a verifier."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError, RayTaskError

from jobs.engine.cluster import CPU_ENVIRONMENT
from jobs.scoring.reward.plan import RewardPlan
from jobs.scoring.reward.rollouts import Answer, Order, RolloutWorker
from pipelines.actor_start import wait_until_started

# A worker that dies, for instance with its machine, is replaced, and its order carried out again, this often in a row.
_MAX_DEATHS_IN_A_ROW = 3


class _RolloutActor:
    """Ray actor around a worker, which it makes with its first call, so that errors are raised there."""

    def __init__(self, plan: RewardPlan, num_threads: int, search_path: Sequence[str]) -> None:
        torch.set_num_threads(num_threads)
        # A function that verifies may lie where only the driver would look for it.
        sys.path += [path for path in search_path if path not in sys.path]
        self._plan = plan
        self._worker: RolloutWorker | None = None

    def run(self, order: Order, temperature: Any) -> Answer:
        """Carry out an order, whose weights come as an argument of their own, once for all orders of a step."""
        if self._worker is None:
            self._worker = RolloutWorker(self._plan)
        return self._worker.run(dataclasses.replace(order, temperature=temperature))


class RolloutPool:
    """The actors of a run, as a context that ends them.

    Args:
        plan: the plan of the run, whose `workers` say how many actors there are and what each reserves.
    """

    def __init__(self, plan: RewardPlan) -> None:
        self._plan = ray.put(plan)
        self._settings = plan.config.workers
        num_orders = -(-plan.config.prompts_per_step // plan.config.prompts_at_a_time)
        self._fresh: list[Any] = []  # actors that have not been called yet
        self._idle = [self._start() for _ in range(min(self._settings.num_workers, num_orders))]
        self._busy: list[Any] = []

    def __enter__(self) -> RolloutPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for actor in [*self._idle, *self._busy]:
            ray.kill(actor)

    def run(self, orders: Sequence[Order]) -> list[Answer]:
        """Carry out orders and return their answers in the same order; a worker that dies is replaced.

        Raises:
            RayActorError: if workers die one after another.
            Exception: what a worker raises, such as ValueError for a model that does not fit.
        """
        shared = ray.put(orders[0].temperature)
        waiting, answers = deque(enumerate(orders)), dict[int, Answer]()
        running: dict[Any, tuple[Any, int]] = {}
        num_deaths = 0
        while waiting or running:
            while waiting and self._idle:
                actor, (place, order) = self._idle.pop(), waiting.popleft()
                if actor in self._fresh:
                    wait_until_started(actor)
                    self._fresh.remove(actor)
                # The weights travel once for all orders of the step, by reference.
                call = actor.run.remote(dataclasses.replace(order, temperature=0.0), shared)
                running[call] = (actor, place)
                self._busy.append(actor)
            (done,), _ = ray.wait(list(running), num_returns=1)
            actor, place = running.pop(done)
            self._busy.remove(actor)
            self._idle.append(actor)
            try:
                answers[place] = ray.get(done)
                num_deaths = 0
            except RayTaskError as error:
                raise error.cause from None
            except RayActorError:
                num_deaths += 1
                if num_deaths == _MAX_DEATHS_IN_A_ROW:
                    raise
                self._idle[-1] = self._start()
                waiting.appendleft((place, orders[place]))
        return [answers[place] for place in range(len(orders))]

    def _start(self) -> Any:
        actor: Any = ray.remote(_RolloutActor).options(
            num_cpus=self._settings.cpus_per_worker,
            num_gpus=1 if self._settings.use_gpu else 0,
            runtime_env={"env_vars": CPU_ENVIRONMENT},
        )
        search_path = [path or os.getcwd() for path in sys.path]
        handle = actor.remote(self._plan, max(1, int(self._settings.cpus_per_worker)), search_path)
        self._fresh.append(handle)
        return handle
