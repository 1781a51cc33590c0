"""The losses as other trainers take them: Transformers' `Trainer`, sentence-transformers, and the loop of open_clip.

Shapes: B samples on this rank, T tokens, V effective vocabulary, d dimensions of an embedding.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tempnet.contrastive.config import ContrastiveLossConfig, gamma_at
from tempnet.contrastive.losses import ContrastiveLoss
from tempnet.contrastive.normalisers import NormaliserNet
from tempnet.contrastive.state import SampleState, World
from tempnet.contrastive.unimodal import UnimodalLoss
from tempnet.network import TempNet
from tempnet.network_config import TempNetConfig
from tempnet.softmax.config import TemperatureLossConfig
from tempnet.softmax.reference import language_model_loss


class TrainerLoss:
    """Language-model loss for `transformers.Trainer(model, compute_loss_func=TrainerLoss(model, tempnet, config))`.

    The TempNet, which must read logits (else ValueError) and whose `input_size` is the effective vocabulary V, becomes the
    submodule `tempnet` of the causal language model, so that the trainer's optimizer, precision and checkpoints include it;
    save it by itself with `model.tempnet.save_pretrained(directory + "/tempnet")`. The logits are materialised:
    `jobs.train_lm` computes the same loss, such as `TemperatureLossConfig(name="proper", rho=0.0)`, without them.

    With several processes set `ddp_find_unused_parameters=False` in the `TrainingArguments`: else DistributedDataParallel
    fails with "Expected to mark a variable ready only once". FSDP and ZeRO 3 were not tried.
    """

    def __init__(self, model: nn.Module, tempnet: TempNet, config: TemperatureLossConfig) -> None:
        if tempnet.config.kind != "logits":
            raise ValueError(f"TempNetConfig.kind = {tempnet.config.kind!r}: here a TempNet reads logits only")
        self.tempnet, self.config = tempnet, config
        model.add_module("tempnet", tempnet)

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Return the loss of a batch, from the model's outputs with `logits` (B, T, V or more).

        The labels (B, T) are as Transformers has them: not shifted, -100 where there is none. `num_items_in_batch` is the
        trainer's divisor of the sum over tokens.
        """
        logits = outputs.logits[:, :-1, : self.tempnet.config.input_size].flatten(0, 1)
        targets = labels[:, 1:].flatten().to(logits.device)
        loss, _ = language_model_loss(logits, targets, self.config, self.tempnet, num_targets=num_items_in_batch)
        return loss


class _PairLoss(nn.Module):
    """A contrastive loss whose γ follows its own count of training batches, and whose state waits for a device and ranks.

    Count and state are part of its state_dict: of the state the part of this process, which alone may load it again.
    """

    def __init__(self, config: ContrastiveLossConfig, num_samples: int | None, num_steps: int | None) -> None:
        super().__init__()
        if config.has_falling_gamma and num_steps is None:
            raise ValueError(
                f"γ of the loss {config.name} falls during the training: give num_steps, the number of training batches, or "
                "gamma_schedule='constant'"
            )
        self.state: SampleState | None = None
        if config.state_columns:
            if num_samples is None:
                raise ValueError(f"the loss {config.name} keeps a state per sample: give num_samples, their number")
            self.state = SampleState(num_samples, config.state_columns)
        self.num_steps, self.step = num_steps or 1, 0

    def get_extra_state(self) -> dict[str, Any]:
        """Return, for state_dict, what is no parameter: the count of batches, and the state with its place among ranks."""
        state = self.state or SampleState(0, {})
        return {"step": self.step, "rank": state.world.rank, "size": state.world.size, "columns": state.columns}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Continue from what :meth:`get_extra_state` returned; that of another rank or other samples raises ValueError."""
        self.step = state["step"]
        if self.state is None:
            return
        world = World.current() if state["size"] > 1 else World.alone()
        self.state = SampleState(self.state.num_samples, dict.fromkeys(self.state.columns, 0.0), world=world)
        own, saved = (
            {name: tuple(column.shape) for name, column in columns.items()}
            for columns in (self.state.columns, state["columns"])
        )
        if (state["rank"], state["size"], saved) != (world.rank, world.size, own):
            raise ValueError(
                f"the state was saved by rank {state['rank']} of {state['size']} with columns {saved}; this is rank "
                f"{world.rank} of {world.size}, whose loss keeps {own}"
            )
        for name, column in self.state.columns.items():
            column.copy_(state["columns"][name])

    def _next_gamma(self, loss: ContrastiveLoss, device: torch.device) -> float:
        """Return γ of a batch. The first one finds device and ranks, as a script may make the loss before either."""
        world = World.current()
        if world != loss.world:
            for parameter in loss.parameters():
                dist.broadcast(parameter.data, 0)
                if parameter.requires_grad:
                    parameter.register_hook(lambda gradient: world.sum(gradient / world.size))
        if self.state is not None:
            self.state = self.state.placed(world, device)
        loss.world, loss.state = world, self.state
        gamma = gamma_at(loss.config, self.step, self.num_steps)
        self.step += loss.training
        return gamma


class SentencePairLoss(_PairLoss):
    """Contrastive loss of (anchor, positive) pairs for `sentence_transformers.SentenceTransformerTrainer`.

    It is any loss of `tempnet.contrastive.config` but cyclip. Those that keep a state per sample (sogclr, isogclr, tempnet)
    need `num_samples`, the number N of training pairs, and read the sample's id from the data set's column `label`; those
    whose γ falls (fastclip, neuclip) need `num_steps`, the number of training batches of this process. A loss with a TempNet
    makes a new one for the embeddings of the `SentenceTransformer`, unless one is given. Networks begin at random:
    `loss.tempnet.init_prototypes` and `loss.bimodal.image_normaliser.init_prototypes` set them to embeddings.

    The trainer's checkpoints hold the encoder alone. To resume, every process saves its `loss.state_dict()` beside them, in
    a callback's `on_save`, and loads it before `train(resume_from_checkpoint=…)`: else networks, temperatures, state and γ
    begin anew, without a word.

    With several processes all samples are negatives of each other, and the gradients of the loss's own parameters are
    averaged. In eval mode or without gradients no id is read, nothing is stored, and every sample is on its first visit, at
    the configuration's `tau` if samples have their own.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ContrastiveLossConfig,
        *,
        num_samples: int | None = None,
        num_steps: int | None = None,
        tempnet: TempNet | None = None,
    ) -> None:
        super().__init__(config, num_samples, num_steps)
        self.model = model
        encoder: Any = model
        size = int(encoder.get_embedding_dimension())
        if tempnet is None and config.kind.temperature == "tempnet":
            tempnet = new_tempnet(config, size)
        normaliser = NormaliserNet.for_loss(config, size)
        self.loss = UnimodalLoss(config, tempnet=tempnet, normaliser=normaliser, state=self.state)

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """Return the loss of a batch of two columns, anchors and positives; `labels` (B,) are the ids of its samples.

        Another number of columns, or missing ids for a loss with a state per sample, raise ValueError.
        """
        embeddings = [F.normalize(self.model(column)["sentence_embedding"], dim=-1) for column in sentence_features]
        if len(embeddings) != 2:
            raise ValueError(
                f"the data set has {len(embeddings)} columns of text, but 2 are needed: anchor and positive"
            )
        anchors, positives = embeddings
        bimodal, ids = self.loss.bimodal, _distinct_ids(anchors)
        self.loss.train(self.training and torch.is_grad_enabled())  # the trainer puts only the encoder into eval mode
        gamma = self._next_gamma(bimodal, anchors.device)
        if (columns := bimodal.config.state_columns) and self.loss.training:
            ids = _ids(bimodal.config, labels, anchors)
        elif columns:
            columns |= {"tau": bimodal.config.tau} if "tau" in columns else {}  # no table has one for them
            bimodal.state = SampleState(len(ids) * bimodal.world.size, columns, world=bimodal.world, device=ids.device)
        return self.loss(anchors, positives, ids, gamma=gamma)["loss"]


