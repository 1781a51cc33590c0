"""Every contrastive loss of the family on any number of ranks: memory O(tile² + B·d), gradients exact at any world size.

With unit rows e_I, e_T, S_ij = ⟨e_I(x_i), e_T(t_j)⟩ and h_ij = S_ij − S_ii, the loss is ½ (mean over image anchors + mean
over text anchors) of what `config` names and `normalisers` defines. One call does, in this order:

    1. gather the embeddings, ids and temperatures of all ranks
    2. pass 1 over the tiles of this rank's rows (`tiles`), then complete the columns' sums over the ranks
    3. losses and the shifts c of all anchors, on every rank (`normalisers`): O(B)
    4. pass 2: the gradients; the texts' are summed over the ranks, each of which takes its own rows
    5. write the per-sample state

All of it in the forward pass and outside autograd, to which one node is left that scales finished gradients by W: *averaging*
parameter gradients over the ranks, as DDP and DeepSpeed do, then gives the gradient of the loss.

Shapes: W ranks, B global batch, b = B/W local, d embedding; modalities 0 = image, 1 = text come first, (2, B).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from tempnet.contrastive.config import LOSS_KINDS, ContrastiveLossConfig, LossKind, check_negatives, gamma_at
from tempnet.contrastive.cyclic import cyclic_terms
from tempnet.contrastive.normalisers import Normalised, Repeats, in_batch, moving_average
from tempnet.contrastive.pairs import PositivePairs
from tempnet.contrastive.state import SampleState
from tempnet.contrastive.temperatures import LearnedTemperature, momentum_step
from tempnet.contrastive.tiles import SimilarityTiles, artanh_slope, clamp_cosines
from tempnet.contrastive.world import World
from tempnet.network import TempNet

__all__ = [
    "LOSS_KINDS",
    "ContrastiveLoss",
    "ContrastiveLossConfig",
    "ContrastiveOutput",
    "LossKind",
    "check_negatives",
    "gamma_at",
]


class ContrastiveOutput(TypedDict):
    """Of one batch; all but the loss are detached, and of this rank's rows."""

    loss: Tensor
    """Scalar, the same on every rank."""
    tau: Tensor
    """(2, b), as used in this batch."""
    log_u: Tensor | None
    """(2, b) the estimates, this batch included; None for the in-batch losses."""
    dual_gradient: Tensor | None
    """(2, b) G = log u + ρ − E_w[h/τ], zero where a sample's own τ is at its best; None where no robust loss learns τ."""


