"""A second transcription of the losses, with whole matrices and autograd in one process; it shares only the formulas.

`Dense` also keeps the per-sample state in plain dictionaries by id, in float32 like the real one, and updates it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tempnet import TempNet
from tempnet.contrastive.losses import ContrastiveLossConfig


@dataclass
class Dense:
    """A loss whose `networks` and `log_tau` are leaves that the caller shares with the loss under test."""

    config: ContrastiveLossConfig
    networks: tuple[TempNet, TempNet] | None = None
    log_tau: Tensor | None = None
    table: Tensor | None = None
    state: list[dict[int, dict[str, Tensor]]] = field(default_factory=lambda: [{}, {}])

    def __call__(self, image: Tensor, text: Tensor, ids: Tensor, image_ids: Tensor, gamma: float) -> Tensor:
        similarity = image @ text.T
        sides = [
            self.side(0, similarity, image, ids, image_ids, gamma),
            self.side(1, similarity.T, text, ids, image_ids, gamma),
        ]
        loss = (sides[0] + sides[1]) / 2
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
        num_negatives = is_negative.sum(1)
        if name == "temperature_free":
            limit = 1 - 1e-6
            clamped = similarity.clamp(-limit, limit)
            logits = torch.log((1 + clamped) / (1 - clamped))
            return self.cross_entropy(logits, torch.ones(size, dtype=logits.dtype), is_negative)
        tau = self.tau(modality, anchors, ids)
        if name in ("clip", "clip_fixed", "cyclip", "tempnet_in_batch"):
            return self.cross_entropy(similarity, tau, is_negative)

        h = similarity - similarity.diag()[:, None]
        log_u = self.estimates(modality, h, tau, ids, is_negative, gamma)
        # Row by row, over the negatives only.
        total = similarity.sum() * 0
        duals = {}
        rho = self.config.rho if name in ("isogclr", "tempnet") else 0.0
        for i in range(size):
            if num_negatives[i] == 0:
                continue
            estimate = log_u[int(ids[i])]
            scaled = (h[i] / tau[i].detach())[is_negative[i]]
            weights = (scaled - estimate).exp().detach() / num_negatives[i]
            # The value is τ·(log u + ρ); the gradient flows through h/τ under the weights, and through τ times G.
            dual = (estimate + rho - (weights * scaled).sum()).detach()
            through_h = (weights * h[i][is_negative[i]]).sum()
            through_tau = tau[i] * dual if tau[i].requires_grad else 0 * similarity.sum()
            value = (tau[i] * (estimate + rho)).detach()
            total = total + value + (through_h - through_h.detach())
            if tau[i].requires_grad:
                total = total + (through_tau - through_tau.detach())
            duals.setdefault(int(ids[i]), []).append(dual)
        self.duals = duals
        self.update(modality, log_u, duals)
        return total / size

    def estimates(
        self, modality: int, h: Tensor, tau: Tensor, ids: Tensor, is_negative: Tensor, gamma: float
    ) -> dict[int, Tensor]:
        """Return id → log u, the moving average of the batch's log mean over the negatives of exp(h/τ)."""
        num_negatives = is_negative.sum(1)
        log_g = {}
        for i in range(len(ids)):
            if num_negatives[i] == 0:
                continue
            scaled = (h[i] / tau[i].detach())[is_negative[i]]
            log_g.setdefault(int(ids[i]), []).append((scaled.logsumexp(0) - math.log(num_negatives[i])).detach())
        log_u = {}
        for key, values in log_g.items():
            mean = torch.stack(values).logsumexp(0) - math.log(len(values))
            old = self.state[modality].setdefault(key, {}).get("log_u")
            log_u[key] = (
                mean
                if old is None
                else (
                    math.log(gamma) + mean
                    if gamma == 1
                    else torch.logaddexp(math.log(1 - gamma) + old.to(mean.dtype), math.log(gamma) + mean)
                )
            )
        return log_u

    def update(self, modality: int, log_u: dict[int, Tensor], duals: dict[int, list[Tensor]]) -> None:
        """Store the estimates of a batch, and for iSogCLR make a step with momentum of every anchor's own τ."""
        for key, estimate in log_u.items():
            entry = self.state[modality][key]
            entry["log_u"] = estimate.float()
            if self.config.name == "isogclr":
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
        if self.config.name == "isogclr":
            initial = torch.tensor(self.config.tau)
            values = [self.state[modality].get(int(i), {}).get("tau", initial) for i in ids]
            return torch.stack(values).to(anchors.dtype)
        return torch.full((len(ids),), self.config.tau, dtype=anchors.dtype)

    @staticmethod
    def cross_entropy(logits: Tensor, tau: Tensor, is_negative: Tensor) -> Tensor:
        allowed = is_negative | torch.eye(len(logits), dtype=torch.bool)
        scaled = (logits / tau[:, None]).masked_fill(~allowed, -torch.inf)
        return (scaled.logsumexp(1) - scaled.diag()).mean()
