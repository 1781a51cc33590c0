"""Contrastive losses between images and texts on any number of ranks, with memory O(tile² + B·d) and exact gradients.

With unit vectors e_I and e_T, S_ij = ⟨e_I(x_i), e_T(t_j)⟩ and h_ij = S_ij − S_ii, the loss is ½ (mean over image
anchors + mean over text anchors) of the anchor losses that `normalisers` defines for each loss of `config`. `step` computes
it with all gradients. The backward pass needs no communication: one autograd node multiplies these by W, so that *averaging*
the parameter gradients over the ranks, as DDP and DeepSpeed do, gives the gradient of the loss. Several losses of one
batch, each with networks and state of its own, share its similarities.

Shapes: W ranks, B pairs in the global batch, b = B/W pairs on this rank, d dimensions of an embedding. Values of both
modalities are (2, B) or (2, b), where index 0 is the image and 1 the text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from tempnet.contrastive.config import ContrastiveLossConfig
from tempnet.contrastive.normalisers import LARGEST_GRADIENT, NormaliserNet, Repeats
from tempnet.contrastive.state import SampleState, World
from tempnet.contrastive.step import AttachGradients, BatchLoss, GatheredBatch, Needs, StepResult, compute
from tempnet.contrastive.tiles import PositivePairs, SimilarityTiles
from tempnet.network import TempNet
from tempnet.statistics import histogram_of, standard_deviation, sum_tau, summarise_tau


class ContrastiveOutput(TypedDict):
    """Result for one batch. All tensors but the loss are detached, and contain only this rank's pairs."""

    loss: Tensor
    """Loss, a scalar that is the same on every rank."""
    tau: Tensor
    """Temperatures that were used in this batch: (2, b)."""
    log_u: Tensor | None
    """Logarithms of the normaliser estimates u, including this batch: (2, b); None for losses without such estimates."""
    dual_gradient: Tensor | None
    """Gradient in τ, G = log u + ρ − E_w[h/τ], which is 0 at the optimal τ: (2, b). None if no robust loss learns τ
    in this call."""