class ContrastiveLoss(nn.Module):
    """The loss that `config` names; its parameters are the learned temperature's or the TempNets'.

    Args:
        config: which loss.
        image_tempnet, text_tempnet: for the losses with a TempNet, and only for those.
        state: with `config.state_columns`, for the losses that have any, and only for those.
        world: the ranks that share a batch; default: this process alone.

    Raises:
        ValueError: if networks or state are missing or superfluous.
    """

    def __init__(
        self,
        config: ContrastiveLossConfig,
        *,
        image_tempnet: TempNet | None = None,
        text_tempnet: TempNet | None = None,
        state: SampleState | None = None,
        world: World | None = None,
    ) -> None:
        super().__init__()
        self.config, self.state, self.world = config, state, world or World.alone()
        has_tempnet = config.kind.temperature == "tempnet"
        for network in (image_tempnet, text_tempnet):
            if (network is not None) != has_tempnet:
                raise ValueError(f"the loss {config.name} takes {'two TempNets' if has_tempnet else 'no TempNet'}")
        columns = set(config.state_columns)
        if (set() if state is None else set(state.columns)) != columns:
            raise ValueError(
                f"the loss {config.name} keeps {', '.join(sorted(columns)) or 'nothing'} per sample: "
                f"make its SampleState with config.state_columns, or None if there are none"
            )
        self.image_tempnet, self.text_tempnet = image_tempnet, text_tempnet
        self.learned = LearnedTemperature(config) if config.kind.temperature == "learned" else None

    def forward(
        self, image: Tensor, text: Tensor, ids: Tensor, image_ids: Tensor, *, gamma: float = 1.0
    ) -> ContrastiveOutput:
        """The loss of a batch; in training mode it also moves the per-sample state on.

        Args:
            image, text: (b, d) unit rows; every rank has as many.
            ids: (b,) int64 sample numbers.
            image_ids: (b,) int64; pairs with the same one are no negatives of each other.
            gamma: γ of the moving average, in (0, 1] (`gamma_at`).

        Raises:
            ValueError: if the state knows no such id, or has no temperature for one.
        """
        with torch.autocast(image.device.type, enabled=False):
            image, text = _exact(image), _exact(text)
            batch = self._gather(image.detach(), text.detach(), ids, image_ids)
            tau = self._temperatures(image, text, batch).to(image.dtype)
            needs = _Needs(
                image=image.requires_grad and torch.is_grad_enabled(),
                text=text.requires_grad and torch.is_grad_enabled(),
                tau=(tau.requires_grad and torch.is_grad_enabled()) or self._steps_tau,
            )
            result = self._compute(image.detach(), text.detach(), tau.detach(), batch, gamma, needs)
            if self.state is not None and self.training:
                self._update_state(self.state, batch, result)
            loss = _Attach.apply(
                image, text, tau, result.loss, result.image_grad, result.text_grad, result.tau_grad, self.world.size
            )
        part, log_u = batch.part, result.normalised.log_u
        has_dual = self.config.kind.uses_rho and result.dual_gradient is not None
        return {
            "loss": loss,
            "tau": tau.detach(),
            "log_u": None if log_u is None else log_u[:, part],
            "dual_gradient": result.dual_gradient[:, part] if has_dual and result.dual_gradient is not None else None,
        }

    @property
    def _steps_tau(self) -> bool:
        """Per-sample temperatures move by themselves, whatever needs a gradient."""
        return self.config.kind.temperature == "per_sample" and self.training

    def _gather(self, image: Tensor, text: Tensor, ids: Tensor, image_ids: Tensor) -> _Batch:
        """Everything of the other ranks but their temperatures."""
        all_ids, all_image_ids = self.world.gather(torch.stack([ids, image_ids], dim=1)).T.contiguous()
        part = self.world.part(len(all_ids))
        stored: dict[str, Tensor] = {}
        if self.state is not None:
            self.state.check(all_ids)
            stored = self.state.read(all_ids)
        diagonal = self.world.gather((image * text).sum(-1))
        return _Batch(all_ids, part, PositivePairs.find(all_image_ids, part), self.world.gather(text), diagonal, stored)

    def _temperatures(self, image: Tensor, text: Tensor, batch: _Batch) -> Tensor:
        """τ (2, b) of this rank's anchors, with a graph where it is learned by gradients."""
        if self.learned is not None:
            return self.learned().expand(2, len(image))
        if self.image_tempnet is not None and self.text_tempnet is not None:
            return torch.stack([self.image_tempnet(image), self.text_tempnet(text)])
        if (stored := batch.stored.get("tau")) is not None:
            if num_missing := int(stored.isnan().any(0).sum()):
                first = int(batch.ids[stored.isnan().any(0)][0])
                raise ValueError(
                    f"{self.config.name}: {num_missing} of {len(batch.ids)} ids of the batch have no temperature, "
                    f"the first is id {first}: fill the state's column tau from the table"
                )
            return stored[:, batch.part]
        return image.new_full((2, len(image)), 1.0 if self.config.kind.temperature == "free" else self.config.tau)

    @torch.no_grad()
    def _compute(
        self, image: Tensor, text: Tensor, local_tau: Tensor, batch: _Batch, gamma: float, needs: _Needs
    ) -> _Result:
        """Steps 1 to 4 of the head of this file."""
        config, world, part, num_pairs = self.config, self.world, batch.part, len(batch.ids)
        tau = world.gather(local_tau.T).T
        is_artanh = config.kind.temperature == "free"
        diagonal = 2.0 * clamp_cosines(batch.diagonal).atanh() if is_artanh else batch.diagonal
        tiles = SimilarityTiles(image, batch.text, batch.pairs, tile_size=config.tile_size, is_artanh=is_artanh)
        scale = tau.reciprocal()
        partial = image.new_full((2, num_pairs), -torch.inf)
        partial[0, part], partial[1] = tiles.logsumexp(scale[0, part], scale[1])
        log_sums = world.gather(partial[None]).logsumexp(0) - diagonal * scale
        normalised = self._normalise(log_sums, tau, batch, gamma)
        loss = normalised.losses.sum() / (2 * num_pairs)
        result = _Result(loss, normalised, batch)

        # Of the loss itself: 1/(2B) goes into the shift of every weight.
        shift = normalised.log_scale + math.log(2 * num_pairs)
        total_weights = (log_sums - shift).exp()
        if needs.any:
            sums = tiles.gradients(
                scale[0, part],
                scale[1],
                (diagonal + shift * tau)[0, part],
                (diagonal + shift * tau)[1],
                with_image=needs.image,
                with_text=needs.text,
                with_products=needs.tau and not is_artanh,
            )
            # The positives' share: every weight of an anchor also pulls on its own pair, with the other sign.
            own = total_weights.sum(0)[part]
            if is_artanh:
                own = own * artanh_slope(clamp_cosines(batch.diagonal))[part]
            if sums.image is not None:
                result.image_grad = sums.image.addcmul_(own[:, None], text, value=-1.0)
            if sums.text is not None:
                result.text_grad = world.sum_part(sums.text).addcmul_(own[:, None], image, value=-1.0)
            if sums.row_products is not None and sums.column_products is not None:
                products = image.new_zeros(2, num_pairs)
                products[0, part], products[1] = sums.row_products, sums.column_products
                pull = (world.sum(products) - diagonal * total_weights) * scale
                result.dual_gradient = normalised.tau_slope - pull * (2 * num_pairs)
                result.tau_grad = result.dual_gradient[:, part] / (2 * num_pairs)
        if config.kind.is_cyclic:
            terms = cyclic_terms(image, text, config.cyclic_in_modal, config.cyclic_cross_modal, world)
            result.loss = loss + terms.value.to(loss.dtype)
            if result.image_grad is not None:
                result.image_grad += terms.image_grad
            if result.text_grad is not None:
                result.text_grad += terms.text_grad
        return result

    def _normalise(self, log_sums: Tensor, tau: Tensor, batch: _Batch, gamma: float) -> Normalised:
        num_negatives = batch.pairs.num_negatives
        if self.config.kind.normaliser == "in_batch":
            return in_batch(log_sums, tau, num_negatives > 0)
        rho = self.config.rho if self.config.kind.uses_rho else 0.0
        log_u = batch.stored["log_u"].to(log_sums.dtype)
        return moving_average(log_sums, tau, num_negatives, log_u, Repeats(batch.ids), gamma=gamma, rho=rho)

    def _update_state(self, state: SampleState, batch: _Batch, result: _Result) -> None:
        assert result.normalised.log_u is not None
        values = {"log_u": result.normalised.log_u}
        if self._steps_tau:
            assert result.dual_gradient is not None
            has_negatives = batch.pairs.num_negatives > 0
            gradient = Repeats(batch.ids).mean(result.dual_gradient, has_negatives)
            old = {name: batch.stored[name].to(gradient.dtype) for name in ("tau", "momentum")}
            new = momentum_step(old["tau"], old["momentum"], gradient, self.config)
            for name, value in zip(("tau", "momentum"), new, strict=True):
                values[name] = torch.where(has_negatives, value, old[name])
        state.update(batch.ids, values)