class ClipLoss(_PairLoss):
    """Contrastive loss between images and texts with the signature of `open_clip.ClipLoss`.

    `logit_scale` is not used: the temperature is that of the loss, whose parameters belong into the optimizer. With several
    processes all samples are negatives of each other, and the gradients of these parameters are averaged; average those of
    the towers too, as DistributedDataParallel does. Losses with networks need `embedding_size` d, those with a state per
    sample `num_samples`, the number N of training pairs, those whose γ falls `num_steps`, the number of training batches of
    this process. Networks begin at random: `loss.image_tempnet.init_prototypes` and its like set them to embeddings.

    To resume, every process saves and loads its `state_dict()`, which open_clip's checkpoints do not hold. Set `accum_freq`
    to 1: open_clip else calls the loss that many times for a batch, so that gradients of the loss's own parameters are as
    many times too large, and a sample's own temperature makes as many steps.
    """

    def __init__(
        self,
        config: ContrastiveLossConfig,
        *,
        embedding_size: int | None = None,
        num_samples: int | None = None,
        num_steps: int | None = None,
    ) -> None:
        super().__init__(config, num_samples, num_steps)
        networks: dict[str, Any] = {}
        has_tempnets = config.kind.temperature == "tempnet"
        if has_tempnets or config.kind.normaliser == "predicted":
            if embedding_size is None:
                raise ValueError(
                    f"the loss {config.name} has networks: give embedding_size, the dimension of the embeddings"
                )
            for side in ("image", "text"):
                networks[f"{side}_tempnet"] = new_tempnet(config, embedding_size) if has_tempnets else None
                networks[f"{side}_normaliser"] = NormaliserNet.for_loss(config, embedding_size)
        self.loss = ContrastiveLoss(config, state=self.state, **networks)

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | None = None,
        logit_bias: Tensor | None = None,
        output_dict: bool = False,
        *,
        ids: Tensor | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Return the loss of a batch of unit vectors (B, d), or `{"contrastive_loss": loss}` with `output_dict`.

        Losses with a state per sample need `ids` (B,), int64 in [0, N), else ValueError is raised; pairs with the same id are
        not negatives of each other. `logit_scale` and `logit_bias` are not used.
        """
        ids = _ids(self.loss.config, ids, image_features)
        gamma = self._next_gamma(self.loss, ids.device)
        loss = self.loss(image_features, text_features, ids, ids, gamma=gamma)["loss"]
        return {"contrastive_loss": loss} if output_dict else loss


def new_tempnet(config: ContrastiveLossConfig, dim: int) -> TempNet:
    """Return a new TempNet on embeddings of dimension `dim`, with ρ and the range of τ of a loss."""
    return TempNet(TempNetConfig.for_embeddings(dim, rho=config.rho, tau_min=config.tau_min, tau_max=config.tau_max))


def _ids(config: ContrastiveLossConfig, ids: Tensor | None, like: Tensor) -> Tensor:
    """Return the ids of a batch, distinct ones if none are given; losses with a state per sample raise ValueError then."""
    if ids is not None:
        return ids.to(like.device).long()
    if config.state_columns:
        raise ValueError(f"the loss {config.name} keeps a state per sample: give the samples' ids")
    return _distinct_ids(like)


def _distinct_ids(like: Tensor) -> Tensor:
    return torch.arange(len(like), device=like.device) + World.current().rank * len(like)
