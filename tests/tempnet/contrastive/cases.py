"""Create batches, and pairs of equal losses (ours and the dense transcription), for the tests of this directory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tempnet import TempNet, TempNetConfig
from tempnet.contrastive.losses import LOSS_KINDS, ContrastiveLoss, ContrastiveLossConfig, ContrastiveOutput
from tempnet.contrastive.state import SampleState
from tempnet.contrastive.unimodal import UnimodalLoss
from tempnet.contrastive.world import World
from tests.tempnet.contrastive.dense import Dense

NAMES = tuple(LOSS_KINDS)
UNIMODAL_NAMES = tuple(name for name, kind in LOSS_KINDS.items() if not kind.is_cyclic and kind.temperature != "given")
NUM_SAMPLES, SIZE = 40, 6


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


def make_batch(num_pairs: int, *, seed: int = 0, repeats: bool = True, dtype: torch.dtype = torch.float64) -> Batch:
    """Create a batch in which sample n shows image n // 2.

    With repeats, ids are drawn with replacement; without, all images are different.
    """
    generator = torch.Generator().manual_seed(seed)
    if repeats:
        ids = torch.randint(NUM_SAMPLES, (num_pairs,), generator=generator)
    else:
        ids = 2 * torch.randperm(NUM_SAMPLES // 2, generator=generator)[:num_pairs]
    image, text = F.normalize(torch.randn(2, num_pairs, SIZE, generator=generator, dtype=torch.float64), dim=-1)
    image, text = image.to(dtype), F.normalize(image + 0.8 * text, dim=-1).to(dtype)
    return Batch(image.requires_grad_(), text.requires_grad_(), ids, ids // 2)


def make_config(name: str, **changes: Any) -> ContrastiveLossConfig:
    return ContrastiveLossConfig.for_name(name, **{"rho": 1.2, "tau_max": 0.4, "tau": 0.08, **changes})


def make_loss(config: ContrastiveLossConfig, *, world: World | None = None, seed: int = 0) -> ContrastiveLoss:
    """Create a loss of two modalities in float64, with its state and networks."""
    torch.manual_seed(seed)
    networks: dict[str, Any] = {}
    if config.kind.temperature == "tempnet":
        sizes = {"hidden_size": 7, "num_prototypes": 5, "tau_min": 0.01, "tau_max": 0.3, "phi_init": 0.1}
        tempnet = TempNetConfig.for_embeddings(SIZE, rho=config.rho, **sizes)
        networks = {key: TempNet(tempnet) for key in ("image_tempnet", "text_tempnet")}
    state = SampleState(NUM_SAMPLES, config.state_columns, world=world) if config.state_columns else None
    if config.kind.temperature == "given":
        assert state is not None
        state.fill("tau", make_table())
    return ContrastiveLoss(config, state=state, world=world, **networks).double()


def make_unimodal_loss(config: ContrastiveLossConfig, *, world: World | None = None) -> UnimodalLoss:
    """Create a loss on one space in float64; its network is the first one of the bimodal loss."""
    bimodal = make_loss(config, world=world)
    return UnimodalLoss(config, tempnet=bimodal.image_tempnet, state=bimodal.state, world=world).double()


def make_table() -> Tensor:
    return 0.02 + 0.2 * torch.rand(2, NUM_SAMPLES, generator=torch.Generator().manual_seed(5))


def make_dense(loss: ContrastiveLoss) -> Dense:
    """Create the transcription, with copies of the loss's parameters as leaves of its own."""
    networks = None
    if loss.image_tempnet is not None and loss.text_tempnet is not None:
        copies = TempNet(loss.image_tempnet.config), TempNet(loss.text_tempnet.config)
        for copy, network in zip(copies, (loss.image_tempnet, loss.text_tempnet), strict=True):
            copy.double().load_state_dict(network.state_dict())
        networks = copies
    log_tau = None if loss.learned is None else loss.learned.log_tau.detach().double().clone().requires_grad_()
    table = make_table() if loss.config.kind.temperature == "given" else None
    return Dense(loss.config, networks, log_tau, table)


def dense_parameters(dense: Dense) -> list[Tensor]:
    """Return the transcription's parameters in the order of the loss's own."""
    if dense.networks is not None:
        return [parameter for network in dense.networks for parameter in network.parameters()]
    return [] if dense.log_tau is None else [dense.log_tau]


def run(loss: ContrastiveLoss | UnimodalLoss, batch: Batch, gamma: float = 0.7) -> ContrastiveOutput:
    """Run one forward and backward pass."""
    if isinstance(loss, UnimodalLoss):
        output = loss(batch.image, batch.text, batch.ids, gamma=gamma)
    else:
        output = loss(batch.image, batch.text, batch.ids, batch.image_ids, gamma=gamma)
    output["loss"].backward()
    return output


def relative_error(value: Tensor | None, reference: Tensor | None) -> float:
    assert value is not None
    assert reference is not None
    return ((value.double() - reference.double()).norm() / reference.double().norm().clamp(min=1e-12)).item()