class _Attach(torch.autograd.Function):
    """A number to which gradients are attached that were computed with it."""

    @staticmethod
    def forward(
        ctx: Any,
        image: Tensor,
        text: Tensor,
        tau: Tensor,
        loss: Tensor,
        image_grad: Tensor | None,
        text_grad: Tensor | None,
        tau_grad: Tensor | None,
        world_size: int,
    ) -> Tensor:
        ctx.save_for_backward(image_grad, text_grad, tau_grad)
        ctx.world_size = world_size
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        factor = grad * ctx.world_size
        grads = [None if saved is None else saved * factor for saved in ctx.saved_tensors]
        return *grads, None, None, None, None, None


@dataclass(frozen=True, slots=True)
class _Batch:
    """What all ranks know of a batch."""

    ids: Tensor
    """(B,)."""
    part: slice
    """Of the B, this rank's."""
    pairs: PositivePairs
    text: Tensor
    """(B, d)."""
    diagonal: Tensor
    """(B,) cosines of the positives."""
    stored: dict[str, Tensor]
    """The columns of the state, each (2, B)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Needs:
    """Which gradients are wanted."""

    image: bool
    text: bool
    tau: bool

    @property
    def any(self) -> bool:
        return self.image or self.text or self.tau


@dataclass(slots=True)
class _Result:
    """What a batch yields: gradients of this rank's rows, exactly those of the loss."""

    loss: Tensor
    normalised: Normalised
    batch: _Batch
    image_grad: Tensor | None = None
    text_grad: Tensor | None = None
    tau_grad: Tensor | None = None
    """(2, b)."""
    dual_gradient: Tensor | None = None
    """(2, B) 2B·∂loss/∂τ of every anchor."""


def _exact(x: Tensor) -> Tensor:
    """float32 at least: in bfloat16 a similarity at τ = 0.005 is off by a factor of two."""
    return x if x.dtype == torch.float64 else x.float()