class ContrastiveLoss(nn.Module):
    """Contrastive loss between images and texts; its parameters are its learned temperature or its networks, if any.

    A loss with a TempNet needs two of them, one that predicts its normaliser two `NormaliserNet`, and one that keeps values
    per sample a state with the columns `config.state_columns`; what is missing or superfluous raises ValueError. The state
    is not part of the state_dict: every rank saves its own. By default only this process shares a batch.
    """

    def __init__(
        self,
        config: ContrastiveLossConfig,
        *,
        image_tempnet: TempNet | None = None,
        text_tempnet: TempNet | None = None,
        image_normaliser: NormaliserNet | None = None,
        text_normaliser: NormaliserNet | None = None,
        state: SampleState | None = None,
        world: World | None = None,
    ) -> None:
        super().__init__()
        self.config, self.state, self.world = config, state, world or World.alone()
        for noun, has_networks, networks in (
            ("TempNet", config.kind.temperature == "tempnet", (image_tempnet, text_tempnet)),
            ("NormaliserNet", config.kind.normaliser == "predicted", (image_normaliser, text_normaliser)),
        ):
            if any((network is not None) != has_networks for network in networks):
                raise ValueError(f"the loss {config.name} takes {f'two {noun}s' if has_networks else f'no {noun}'}")
        columns = set(config.state_columns)
        if (set() if state is None else set(state.columns)) != columns:
            raise ValueError(
                f"the loss {config.name} keeps {', '.join(sorted(columns)) or 'nothing'} per sample: "
                f"make its SampleState with config.state_columns, or None if there are none"
            )
        self.image_tempnet, self.text_tempnet = image_tempnet, text_tempnet
        self.image_normaliser, self.text_normaliser = image_normaliser, text_normaliser
        self.learned = LearnedTemperature(config) if config.kind.temperature == "learned" else None

    def forward(
        self, image: Tensor, text: Tensor, ids: Tensor, image_ids: Tensor, *, gamma: float
    ) -> ContrastiveOutput:
        """Compute the loss of a batch; in training mode the per-sample state is updated, in eval mode it is only read.

        Args:
            image, text: (b, d) unit vectors; b must be the same on every rank.
            ids: (b,) int64 sample ids; ValueError if the state has no such sample, or no temperature for it.
            image_ids: (b,) int64; pairs with the same image id are not negatives of each other.
            gamma: γ of the moving average, in (0, 1] (`gamma_at`).
        """
        (output,) = contrastive_losses([self], image, text, ids, image_ids, gammas=[gamma])
        return output

    @property
    def constant_tau(self) -> float | None:
        """The one temperature of all samples, fixed or as learned so far; None if they differ, or there is none."""
        if self.learned is not None:
            return self.learned().item()
        return self.config.tau if self.config.kind.temperature == "fixed" else None

    @property
    def _steps_tau(self) -> bool:
        """Whether per-sample temperatures are updated; they need their gradient even if autograd is off."""
        return self.config.kind.temperature == "per_sample" and self.training

    def _temperatures(self, image: Tensor, text: Tensor, batch: GatheredBatch, state: dict[str, Tensor]) -> Tensor:
        """Return τ (2, b) of this rank's anchors, with an autograd graph if it is learned by backpropagation."""
        if self.learned is not None:
            return self.learned().expand(2, len(image))
        if self.image_tempnet is not None and self.text_tempnet is not None:
            return torch.stack([self.image_tempnet(image), self.text_tempnet(text)])
        if (stored := state.get("tau")) is not None:
            is_missing = stored.isnan().any(0)
            is_complete = stored.is_cuda or not bool(is_missing.any())  # on a GPU, the loss is NaN
            if not is_complete:
                raise ValueError(
                    f"{self.config.name}: {int(is_missing.sum())} of {len(batch.ids)} ids of the batch have no temperature, "
                    f"the first is id {int(batch.ids[is_missing][0])}: fill the state's column tau from the table"
                )
            return stored[:, batch.part]
        return image.new_full((2, len(image)), 1.0 if self.config.kind.temperature == "free" else self.config.tau)

    def _log_normalisers(self, image: Tensor, text: Tensor, tau: Tensor, batch: GatheredBatch) -> Tensor | None:
        """Return the predicted log u (2, b) of this rank's anchors at temperatures (2, b), or −b of the sigmoid loss.

        The networks predict the mean over exp(S_ij/τ_i), of which the positive's S_ii is subtracted.
        """
        if self.learned is not None and self.learned.bias is not None:
            return (-self.learned.bias).expand(2, len(image))
        if self.image_normaliser is None or self.text_normaliser is None:
            return None
        predicted = torch.stack([self.image_normaliser(image, tau[0]), self.text_normaliser(text, tau[1])])
        return predicted.to(tau.dtype) - batch.cosines[batch.part] / tau.detach()

    def _update_state(self, batch: GatheredBatch, stored: dict[str, Tensor], result: StepResult) -> None:
        if self.state is None:
            return
        assert result.log_u is not None
        values = {"log_u": result.log_u}
        if self._steps_tau:
            assert result.dual_gradient is not None
            has_negatives = batch.pairs.num_negatives > 0
            gradient = Repeats(batch.ids).mean(result.dual_gradient, has_negatives)
            tau, momentum = (stored[name].to(gradient.dtype) for name in ("tau", "momentum"))
            new_tau, new_momentum = momentum_step(tau, momentum, gradient, self.config)
            values["tau"] = torch.where(has_negatives, new_tau, tau)
            values["momentum"] = torch.where(has_negatives, new_momentum, momentum)
        self.state.update(batch.ids, values)


def contrastive_losses(
    losses: Sequence[ContrastiveLoss],
    image: Tensor,
    text: Tensor,
    ids: Tensor,
    image_ids: Tensor,
    *,
    gammas: Sequence[float],
) -> list[ContrastiveOutput]:
    """Compute several losses of one batch as :meth:`ContrastiveLoss.forward` does each, with the similarities computed once.

    The losses have networks, state and γ of their own; either all or none are without a temperature, and without a
    normaliser.
    """
    world = losses[0].world
    # At least float32 is needed: in bfloat16, exp(similarity/τ) at τ = 0.005 is off by a factor of two.
    dtype = torch.float64 if image.dtype == torch.float64 else torch.float32
    with torch.autocast(image.device.type, enabled=False):
        image, text = image.to(dtype), text.to(dtype)
        batch = _gather(image.detach(), text.detach(), ids, image_ids, world)
        states = [{} if loss.state is None else loss.state.read(batch.ids) for loss in losses]
        taus = [
            loss._temperatures(image, text, batch, state).to(dtype) for loss, state in zip(losses, states, strict=True)
        ]
        predictions = [loss._log_normalisers(image, text, tau, batch) for loss, tau in zip(losses, taus, strict=True)]
        for state, prediction in zip(states, predictions, strict=True):
            if prediction is not None:
                state["log_u"] = world.gather(prediction.T).T.to(dtype)
        wants_grad = torch.is_grad_enabled()
        needs = Needs(
            image=wants_grad and image.requires_grad,
            text=wants_grad and text.requires_grad,
            tau=any(tau.requires_grad or loss._steps_tau for tau, loss in zip(taus, losses, strict=True)),
        )
        all_tau = world.gather(torch.stack(taus).permute(2, 0, 1)).permute(1, 2, 0).contiguous()
        parts = zip(losses, all_tau, gammas, states, strict=True)
        results = compute(
            batch, [BatchLoss(loss.config, tau, gamma, state) for loss, tau, gamma, state in parts], world, needs
        )
        outputs = []
        for loss, state, tau, prediction, result in zip(losses, states, taus, predictions, results, strict=True):
            if loss.training:
                loss._update_state(batch, state, result)
            outputs.append(_output(loss, batch, result, image, text, tau, prediction))
    return outputs


