"""The task of training the TempNets of several runs on the embeddings of the same frozen towers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from jobs.engine.hardware import worker_device
from jobs.engine.rho import ContrastiveSteering
from jobs.engine.task import StepResult
from jobs.tasks.dual_encoder.config import ClipConfig
from jobs.tasks.dual_encoder.models import add_loss, build_encoder
from jobs.tasks.dual_encoder.scores import score
from jobs.tasks.dual_encoder.task import ClipTask, inputs_of, tensors_of
from jobs.tasks.frozen_base import check_checkpoint
from jobs.tasks.side_by_side import MembersTask
from pipelines.stream import Batch
from pipelines.text.tokenization import load_tokenizer
from tempnet.contrastive.config import gamma_at
from tempnet.contrastive.losses import PairStatistics, contrastive_losses
from tempnet.models.temperature_dual_encoder import TemperatureDualEncoder


class SideBySideTask(MembersTask, ClipTask):
    """The task of training the TempNets of several runs on the same towers (`jobs.engine.side_by_side.MemberTask`).

    The embeddings of a batch and their similarities are computed once, or the embeddings are read. Every member has its own
    loss, with its TempNets and its per-sample state, and its own ρ if that is adjusted.
    """

    config: ClipConfig
    module: Any

    def build(self, *, is_fresh: bool) -> None:
        """Build the towers once, and every loss as in a run of its own; find the validation set."""
        device, num_pairs = worker_device(self.config.workers), self.data.train.num_pairs
        tokenizer = load_tokenizer(self.config.tokenizer, needs_eos=False)
        encoder = None if self.config.model.features else build_encoder(self.config, tokenizer)
        self.modules: list[TemperatureDualEncoder] = []
        for config in self.configs:
            module = add_loss(encoder, config, num_pairs=num_pairs, device=device)
            if is_fresh and config.temperature.projection:
                self.init_prototypes(module, config, device)
            self.modules.append(module)
        self.module = nn.ModuleList(self.modules)
        self.networks = [module.loss for module in self.modules]
        self.steerings = [
            ContrastiveSteering(config.temperature, module.loss, num_pairs)
            for config, module in zip(self.configs, self.modules, strict=True)
        ]
        self.retrieval = self.find_held_out()

    def train_step(self, engine: Any, batch: Batch, *, step: int, num_units: int, with_statistics: bool) -> StepResult:
        """Train all networks on one global batch; the loss has one entry for each member."""
        tensors = tensors_of(batch, engine.device)
        image, text = self.modules[0].embed(**inputs_of(tensors))
        losses = [config.temperature.loss_config for config in self.configs]
        outputs = contrastive_losses(
            [module.loss for module in self.modules],
            image,
            text,
            tensors["ids"],
            tensors["image_ids"],
            gammas=[gamma_at(loss, step, self.config.run.num_steps) for loss in losses],
        )
        # Gradients are W times those of this rank's part of the loss, because the engine averages them.
        values = torch.stack([output["loss"] for output in outputs])
        values.sum().backward()
        are_steered = [
            steering.follows(optimizer) for steering, optimizer in zip(self.steerings, engine.optimizers, strict=True)
        ]
        engine.step()
        for steering, is_steered, output in zip(self.steerings, are_steered, outputs, strict=True):
            if is_steered:
                steering.observe_pairs(output)
        if with_statistics:
            self.statistics = [PairStatistics.of(output, loss) for output, loss in zip(outputs, losses, strict=True)]
        return StepResult(values.detach() / self.world_size, None)

    def validate_member(self, number: int, *, with_details: bool) -> tuple[dict[str, float], dict[str, Any] | None]:
        """Validate one member; the embeddings of the validation set and its recalls are computed once, for all members."""
        module, device = self.modules[number], worker_device(self.config.workers)
        scores, details = score(module, self.held_out(module, device), device, with_details=with_details)
        return scores | self.steerings[number].scores(), details

    def export_member(self, number: int) -> None:
        """Write the export of one member into its own directory."""
        self.export_to(self.configs[number].run.export_directory, self.modules[number])

    def save(self, directory: Path) -> None:
        """Save per-sample state and ρ of every member in a directory of its own, and the name of the towers."""
        for number, (module, steering) in enumerate(zip(self.modules, self.steerings, strict=True)):
            own = _directory_of(directory, number)
            own.mkdir()
            steering.save(own)
            if module.loss.state is not None:
                module.loss.state.save(own)
        if self.data.towers is not None and self.rank == 0:
            self.data.towers.save(directory)

    def load(self, directory: Path, num_writers: int) -> None:
        """Load what :meth:`save` wrote, whatever number of workers wrote it."""
        check_checkpoint(directory, self.data.towers)
        for number, (module, steering) in enumerate(zip(self.modules, self.steerings, strict=True)):
            own = _directory_of(directory, number)
            steering.load(own)
            if module.loss.state is not None:
                module.loss.state.load(own, num_writers)


def _directory_of(directory: Path, number: int) -> Path:
    return directory / f"member-{number:03d}"
