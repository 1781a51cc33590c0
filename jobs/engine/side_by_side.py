"""The training loop of several members side by side: runs that share data and base, each with its own network.

Steps, data, checkpoints and restarts are those of the ordinary loop (`jobs.engine.loop`). Losses, statistics,
validations, exports and MLflow runs are one per member. A member whose loss is not finite fails alone: it is not
validated or exported any more, and the others go on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from jobs.engine.checkpoint import SafeCheckpointEngine
from jobs.engine.config import TrainingConfig
from jobs.engine.deepspeed_engine import make_optimizer
from jobs.engine.failures import naming_full_disk
from jobs.engine.loop import Throughput, TrainingLoop
from jobs.engine.metrics import MetricLogger
from jobs.engine.task import Statistics
from jobs.engine.worker import MembersJob, WorkerContext

_MEMBERS_FILE = "members.json"


class MemberTask(Protocol):
    """What a task of several members has beside `jobs.engine.task.Task`; its losses have one entry for each member."""

    @property
    def names(self) -> Sequence[str]:
        """Names of the members."""

    def start_engine(self) -> NetworksEngine:
        """Return the engine that trains all members."""

    def take_statistics(self) -> list[Statistics] | None:
        """Return the statistics of every member's last step, if they were requested, and forget them."""

    def validate_member(self, number: int, *, with_details: bool) -> tuple[dict[str, float], dict[str, Any] | None]:
        """Validate one member as `Task.validate` does."""

    def export_member(self, number: int) -> None:
        """Write the export of one member."""


class SideBySideLoop(TrainingLoop):
    """The loop of one worker; see :class:`jobs.engine.loop.TrainingLoop` for the arguments."""

    members: MemberTask

    def __init__(self, job: MembersJob, context: WorkerContext, directory: Path | None) -> None:
        super().__init__(job, context, directory)
        self.histories: dict[str, list[dict[str, Any]]] = {name: [] for name in self.members.names}
        self.failed: dict[str, str] = {}
        self.loggers: dict[str, MetricLogger] = {}
        unsent: dict[str, list[list[Any]]] = {}
        if directory and (directory / _MEMBERS_FILE).is_file():
            kept = json.loads((directory / _MEMBERS_FILE).read_text())
            self.histories, self.failed, unsent = kept["validations"], kept["failed"], kept["unsent"]
        if self.is_first:
            assert self.progress is not None
            for name, run in job.tracked_members.items():
                self.loggers[name] = MetricLogger(run, warn=self.progress.say)
                self.loggers[name].resend(unsent.get(name, []))

    def _start_engine(self) -> Any:
        self.members = self.task  # type: ignore[assignment]  # the job creates such a task
        return self.members.start_engine()

    def run(self) -> dict[str, Any]:
        """Run the remaining steps; return `members` (name → outcome) and `failed` (name → reason) on rank 0, else `{}`."""
        outcome = super().run()
        if not self.is_first:
            return {}
        members = outcome.pop("members")
        return {
            "members": {name: {**outcome, **members[name], "validations": self.histories[name]} for name in members},
            "failed": self.failed,
        }

    def close(self) -> Any:
        """Send the remaining metrics, and return name → those that could not be sent."""
        super().close()
        for logger in self.loggers.values():
            logger.close()
        return {name: logger.unsent() for name, logger in self.loggers.items()}

    def _report_steps(self, statistics: Statistics | None) -> None:
        first, losses = self._gather_losses()
        values = losses.cpu().numpy()
        summaries: list[dict[str, float]] = [{} for _ in self.members.names]
        for number, found in enumerate(self.members.take_statistics() or []):
            dist.all_reduce(found.sums)
            summaries[number] = found.summary()
        bad = ~np.isfinite(values)
        for number, name in enumerate(self.members.names):
            if bad[:, number].any() and name not in self.failed:
                step = first + int(bad[:, number].argmax())
                self.failed[name] = (
                    f"the loss of step {step} is {values[step - first, number]}: lower optimizer.learning_rate_tempnet"
                )
                if self.progress:
                    self.progress.say(f"{name}: {self.failed[name]}; the others go on")
        if not self.is_first:
            return
        speed = self._speed()
        engine: Any = self.engine
        for number, logger in enumerate(self.loggers.values()):
            for step, value in enumerate(values[:, number], start=first):
                logger.log({"train/loss": float(value)}, step)
            figures = summaries[number] | speed
            figures["learning_rate/tempnet"] = engine.optimizers[number].param_groups[0]["lr"]
            figures["gradient_norm"] = float(engine.gradient_norms[number])
            logger.log({f"train/{key}": value for key, value in figures.items()}, self.step)
        if self.progress:
            tau = [summary["tau_mean"] for summary in summaries if summary]
            self.progress.show(
                self.step,
                float(np.nanmean(values[-1])),
                float(np.mean(tau)) if tau else None,
                self.since_report.units_per_second,
            )
        self.since_report = Throughput()

    def _validate(self, *, with_details: bool) -> dict[str, Any]:
        """Validate every member and log its scores; at the end, export it."""
        results: dict[str, dict[str, Any]] = {}
        self.engine.eval()
        for number, name in enumerate(self.members.names):
            if name in self.failed:
                continue
            with torch.no_grad():
                scores, details = self.members.validate_member(number, with_details=with_details)
            self.histories[name].append({"step": self.step, "scores": scores})
            if name in self.loggers:
                self.loggers[name].log({f"validation/{key}": value for key, value in scores.items()}, self.step)
            if self.progress:
                self.progress.say(f"validation of {name} at step {self.step}: {self.task.describe(scores)}")
            if with_details:
                with naming_full_disk(self.config.run.directory):
                    self.members.export_member(number)
            results[name] = {"validation": scores, "best_rating": None, **(details or {})}
        self.engine.train()
        return {"members": results}

    def _save_more(self, directory: Path) -> None:
        super()._save_more(directory)
        if self.is_first:
            kept = {
                "validations": self.histories,
                "failed": self.failed,
                "unsent": {name: logger.unsent() for name, logger in self.loggers.items()},
            }
            (directory / _MEMBERS_FILE).write_text(json.dumps(kept))