def _gather(image: Tensor, text: Tensor, ids: Tensor, image_ids: Tensor, world: World) -> GatheredBatch:
    """Collect what this rank needs to know about the global batch, except for what differs between losses."""
    all_ids, all_image_ids = world.gather(torch.stack([ids, image_ids], dim=1)).T.contiguous()
    part = world.part(len(all_ids))
    return GatheredBatch(
        image=image,
        text=world.gather(text),
        cosines=world.gather((image * text).sum(-1)),
        ids=all_ids,
        pairs=PositivePairs.find(all_image_ids, part),
        part=part,
    )


def _output(
    loss: ContrastiveLoss,
    batch: GatheredBatch,
    result: StepResult,
    image: Tensor,
    text: Tensor,
    tau: Tensor,
    prediction: Tensor | None,
) -> ContrastiveOutput:
    """Return what the loss returns, with its gradients attached to embeddings, temperatures and predicted log u, (2, b)."""
    dual, slope = (
        None if gradient is None else gradient[:, batch.part]
        for gradient in (result.dual_gradient, result.prediction_gradient)
    )
    gradients = [None if of_anchors is None else of_anchors / (2 * len(batch.ids)) for of_anchors in (dual, slope)]
    leaves = image, text, tau, prediction
    value = AttachGradients.apply(
        result.loss, loss.world.size, *leaves, result.image_grad, result.text_grad, *gradients
    )
    return {
        "loss": value,
        "tau": tau.detach(),
        "log_u": None if result.log_u is None else result.log_u[:, batch.part],
        "dual_gradient": dual if loss.config.kind.uses_rho else None,
    }


class LearnedTemperature(nn.Module):
    """One temperature τ in [τ_min, τ_max], whose logarithm is a learned parameter, and the bias b of the sigmoid loss.

    Outside the range, τ is the bound, and only gradients that would move the parameter further out are set to 0. A plain
    clamp would set all of them to 0 there, and the parameter could never return.
    """

    def __init__(self, config: ContrastiveLossConfig) -> None:
        super().__init__()
        # A one-element vector, because DeepSpeed cannot broadcast zero-dimensional parameters.
        self.log_tau = nn.Parameter(torch.full((1,), math.log(config.tau)))
        self.bias = nn.Parameter(torch.full((1,), config.bias)) if config.kind.normaliser == "none" else None
        self.bounds = math.log(config.tau_min), math.log(config.tau_max)

    def forward(self) -> Tensor:
        """Return τ, (1,)."""
        return _ClampReturning.apply(self.log_tau, *self.bounds).exp()


class _ClampReturning(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float, high: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.bounds = low, high
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,), (low, high) = ctx.saved_tensors, ctx.bounds
        leads_out = ((x <= low) & (grad > 0)) | ((x >= high) & (grad < 0))  # A descent step goes against the gradient.
        return torch.where(leads_out, 0.0, grad), None, None


def momentum_step(
    tau: Tensor, momentum: Tensor, gradient: Tensor, config: ContrastiveLossConfig
) -> tuple[Tensor, Tensor]:
    """Return τ and m, (2, B) each, after a step of isogclr: m ← (1−β)m + β·clip(G, ±5), then τ ← Π[τ − η·m]."""
    beta = config.tau_momentum
    clipped = gradient.clamp(-LARGEST_GRADIENT, LARGEST_GRADIENT)
    momentum = (1.0 - beta) * momentum + beta * clipped
    return (tau - config.tau_step * momentum).clamp(config.tau_min, config.tau_max), momentum


