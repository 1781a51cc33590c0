"""A second transcription of the contrastive losses, with whole matrices and autograd in one process.

`Dense` shares only the formulas with the product. It keeps the per-sample state in plain dictionaries by id, in float32
like the real one. Below it are the batches, and the pairs of equal losses (ours and the transcription) of the tests.
"""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tempnet import TempNet, TempNetConfig
from tempnet.contrastive.config import LOSS_KINDS, ContrastiveLossConfig
from tempnet.contrastive.losses import ContrastiveLoss, ContrastiveOutput
from tempnet.contrastive.normalisers import NormaliserNet
from tempnet.contrastive.state import SampleState, World
from tempnet.contrastive.unimodal import UnimodalLoss

NAMES = tuple(LOSS_KINDS)
NUM_SAMPLES, SIZE = 40, 6


@dataclass
class Dense:
    """A loss whose networks, `log_tau` and `bias` are leaves of its own, equal to those of the loss under test."""

    config: ContrastiveLossConfig
    networks: tuple[TempNet, TempNet] | None = None
    log_tau: Tensor | None = None
    bias: Tensor | None = None
    normalisers: tuple[NormaliserNet, NormaliserNet] | None = None
    table: Tensor | None = None
    state: list[dict[int, dict[str, Tensor]]] = field(default_factory=lambda: [{}, {}])
    outputs: list[Tensor] = field(default_factory=lambda: [torch.zeros(0), torch.zeros(0)])
    """τ, log u and ∂/∂τ of the last batch (3, B) of each modality; NaN without negatives, or where a loss has none."""

    def __call__(self, image: Tensor, text: Tensor, ids: Tensor, image_ids: Tensor, gamma: float) -> Tensor:
        similarity = image @ text.T
        loss = self.side(0, similarity, image, ids, image_ids, gamma) / 2
        loss = loss + self.side(1, similarity.T, text, ids, image_ids, gamma) / 2
        if self.config.name == "cyclip":
            images, texts = image @ image.T, text @ text.T
            loss = loss + self.config.cyclic_in_modal * (images - texts).square().sum() / len(ids)
            loss = loss + self.config.cyclic_cross_modal * (similarity - similarity.T).square().sum() / len(ids)
        return loss

    def side(
        self, modality: int, similarity: Tensor, anchors: Tensor, ids: Tensor, image_ids: Tensor, gamma: float
    ) -> Tensor:
        name, size = self.config.name, len(ids)
        is_negative = image_ids[:, None] != image_ids[None]
        self.outputs[modality] = outputs = torch.full((3, size), torch.nan, dtype=torch.float64)
        outputs[0] = 1.0
        if name == "temperature_free":
            clamped = similarity.clamp(1e-6 - 1, 1 - 1e-6)
            logits = torch.log((1 + clamped) / (1 - clamped))
            return self.cross_entropy(logits, torch.ones(size, dtype=logits.dtype), is_negative)
        tau = self.tau(modality, anchors, ids)
        outputs[0] = tau.detach()
        if name in ("clip", "clip_fixed", "cyclip", "tempnet_in_batch"):
            return self.cross_entropy(similarity, tau, is_negative)
        if self.bias is not None:  # siglip
            logits, eye = similarity / tau[:, None] + self.bias, torch.eye(size, dtype=torch.bool)
            return -F.logsigmoid(torch.where(eye, logits, -logits))[eye | is_negative].sum() / size

        # Row by row, over the negatives only.
        h = similarity - similarity.diag()[:, None]
        if self.normalisers is not None:
            return self.predicted(modality, h, tau, anchors, similarity.diag(), ids, is_negative, gamma)
        log_u = self.estimates(modality, h, tau, ids, is_negative, gamma)
        rho = self.config.rho if name in ("isogclr", "tempnet", "fastclip_v2", "fastclip_v3") else 0.0
        total, duals = similarity.sum() * 0, dict[int, list[Tensor]]()
        for i in range(size):
            if not is_negative[i].any():
                continue
            estimate = log_u[int(ids[i])]
            scaled = (h[i] / tau[i].detach())[is_negative[i]]
            weights = (scaled - estimate).exp().detach() / len(scaled)
            if name == "fastclip_v0":  # log u, whose gradients flow through h/τ
                graph = (weights * (h[i] / tau[i])[is_negative[i]]).sum()
                total = total + (estimate - graph).detach() + graph
                outputs[1, i] = estimate
                continue
            dual = (estimate + rho - (weights * scaled).sum()).detach()
            # The value is τ·(log u + ρ); the gradient flows through h under the weights, and through τ times G.
            graph = (weights * h[i][is_negative[i]]).sum() + (tau[i] * dual if tau[i].requires_grad else 0.0)
            total = total + (tau[i] * (estimate + rho) - graph).detach() + graph
            duals.setdefault(int(ids[i]), []).append(dual)
            outputs[1:, i] = torch.stack([estimate, dual])
        self.update(modality, log_u, duals)
        return total / size

    def predicted(
        self,
        modality: int,
        h: Tensor,
        tau: Tensor,
        anchors: Tensor,
        positives: Tensor,
        ids: Tensor,
        is_negative: Tensor,
        gamma: float,
    ) -> Tensor:
        """Return the mean of τ·(g/u + log u − 1 + ρ), where u mixes g into the prediction exp α, with its own gradient."""
        assert self.normalisers is not None
        network, total = self.normalisers[modality], h.sum() * 0
        scaled_g = [(h[i] / tau[i])[is_negative[i]] for i in range(len(ids))]
        own_log_g = [(s.logsumexp(0) - math.log(len(s))).detach() if len(s) else None for s in scaled_g]
        for i, scaled in enumerate(scaled_g):
            if not len(scaled):
                continue
            scores = network.prototypes @ anchors[i].detach() / tau[i].detach()
            alpha = scores.exp().mean().log() + network.bias.squeeze() - (positives[i] / tau[i]).detach()
            same = [g.exp() for j, g in enumerate(own_log_g) if g is not None and ids[j] == ids[i]]
            u = ((1 - gamma) * alpha.exp() + gamma * torch.stack(same).mean()).detach()
            value = tau[i] * ((scaled.exp().mean()) / u + u.log() - 1 + self.config.rho)
            slope = -tau[i].detach() * min(5.0, float((own_log_g[i].exp() / alpha.exp()).detach()) - 1)  # type: ignore[union-attr]
            total = total + value + slope * (alpha - alpha.detach())
            (weighted,) = torch.autograd.grad(value, tau, retain_graph=True)
            self.outputs[modality][1:, i] = torch.stack([u.log(), weighted[i]]).detach()
        return total / len(ids)

    def estimates(
        self, modality: int, h: Tensor, tau: Tensor, ids: Tensor, is_negative: Tensor, gamma: float
    ) -> dict[int, Tensor]:
        """Return id → log u, the moving average of the batch's log mean over the negatives of exp(h/τ)."""
        log_g: dict[int, list[Tensor]] = {}
        for i in range(len(ids)):
            if is_negative[i].any():
                scaled = (h[i] / tau[i].detach())[is_negative[i]]
                log_g.setdefault(int(ids[i]), []).append((scaled.logsumexp(0) - math.log(len(scaled))).detach())
        log_u, keep = {}, torch.tensor(1 - gamma, dtype=torch.float64).log()
        for key, values in log_g.items():
            mean = torch.stack(values).logsumexp(0) - math.log(len(values))
            old = self.state[modality].setdefault(key, {}).get("log_u")
            log_u[key] = mean if old is None else torch.logaddexp(keep + old, math.log(gamma) + mean)
        return log_u

    def update(self, modality: int, log_u: dict[int, Tensor], duals: dict[int, list[Tensor]]) -> None:
        """Store the estimates of a batch, and for iSogCLR make a step with momentum of every anchor's own τ."""
        for key, estimate in log_u.items():
            entry = self.state[modality][key]
            entry["log_u"] = estimate.float()
            if self.config.name in ("isogclr", "fastclip_v2"):
                gradient = torch.stack(duals[key]).mean().clamp(-5, 5)
                beta, config = self.config.tau_momentum, self.config
                momentum = (1 - beta) * entry.get("momentum", torch.tensor(0.0)).double() + beta * gradient
                tau_new = entry.get("tau", torch.tensor(config.tau)).double() - config.tau_step * momentum
                entry["tau"] = tau_new.clamp(config.tau_min, config.tau_max).float()
                entry["momentum"] = momentum.float()

    def tau(self, modality: int, anchors: Tensor, ids: Tensor) -> Tensor:
        if self.networks is not None:
            return self.networks[modality](anchors)
        if self.log_tau is not None:
            return self.log_tau.exp().expand(len(ids))
        if self.table is not None:
            return self.table[modality, ids].to(anchors.dtype)
        if self.config.name in ("isogclr", "fastclip_v2"):
            initial = torch.tensor(self.config.tau)
            values = [self.state[modality].get(int(i), {}).get("tau", initial) for i in ids]
            return torch.stack(values).to(anchors.dtype)
        return torch.full((len(ids),), self.config.tau, dtype=anchors.dtype)

    @staticmethod
    def cross_entropy(logits: Tensor, tau: Tensor, is_negative: Tensor) -> Tensor:
        allowed = is_negative | torch.eye(len(logits), dtype=torch.bool)
        scaled = (logits / tau[:, None]).masked_fill(~allowed, -torch.inf)
        return (scaled.logsumexp(1) - scaled.diag()).mean()

    @property
    def parameters(self) -> list[Tensor]:
        """Parameters in the order of the loss's own."""
        networks = [*(self.networks or ()), *(self.normalisers or ())]
        scalars = [leaf for leaf in (self.log_tau, self.bias) if leaf is not None]
        return [*(parameter for network in networks for parameter in network.parameters()), *scalars]


