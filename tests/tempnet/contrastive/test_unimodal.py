"""The losses on one space against their definition, vector by vector, in float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pytorch_metric_learning.losses import NTXentLoss
from torch import Tensor

from tempnet import TempNet, TempNetConfig
from tempnet.contrastive.config import LOSS_KINDS, ContrastiveLossConfig
from tempnet.contrastive.state import SampleState
from tempnet.contrastive.unimodal import UnimodalLoss
from tests.tempnet.contrastive.cases import make_config, relative_error

SIZE, NUM_SAMPLES = 6, 40
IN_BATCH = ("clip", "clip_fixed", "tempnet_in_batch", "temperature_free")
GLOBAL = ("sogclr", "tempnet")


def make(name: str, **changes: Any) -> UnimodalLoss:
    config = make_config(name, **changes)
    torch.manual_seed(0)
    tempnet = None
    if config.kind.temperature == "tempnet":
        sizes = {"hidden_size": 7, "num_prototypes": 5, "tau_min": 0.01, "tau_max": 0.3, "phi_init": 0.1}
        tempnet = TempNet(TempNetConfig.for_embeddings(SIZE, rho=config.rho, **sizes))
    state = SampleState(NUM_SAMPLES, config.state_columns) if config.state_columns else None
    return UnimodalLoss(config, tempnet=tempnet, state=state).double()


def pairs(num: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    anchors, noise = torch.randn(2, num, SIZE, generator=generator, dtype=torch.float64)
    return (
        F.normalize(anchors, dim=-1).requires_grad_(),
        F.normalize(anchors + 0.8 * noise, dim=-1).requires_grad_(),
    )


def temperatures(loss: UnimodalLoss, z: Tensor) -> Tensor:
    inner = loss.bimodal
    if inner.image_tempnet is not None:
        return inner.image_tempnet(z)
    return (inner.learned.log_tau.exp() if inner.learned else z.new_full((1,), inner.config.tau)).expand(len(z))


def by_the_formula(loss: UnimodalLoss, anchors: Tensor, positives: Tensor, ids: Tensor) -> Tensor:
    """Compute a loss one vector at a time.

    For global losses it is the first visit, where u of a document is the mean of the g of its spans.
    """
    z, n, config = torch.cat([anchors, positives]), len(anchors), loss.bimodal.config
    tau, document = temperatures(loss, z), ids.repeat(2).tolist()
    losses, scaled, log_g = [], [], {}
    for v in range(2 * n):
        mate = (v + n) % (2 * n)
        others = [w for w in range(2 * n) if w not in (v, mate)]
        scores = z[v] @ z[[mate, *others]].T
        if config.name == "temperature_free":
            losses.append(-(2 * scores.atanh()).log_softmax(0)[0])
        elif config.kind.normaliser == "in_batch":
            losses.append(-(scores / tau[v]).log_softmax(0)[0])
        else:
            h = scores[1:] - scores[0]
            scaled.append(h)
            log_g.setdefault(document[v], []).append((h / tau[v]).logsumexp(0).detach() - math.log(len(others)))
    for v, h in enumerate(scaled):
        same = log_g[document[v]]
        log_u = torch.stack(same).logsumexp(0) - math.log(len(same))
        weights = (h / tau[v] - log_u).exp().detach() / len(h)
        rho = config.rho if config.kind.uses_rho else 0.0
        dual = (log_u + rho - (weights * h / tau[v]).sum()).detach()
        through_h = (weights * h).sum()
        value = (tau[v] * (log_u + rho)).detach() + through_h - through_h.detach()
        losses.append(value + (tau[v] - tau[v].detach()) * dual)
    return torch.stack(losses).mean()


@pytest.mark.parametrize("tile_size", [1, 5, 64])
@pytest.mark.parametrize("name", IN_BATCH + GLOBAL)
def test_loss_and_gradients(name: str, tile_size: int) -> None:
    loss = make(name, tile_size=tile_size)
    anchors, positives = pairs(9)
    ids = torch.tensor([3, 3, 7, 8, 8, 1, 0, 2, 5])  # two spans of some documents
    found, expected = loss(anchors, positives, ids, gamma=0.7)["loss"], by_the_formula(loss, anchors, positives, ids)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    leaves = [anchors, positives, *loss.parameters()]
    for value, wanted in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves), strict=True):
        assert relative_error(value, wanted) < 1e-8


def test_nt_xent_is_torchs_cross_entropy_of_the_whole_matrix() -> None:
    anchors, positives = pairs(20, seed=1)
    z = torch.cat([anchors, positives])
    scores = (z @ z.T / 0.05).masked_fill(torch.eye(40, dtype=torch.bool), -math.inf)
    expected = F.cross_entropy(scores, (torch.arange(40) + 20) % 40)
    found = make("clip_fixed", tau=0.05)(anchors, positives, torch.arange(20), gamma=1.0)["loss"]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_the_public_library_agrees() -> None:
    raw = torch.randn(30, SIZE, generator=torch.Generator().manual_seed(2), dtype=torch.float64).requires_grad_()
    anchors, positives = F.normalize(raw, dim=-1).chunk(2)  # the library normalises by itself
    found = make("clip_fixed", tau=0.1)(anchors, positives, torch.arange(15), gamma=1.0)["loss"]
    expected = NTXentLoss(temperature=0.1)(raw, torch.arange(15).repeat(2))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    gradients = [torch.autograd.grad(loss, raw)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_temperature_free_is_finite_for_all_cosines(dtype: torch.dtype) -> None:
    loss = UnimodalLoss(ContrastiveLossConfig.for_name("temperature_free"))
    anchors = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [1.0, 0.0]], dtype=dtype).requires_grad_()
    positives = torch.tensor([[1.0, 0.0], [0.0, -1.0], [1.0, 0.0], [0.0, 1.0]], dtype=dtype).requires_grad_()
    output = loss(anchors, positives, torch.arange(4), gamma=1.0)
    output["loss"].backward()
    assert torch.isfinite(output["loss"])
    assert torch.isfinite(anchors.grad).all()
    assert torch.isfinite(positives.grad).all()


def test_without_a_temperature_the_gradient_falls_with_the_cosine_and_vanishes_at_one() -> None:
    """With a positive at cosine C and a negative at −C, |dL/dC| = 2(1 − C)/((1 + C)(1 + C²)) (arXiv 2501.17683, Figure 5)."""
    loss = UnimodalLoss(ContrastiveLossConfig.for_name("temperature_free"))
    slopes = []
    cosines = [-0.95, -0.5, 0.0, 0.3, 0.6, 0.9, 0.99, 0.999]
    for value in cosines:
        c = torch.tensor(value, dtype=torch.float64, requires_grad=True)
        anchors = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
        positive = torch.stack([c, (1 - c**2).sqrt()])
        output = loss(anchors, torch.stack([positive, -positive]), torch.arange(2), gamma=1.0)
        slopes.append(-float(torch.autograd.grad(output["loss"], c)[0]))
    # The two anchors are opposite, too: at −1, clamped, their share is below 1e-5.
    assert slopes == pytest.approx([2 * (1 - c) / ((1 + c) * (1 + c**2)) for c in cosines], rel=1e-3)
    assert all(later < earlier for earlier, later in itertools.pairwise(slopes))
    assert 0.0 < slopes[-1] < 1e-3


def test_members_of_a_pair_have_their_own_temperatures() -> None:
    loss = make("tempnet")
    anchors, positives = pairs(6)
    output = loss(anchors, positives, torch.arange(6), gamma=1.0)
    assert loss.bimodal.image_tempnet is not None
    torch.testing.assert_close(output["tau"][0], loss.bimodal.image_tempnet(anchors), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(output["tau"][1], loss.bimodal.image_tempnet(positives), rtol=1e-6, atol=1e-7)
    assert output["log_u"].shape == output["dual_gradient"].shape == (2, 6)


def test_one_network_is_counted_once() -> None:
    loss = make("tempnet")
    assert len(list(loss.parameters())) == len(list(loss.bimodal.image_tempnet.parameters()))


def test_cyclic_terms_are_refused() -> None:
    assert LOSS_KINDS["cyclip"].is_cyclic
    with pytest.raises(ValueError, match="cyclip compares two modalities"):
        UnimodalLoss(ContrastiveLossConfig.for_name("cyclip"))