_NETWORKS_FILE = "networks.pt"


class NetworksEngine:
    """Networks, each with its own AdamW, schedule and clipping, in the place of DeepSpeed, which has one gradient norm."""

    def __init__(
        self,
        module: nn.Module,
        networks: Sequence[nn.Module],
        configs: Sequence[TrainingConfig],
        *,
        device: torch.device,
        world_size: int,
    ) -> None:
        self.module = module.to(device)
        self.networks, self.configs, self.device, self.dp_world_size = networks, configs, device, world_size
        self.checkpoint_engine = SafeCheckpointEngine()
        pairs = [
            make_optimizer(
                [
                    {
                        "name": "tempnet",
                        "parameters": list(network.parameters()),
                        "learning_rate": config.optimizer.learning_rate_tempnet,
                    }
                ],
                config,
            )
            for network, config in zip(networks, configs, strict=True)
        ]
        self.optimizers = [optimizer for optimizer, _ in pairs]
        self.schedulers = [scheduler for _, scheduler in pairs]
        for network in networks:
            for parameter in network.parameters():
                parameter.grad = torch.zeros_like(parameter)
        self.gradient_norms: list[torch.Tensor] = []
        """L2 norm of the gradient of every network in the last step, before clipping."""

    def zero_optimization(self) -> bool:
        """Return False: nothing is divided among workers."""
        return False

    def train(self, mode: bool = True) -> None:
        """Set the mode of the module."""
        self.module.train(mode)

    def eval(self) -> None:
        """Set the module to eval mode."""
        self.module.eval()

    def step(self) -> None:
        """Average the gradients over the workers, clip those of every network by themselves, and update the weights."""
        if self.dp_world_size > 1:
            self._average_gradients()
        self.gradient_norms = [
            nn.utils.clip_grad_norm_(network.parameters(), config.optimizer.max_grad_norm or float("inf"))
            for network, config in zip(self.networks, self.configs, strict=True)
        ]
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            scheduler.step()

    def _average_gradients(self) -> None:
        """Average all gradients over the workers, in one message."""
        gradients = [parameter.grad for network in self.networks for parameter in network.parameters()]
        joined = torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])
        dist.all_reduce(joined)
        joined.div_(self.dp_world_size)
        nn.utils.vector_to_parameters(joined, [gradient for gradient in gradients if gradient is not None])

    def save_checkpoint(self, directory: str, *, tag: str, **_: Any) -> None:
        """Write weights, optimizers and schedules; only the first worker writes, because all hold the same."""
        if dist.get_rank() != 0:
            return
        (Path(directory) / tag).mkdir()
        state = {
            "networks": [network.state_dict() for network in self.networks],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
        }
        self.checkpoint_engine.save(state, str(Path(directory) / tag / _NETWORKS_FILE))

    def load_checkpoint(self, directory: str, *, tag: str, **_: Any) -> None:
        """Load what :meth:`save_checkpoint` wrote, whatever number of workers wrote it."""
        state = self.checkpoint_engine.load(str(Path(directory) / tag / _NETWORKS_FILE), map_location="cpu")
        for network, value in zip(self.networks, state["networks"], strict=True):
            network.load_state_dict(value)
        for optimizer, value in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(value)
        for scheduler, value in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(value)
