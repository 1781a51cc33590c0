"""AutoDeco: heads that predict a temperature and a top-p for every token from its hidden state (arXiv 2510.26697).

    τ = 2·sigmoid(MLP_τ(h))                                        p = softmax(z/τ)
    P = sigmoid(MLP_P(h, τ, max p, H(p), Var p, sum of the five largest p))

Both are multilayer perceptrons with one hidden layer of 256 ReLU units. At inference the token is drawn by top-p with P from
p. In training the base is frozen, and top-p is replaced by a mask that has a gradient (Eqs. 1-3): with c the inclusive
cumulative sum of p, sorted from the largest,

    m = exp(−α·ReLU(c − P)),  α = 30        p̃ = p·m / Σ p·m

    loss = mean over kept tokens of w·CE(z/τ, y)  +  mean over tokens of w·(−log p̃_y),      w = softmax(z)_y, no gradient

The weight w is that of dynamic fine-tuning, and the first mean leaves out a random 60 % of the tokens that the base predicts
correctly, so that τ does not collapse (§2.1). Formulas and constants are those of the paper; where it is silent, those of the
authors' published training code (github.com/Zacks917/AutoDeco): the features of MLP_P, the sum of the two terms, w in both.

As α grows, m tends to the tokens with c ≤ P (always with the most probable one): top-p keeps one more, which crosses P. So
the mask that is trained is a little tighter than the rule that is used; that is how it was published.

Shapes: N tokens or … any leading dimensions, V vocabulary, d hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from tempnet.decoders.rules import Rule, entropy, keep_only, nucleus, temper

STEEPNESS = 30.0
"""α."""
DROPPED_SHARE = 0.6
"""Share of the tokens that the base predicts correctly which the temperature's term leaves out."""
HIGHEST_TAU = 2.0
"""Upper end of the range of τ."""
_WIDTH = 256
_NUM_TOP = 5
_LEAST_TAU = 1e-2
_LEAST_PROBABILITY = 1e-9


class Prediction(NamedTuple):
    """Temperature and top-p of tokens, each (…,)."""

    tau: Tensor
    share: Tensor


class AutoDecoHeads(nn.Module):
    """The two heads, for hidden states of dimension d, each with `width` hidden units."""

    def __init__(self, hidden_size: int, width: int = _WIDTH) -> None:
        super().__init__()
        self.tau_head = nn.Sequential(nn.Linear(hidden_size, width), nn.ReLU(), nn.Linear(width, 1))
        self.share_head = nn.Sequential(nn.Linear(hidden_size + 5, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, logits: Tensor, hidden: Tensor) -> Prediction:
        """Return τ and P, each (…,) in float32, for logits (…, V) and hidden states (…, d)."""
        hidden = hidden.detach().float()
        tau = HIGHEST_TAU * torch.sigmoid(self.tau_head(hidden))
        # The head of P reads τ without sending a gradient back through it.
        with torch.no_grad():
            log_p = temper(logits, tau.detach().squeeze(-1).clamp(min=_LEAST_TAU))
            p = log_p.exp()
            top = p.topk(min(_NUM_TOP, p.shape[-1]), dim=-1).values
            features = torch.stack([top[..., 0], entropy(log_p), p.var(-1, unbiased=True), top.sum(-1)], dim=-1)
        share = torch.sigmoid(self.share_head(torch.cat([hidden, tau.detach(), features], dim=-1)))
        return Prediction(tau.squeeze(-1), share.squeeze(-1))


def soft_top_p(log_probabilities: Tensor, share: Tensor, steepness: float = STEEPNESS) -> Tensor:
    """Return p̃ (…, V), top-p with a mask that decays exponentially beyond P; differentiable in p and P.

    It takes log p (…, V), P (…,) and α.
    """
    ordered, order = log_probabilities.sort(dim=-1, descending=True, stable=True)
    log_mask = -steepness * torch.relu(ordered.exp().cumsum(-1) - share.unsqueeze(-1))
    # Normalising in the logarithm keeps a row whose whole mask is tiny, as where the first token alone exceeds P.
    log_mask = torch.zeros_like(log_mask).scatter(-1, order, log_mask)
    return torch.softmax(log_probabilities + log_mask, dim=-1)


def autodeco_loss(
    heads: AutoDecoHeads, logits: Tensor, hidden: Tensor, targets: Tensor, *, generator: torch.Generator | None = None
) -> Tensor:
    """Return the training loss of the heads, a scalar; the formula is in the docstring of this module.

    It takes the frozen base's logits (N, V) and hidden states (N, d), the tokens of the text (N,), and the generator that
    draws which tokens are left out.
    """
    logits = logits.detach().float()
    tau, share = heads(logits, hidden)
    rows = targets.unsqueeze(-1)
    weight = torch.softmax(logits, dim=-1).gather(-1, rows).squeeze(-1)
    log_p = temper(logits, tau.clamp(min=_LEAST_TAU))
    cross_entropy = -log_p.gather(-1, rows).squeeze(-1)
    drawn = torch.rand(targets.shape, generator=generator).to(targets.device)
    kept = (drawn >= DROPPED_SHARE) | (logits.argmax(-1) != targets)
    first = (weight * cross_entropy)[kept].sum() / kept.sum().clamp(min=1)
    soft = soft_top_p(log_p, share).gather(-1, rows).squeeze(-1)
    second = -(weight * (soft + _LEAST_PROBABILITY).log()).mean()
    return first + second


class AutoDeco(Rule):
    """Draws by top-p with the predicted P at the predicted τ of trained heads; tables call them `name`."""

    def __init__(self, heads: AutoDecoHeads, name: str = "AutoDeco") -> None:
        self.heads, self.name = heads.eval(), name

    @property
    def label(self) -> str:
        return self.name

    @torch.no_grad()
    def predict(self, logits: Tensor, hidden: Tensor | None) -> Prediction:
        """Return τ and P, each (…,); without hidden states ValueError is raised."""
        if hidden is None:
            raise ValueError(f"{self.name} reads hidden states, and only logits are known here")
        tau, share = self.heads(logits, hidden)
        return Prediction(tau.clamp(min=_LEAST_TAU), share)

    def log_probabilities(self, logits: Tensor, hidden: Tensor | None = None, state: Tensor | None = None) -> Tensor:
        tau, share = self.predict(logits, hidden)
        whole = temper(logits, tau)
        return keep_only(whole, nucleus(whole, share))