def held_out_losses(
    image: Tensor, text: Tensor, image_ids: Tensor, config: ContrastiveLossConfig
) -> Callable[[Tensor], Tensor]:
    """Return a function from temperatures τ (2, B) to the losses (2, B) of all anchors of B held-out pairs, in float64.

    With h_ij = ⟨x_i, y_j⟩ − ⟨x_i, y_i⟩ and N(i) the n_i pairs with a different image id than pair i, anchor i has the loss

        in batch   log(1 + Σ_{j∈N(i)} exp(h_ij/τ_i))                          the cross-entropy
        global     τ_i·(log( (1/n_i) Σ_{j∈N(i)} exp(h_ij/τ_i) ) + ρ)          the robust loss (TempNet Eq. 2 and 8)

    All pairs are one batch: the global loss uses the exact mean over them instead of a moving average. If ρ is not below
    log n_i, the lowest τ is the best. Embeddings are (B, d) unit vectors and image ids (B,) integers; the loss must have
    temperatures (not `temperature_free`).
    """
    ids = torch.arange(len(image), device=image.device)
    batch = _gather(image.double(), text.double(), ids, image_ids, World.alone())
    stored = {"log_u": batch.cosines.new_full((2, len(image)), -torch.inf)}  # −inf: there is no earlier estimate.
    tiles = SimilarityTiles(batch.image, batch.text, batch.pairs, tile_size=config.tile_size)

    def losses(tau: Tensor) -> Tensor:
        tau = tau.double()
        scales = tau.reciprocal()
        sums = zip(tiles.logsumexp(scales[:1], scales[1:]), scales.split(1), strict=True)
        log_sums = torch.cat([own.relative_to(batch.cosines, scale) for own, scale in sums])
        return BatchLoss(config, tau, 1.0, stored).normalise(log_sums, batch).losses

    return losses


_SCALARS = (
    "num_pairs",
    "tau",
    "tau_squared",
    "num_at_lower_bound",
    "num_at_upper_bound",
    "tau_first",
    "tau_second",
    "num_estimates",
    "log_u",
    "log_u_squared",
    "num_gradients",
    "dual_gradient",
    "dual_gradient_absolute",
)


@dataclass(frozen=True, slots=True)
class PairStatistics:
    """Sums over pairs, and a histogram of the τ of both members over [τ₀, τ_max]."""

    sums: Tensor
    """Scalars in the order of _SCALARS, followed by the histogram, in one float64 vector."""
    config: ContrastiveLossConfig
    """Configuration of the loss; `tau_min` and `tau_max` are the ends of the histogram."""
    members: tuple[str, str] = ("image", "text")
    """Names of the two members of a pair, for the names of their mean temperatures in :meth:`summary`."""

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        output: ContrastiveOutput,
        config: ContrastiveLossConfig,
        members: tuple[str, str] = ("image", "text"),
    ) -> PairStatistics:
        """Compute the statistics of one rank's part of a batch."""
        tau, tau_min, tau_max = output["tau"].double(), config.tau_min, config.tau_max
        sums = dict.fromkeys(_SCALARS, tau.new_zeros(())) | sum_tau(tau, tau_min, tau_max)
        sums["num_pairs"] = tau.new_tensor(tau.shape[1])
        sums["tau_first"], sums["tau_second"] = tau.sum(1)
        if (log_u := output["log_u"]) is not None:
            known = log_u[log_u.isfinite()].double()  # A pair that never had a negative has no estimate.
            sums["num_estimates"] = tau.new_tensor(known.numel())
            sums["log_u"], sums["log_u_squared"] = known.sum(), known.square().sum()
        if (gradient := output["dual_gradient"]) is not None:
            sums["num_gradients"] = tau.new_tensor(gradient.numel())
            sums["dual_gradient"] = gradient.double().sum()
            sums["dual_gradient_absolute"] = gradient.double().abs().sum()
        scalars = torch.stack([sums[name].double() for name in _SCALARS])
        return cls(torch.cat([scalars, histogram_of(tau, tau_min, tau_max).double()]), config, members)

    def summary(self) -> dict[str, float]:
        """Return means, standard deviations, quantiles and shares by name.

        Values that a loss does not have (temperatures, estimates or gradients) are omitted.
        """
        raw = dict(zip(_SCALARS, self.sums.tolist(), strict=False))
        summary: dict[str, float] = {}
        if self.config.kind.temperature != "free":  # A loss without a temperature reports τ = 1, which has no meaning.
            histogram, range_ = self.sums[len(_SCALARS) :], (self.config.tau_min, self.config.tau_max)
            summary = summarise_tau(raw, 2 * raw["num_pairs"], histogram, *range_)
            for member, name in zip(self.members, ("tau_first", "tau_second"), strict=True):
                summary[f"tau_mean_{member}"] = raw[name] / raw["num_pairs"]
        if num_estimates := raw["num_estimates"]:
            mean = raw["log_u"] / num_estimates
            summary |= {
                "log_u_mean": mean,
                "log_u_std": standard_deviation(raw["log_u_squared"] / num_estimates, mean),
            }
        if num_gradients := raw["num_gradients"]:
            summary |= {
                "dual_gradient_mean": raw["dual_gradient"] / num_gradients,
                "dual_gradient_absolute": raw["dual_gradient_absolute"] / num_gradients,
            }
        return summary