@dataclass
class Batch:
    """A batch of unit rows (B, d), which are leaves of autograd, and their ids."""

    image: Tensor
    text: Tensor
    ids: Tensor
    image_ids: Tensor

    def part(self, rows: slice) -> Batch:
        image, text = (x.detach()[rows].clone().requires_grad_() for x in (self.image, self.text))
        return Batch(image, text, self.ids[rows], self.image_ids[rows])

    def to(self, dtype: torch.dtype) -> Batch:
        return replace(self, **{k: getattr(self, k).detach().to(dtype).requires_grad_() for k in ("image", "text")})


def make_batch(num_pairs: int, *, seed: int = 0, repeats: bool = True) -> Batch:
    """Create a float64 batch in which sample n shows image n // 2.

    With repeats, ids are drawn with replacement; without, all images are different.
    """
    generator = torch.Generator().manual_seed(seed)
    if repeats:
        ids = torch.randint(NUM_SAMPLES, (num_pairs,), generator=generator)
    else:
        ids = 2 * torch.randperm(NUM_SAMPLES // 2, generator=generator)[:num_pairs]
    image, text = F.normalize(torch.randn(2, num_pairs, SIZE, generator=generator, dtype=torch.float64), dim=-1)
    text = F.normalize(image + 0.8 * text, dim=-1)
    return Batch(image.requires_grad_(), text.requires_grad_(), ids, ids // 2)


def make_config(name: str, **changes: Any) -> ContrastiveLossConfig:
    defaults = {"rho": 1.2, "tau_max": 0.4, "tau": 0.08, "tau_momentum": 0.3, "cyclic_cross_modal": 0.4, "bias": -1.5}
    return ContrastiveLossConfig.for_name(name, **{**defaults, **changes})


def make_loss(
    config: ContrastiveLossConfig, *, world: World | None = None, seed: int = 0, **network: Any
) -> ContrastiveLoss:
    """Create a loss of two modalities in float64, with its state and networks."""
    torch.manual_seed(seed)
    networks: dict[str, Any] = {}
    if config.kind.temperature == "tempnet":
        sizes = {"hidden_size": 7, "num_prototypes": 5, "tau_min": 0.01, "tau_max": 0.3, "phi_init": 0.1, **network}
        tempnet = TempNetConfig.for_embeddings(SIZE, rho=config.rho, **sizes)
        networks = {key: TempNet(tempnet) for key in ("image_tempnet", "text_tempnet")}
    for key in ("image_normaliser", "text_normaliser"):
        networks[key] = NormaliserNet.for_loss(config, SIZE, 5)
    state = SampleState(NUM_SAMPLES, config.state_columns, world=world) if config.state_columns else None
    if config.kind.temperature == "given":
        assert state is not None
        state.fill("tau", make_table())
    return ContrastiveLoss(config, state=state, world=world, **networks).double()


def make_unimodal_loss(config: ContrastiveLossConfig, *, world: World | None = None) -> UnimodalLoss:
    """Create a loss on one space in float64; its network is the first one of the bimodal loss."""
    bimodal = make_loss(config, world=world)
    networks = {"tempnet": bimodal.image_tempnet, "normaliser": bimodal.image_normaliser}
    return UnimodalLoss(config, **networks, state=bimodal.state, world=world).double()


def make_table() -> Tensor:
    return 0.02 + 0.2 * torch.rand(2, NUM_SAMPLES, generator=torch.Generator().manual_seed(5))


def make_dense(loss: ContrastiveLoss) -> Dense:
    """Create the transcription, with copies of the loss's parameters as leaves of its own."""
    networks = None
    if loss.image_tempnet is not None and loss.text_tempnet is not None:
        networks = TempNet(loss.image_tempnet.config), TempNet(loss.text_tempnet.config)
        for copy, network in zip(networks, (loss.image_tempnet, loss.text_tempnet), strict=True):
            copy.double().load_state_dict(network.state_dict())
    log_tau, bias = (
        None if leaf is None else leaf.detach().double().clone().requires_grad_()
        for leaf in (loss.learned and loss.learned.log_tau, loss.learned and loss.learned.bias)
    )
    normalisers = None
    if loss.image_normaliser is not None and loss.text_normaliser is not None:
        normalisers = deepcopy(loss.image_normaliser).double(), deepcopy(loss.text_normaliser).double()
    table = make_table() if loss.config.kind.temperature == "given" else None
    return Dense(loss.config, networks, log_tau, bias, normalisers, table)


def run(loss: ContrastiveLoss | UnimodalLoss, batch: Batch, gamma: float = 0.7) -> ContrastiveOutput:
    """Run one forward and backward pass."""
    if isinstance(loss, UnimodalLoss):
        output = loss(batch.image, batch.text, batch.ids, gamma=gamma)
    else:
        output = loss(batch.image, batch.text, batch.ids, batch.image_ids, gamma=gamma)
    output["loss"].backward()
    return output
