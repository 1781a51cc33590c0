"""Decides how many workers a run has, between a minimum and a maximum, from what the cluster has room for.

Ray Train restarts the workers with another number when it is told to. They go on from the last checkpoint, and every
number of workers trains on the same batches. Ray's own policy is not used: it counts what Ray's autoscaler grants, leaves
no CPUs for reading data, may choose a number that does not divide the batch, and restarts without a new checkpoint.

This module does not import torch, because it runs in Ray Train's controller.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.train import ScalingConfig

from jobs.engine.cluster import answers
from jobs.engine.ray_private import NoopDecision, ResizeDecision, ScalingDecision, ScalingPolicy, free_resources
from jobs.engine.resumption import registered_step

# The workers of a node that goes down may fail before the node's own process ends.
_SECONDS_TO_SETTLE = 3.0


class ElasticPolicy(ScalingPolicy):
    """Ray Train's scaling policy of a run whose number of workers may change.

    A number that could not be started within Ray Train's limit is followed by the next smaller one. Before the run grows,
    its workers are asked to save, so that no step is lost; without a mailbox it grows after the next checkpoint.
    """

    def __init__(
        self,
        scaling_config: ScalingConfig,
        *,
        possible: Sequence[int],
        data_cpus: float,
        directory: str,
        mailbox: Any,
    ) -> None:
        super().__init__(scaling_config)  # type: ignore[arg-type]  # Ray annotates the class of Train V2
        self._possible = list(possible)
        self._resources: dict[str, float] = self.scaling_config._resources_per_worker_not_none
        self._data_cpus_per_worker = data_cpus / self._possible[-1]
        self._directory, self._mailbox = directory, mailbox
        self._running = 0
        self._attempted: int | None = None
        self._failed_at: float | None = None
        self._step_before_growth: int | None = None

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        """Choose the largest number of workers that the cluster's nodes can hold, whoever else uses them."""
        self._maybe_send_resource_request()
        now = time.monotonic()
        if self._running and self._failed_at is None:
            self._failed_at = now
        if self._failed_at is not None and now - self._failed_at < _SECONDS_TO_SETTLE:
            return NoopDecision()
        room = self._count_room(node["Resources"] for node in answering_nodes())
        fitting = [number for number in self._possible if number <= room]
        if self._attempted is not None:
            fitting = [number for number in fitting if number < self._attempted] or fitting
        number = fitting[-1] if fitting else self._possible[0]
        if number != (self._attempted or self._running or self._possible[-1]):
            self._say(f"the cluster has room for {room} of {self._possible[-1]} workers: the run goes on with {number}")
        self._attempted, self._failed_at, self._running, self._step_before_growth = number, None, 0, None
        return self._resize(number)

    def make_decision_for_running_worker_group(
        self, worker_group_state: Any, worker_group_status: Any
    ) -> ScalingDecision:
        """Choose a larger number of workers once the cluster has free room for them and the workers have saved."""
        self._maybe_send_resource_request()
        self._attempted, self._running = None, worker_group_state.num_workers
        number = self._find_larger(self._running)
        if number is None:
            self._step_before_growth = None
            return NoopDecision()
        step = registered_step(self._directory)
        if self._step_before_growth is None:
            self._step_before_growth = step
            if self._mailbox is not None:
                self._mailbox.ask_to_save()
        if step == self._step_before_growth:
            return NoopDecision()
        self._say(f"the cluster has room for {number} workers: the run grows from {self._running}, from step {step}")
        self._attempted, self._running, self._step_before_growth = number, 0, None
        return self._resize(number)

    def _find_larger(self, running: int) -> int | None:
        """Return the largest number of workers above those that run for which there is free room; None if there is none."""
        if running == self._possible[-1]:
            return None
        free = free_resources()
        if not self._count_room(free.values()):
            return None
        nodes = answering_nodes()
        # What readers of data leave free for a moment is not room, so both must hold.
        room = min(
            self._count_room(node["Resources"] for node in nodes),
            running + self._count_room(free.get(node["NodeID"], {}) for node in nodes),
        )
        return max((number for number in self._possible if running < number <= room), default=None)

    def _count_room(self, nodes: Iterable[Mapping[str, float]]) -> int:
        """Return how many workers fit into the nodes' resources, with the CPUs that their data take anywhere."""
        nodes = list(nodes)
        by_node = sum(
            min(int(node.get(name, 0.0) / amount + 1e-9) for name, amount in self._resources.items() if amount)
            for node in nodes
        )
        cpus = sum(node.get("CPU", 0.0) for node in nodes)
        cpus_per_worker = self._resources.get("CPU", 0.0) + self._data_cpus_per_worker
        return min(by_node, int(cpus / cpus_per_worker + 1e-9)) if cpus_per_worker else by_node

    def _get_num_workers_for_resource_request(self) -> int:
        return self._possible[-1]

    def _resize(self, number: int) -> ResizeDecision:
        return ResizeDecision(num_workers=number, resources_per_worker=self._resources)

    def _say(self, line: str) -> None:
        if self._mailbox is None:
            print(line, flush=True)
        else:
            self._mailbox.say(line)


def answering_nodes() -> list[dict[str, Any]]:
    """Return Ray's description of the nodes of the cluster that answer.

    A node that was lost stays in Ray's table of living nodes for half a minute, in which workers would be placed on it.
    """
    alive = [node for node in ray.nodes() if node["Alive"]]
    return [node for node in alive if answers(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}")]
