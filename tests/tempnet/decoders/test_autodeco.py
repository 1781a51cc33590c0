"""Test AutoDeco's heads: limits of the soft mask, gradients against finite differences, training to known answers."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor

from tempnet.decoders.autodeco import AutoDeco, AutoDecoHeads, autodeco_loss, soft_top_p
from tempnet.decoders.rule import temper
from tempnet.decoders.truncation import TopP, nucleus

VOCAB_SIZE, HIDDEN_SIZE = 20, 6


def some_tokens(num_tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, hidden states and targets."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, HIDDEN_SIZE, generator=generator)
    logits = 2 * torch.randn(num_tokens, VOCAB_SIZE, generator=generator)
    return logits, hidden, torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)


def test_the_soft_mask_tends_to_the_hard_one_which_is_top_p_without_the_token_that_crosses() -> None:
    logits, _, _ = some_tokens(200)
    log_p = logits.double().log_softmax(-1)
    share = torch.rand(200, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    soft = soft_top_p(log_p, share, steepness=1e7)
    for row, p, limit in zip(soft.numpy(), log_p.exp().numpy(), share.tolist(), strict=True):
        order = np.argsort(-p)
        inside = np.cumsum(p[order]) <= limit
        inside[0] = True
        hard = np.zeros(VOCAB_SIZE)
        hard[order[inside]] = p[order[inside]]
        np.testing.assert_allclose(row, hard / hard.sum(), atol=1e-6)
    kept = nucleus(log_p, share)
    assert (kept | (soft < 1e-9)).all(), "the mask is inside the nucleus"
    missing = (kept & (soft < 1e-9)).sum(-1)
    assert missing.max() == 1
    first_exceeds = log_p.exp().amax(-1) >= share
    assert missing[first_exceeds].max() == 0


def test_the_soft_mask_without_steepness_or_with_the_whole_share_is_the_softmax() -> None:
    logits, _, _ = some_tokens(50)
    log_p, share = logits.log_softmax(-1), torch.full((50,), 0.3)
    torch.testing.assert_close(soft_top_p(log_p, share, steepness=0.0), log_p.exp())
    torch.testing.assert_close(soft_top_p(log_p, torch.ones(50)), log_p.exp(), atol=1e-4, rtol=1e-4)
    assert soft_top_p(log_p, share, steepness=1e9).sum(-1).allclose(torch.ones(50)), "no row loses all its probability"


def test_the_soft_mask_follows_the_published_formula() -> None:
    logits, _, _ = some_tokens(50)
    p, share = logits.softmax(-1), torch.linspace(0.5, 1.0, 50)
    cumulative = torch.zeros_like(p)
    for row in range(50):
        for k in range(VOCAB_SIZE):
            cumulative[row, k] = p[row][p[row] >= p[row, k]].sum()
    weighted = p * torch.exp(-30 * torch.relu(cumulative - share.unsqueeze(-1)))
    expected = weighted / weighted.sum(-1, keepdim=True)
    torch.testing.assert_close(soft_top_p(p.log(), share), expected, atol=1e-5, rtol=1e-3)


def test_gradients_reach_both_heads_and_are_those_of_finite_differences() -> None:
    torch.manual_seed(0)
    logits, hidden, targets = some_tokens(64)
    heads = AutoDecoHeads(HIDDEN_SIZE, width=8)
    autodeco_loss(heads, logits, hidden, targets, generator=torch.Generator().manual_seed(0)).backward()
    for name, parameter in heads.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.norm() > 1e-6, name
    # What the head of P reads of τ has no gradient; without it a finite difference sees what the gradient sees.
    with torch.no_grad():
        heads.share_head[0].weight[:, HIDDEN_SIZE:] = 0.0
    heads.zero_grad()
    autodeco_loss(heads, logits, hidden, targets, generator=torch.Generator().manual_seed(0)).backward()
    for part in ("tau_head", "share_head"):
        moved, step = [], 1e-2
        for sign in (1, -1):
            other = copy.deepcopy(heads)
            with torch.no_grad():
                getattr(other, part)[2].bias.add_(sign * step)
            generator = torch.Generator().manual_seed(0)
            moved.append(autodeco_loss(other, logits, hidden, targets, generator=generator).item())
        slope = getattr(heads, part)[2].bias.grad.item()
        assert slope == pytest.approx((moved[0] - moved[1]) / (2 * step), rel=0.05, abs=1e-5), part


def test_the_base_gets_no_gradient() -> None:
    logits, hidden, targets = some_tokens(16)
    logits.requires_grad_()
    hidden.requires_grad_()
    autodeco_loss(AutoDecoHeads(HIDDEN_SIZE, width=4), logits, hidden, targets).backward()
    assert logits.grad is None
    assert hidden.grad is None


def test_the_loss_weights_tokens_by_the_base_and_drops_easy_ones() -> None:
    """Recompute the loss in float64 with loops, with the same draws."""
    torch.manual_seed(0)
    logits, hidden, targets = some_tokens(80)
    heads = AutoDecoHeads(HIDDEN_SIZE, width=4)
    loss = autodeco_loss(heads, logits, hidden, targets, generator=torch.Generator().manual_seed(3))
    tau, share = (value.detach().double() for value in heads(logits, hidden))
    drawn = torch.rand(80, generator=torch.Generator().manual_seed(3))
    first, second = [], []
    for row in range(80):
        z, y = logits[row].double(), int(targets[row])
        weight, log_p = z.softmax(-1)[y], (z / tau[row]).log_softmax(-1)
        if drawn[row] >= 0.6 or int(z.argmax()) != y:
            first.append(-weight * log_p[y])
        second.append(-weight * soft_top_p(log_p, share[row])[y].log())
    expected = torch.stack(first).mean() + torch.stack(second).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)


def test_trained_heads_tell_sharp_contexts_from_flat_ones() -> None:
    """Where h₀ > 0 the text follows the base's most probable token, elsewhere it is drawn from the base."""
    torch.manual_seed(0)
    logits, hidden, drawn = some_tokens(2000)
    sharp = hidden[:, 0] > 0
    targets = torch.where(sharp, logits.argmax(-1), drawn)
    heads = AutoDecoHeads(HIDDEN_SIZE, width=32)
    optimizer, generator = torch.optim.AdamW(heads.parameters(), lr=1e-2), torch.Generator().manual_seed(0)
    for _ in range(150):
        rows = torch.randint(2000, (256,), generator=generator)
        optimizer.zero_grad()
        autodeco_loss(heads, logits[rows], hidden[rows], targets[rows], generator=generator).backward()
        optimizer.step()
    tau, share = heads(logits, hidden)
    assert tau[sharp].mean() < 0.5 * tau[~sharp].mean()
    assert share[sharp].mean() < share[~sharp].mean()


def test_the_rule_is_top_p_with_the_predictions_of_every_token() -> None:
    torch.manual_seed(0)
    logits, hidden, _ = some_tokens(30)
    rule = AutoDeco(AutoDecoHeads(HIDDEN_SIZE, width=8))
    tau, share = rule.predict(logits, hidden)
    found = rule.log_probabilities(logits, hidden)
    assert tau.std() > 0.01
    for row in range(30):
        expected = TopP(float(share[row]), float(tau[row])).log_probabilities(logits[row])
        torch.testing.assert_close(found[row], expected)
    torch.testing.assert_close(temper(logits, tau).argmax(-1), logits.argmax(-1))
    with pytest.raises(ValueError, match="AutoDeco reads hidden states"):
        rule.log_probabilities(logits)
