"""Learn temperatures from a reward, held near the base model by a KL divergence: gradients, baselines, and the leash.

    maximise over τ(h):   E[R(y)] − λ·KL(π_τ ‖ π_c)          y ~ π_τ, the base model sampled at the temperatures τ

where π_c is the base model sampled at a constant temperature c. Only the temperature of every token is learned, so that
everything about a token is closed form. With logits z, β = 1/τ, γ = 1/c, p_β = softmax(βz), Z(β) = Σ exp(βz) and a the token
drawn:

    KL(p_β ‖ p_γ)         = (β − γ)·E_β z − log Z(β) + log Z(γ)
    ∂KL(p_β ‖ p_γ)/∂β     = (β − γ)·Var_β z
    ∂log p_β(a)/∂β        = z_a − E_β z

The divergence of whole texts is the expected sum of those of their tokens, KL(π_τ ‖ π_c) = E_{π_τ} Σ_t KL_t. Its gradient
has two parts: that of every KL_t, and that of which tokens come later, for which token t is charged λ·Σ_{s>t} KL_s beside
the reward. Together the gradient of the objective is that of

    Σ_t ( A − λ·[Σ_{s>t} KL_s − its baseline] )·log p_β(a_t) − λ·KL_t

with A an advantage: the reward less a baseline that the text itself has no part in (Williams 1992; leave-one-out over a
group of texts for the same prompt, Kool et al. 2019, arXiv 2402.14740). The two rewards of a group of G texts are

    each        mean of R over the texts:                        A_i = R_i − mean_{j≠i} R_j
    distinct    sum over distinct answers of their best R, over G: an answer that comes twice counts once

`tempnet.controllers` finds λ. Shapes: G texts of a group, T tokens of the longest, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tempnet.dro import at_least_float32


@dataclass(frozen=True, slots=True)
class TokenStatistics:
    """What the gradient of a token's temperature needs to know of its logits: three numbers of the same shape (...)."""

    score: Tensor
    """∂log p_β(a)/∂β = z_a − E_β z, by which the drawn token pulls at β."""
    kl: Tensor
    """KL(p_β ‖ p_γ) in nats."""
    kl_slope: Tensor
    """∂KL(p_β ‖ p_γ)/∂β = (β − γ)·Var_β z."""


@torch.no_grad()
def token_statistics(logits: Tensor, tokens: Tensor, tau: Tensor, reference: float = 1.0) -> TokenStatistics:
    """Compute the statistics of tokens a (...) that were drawn from logits z (..., V) at τ (...), in float32 at least.

    `reference` is c > 0, the constant temperature that the divergence is measured from.
    """
    logits = at_least_float32(logits)
    logits = logits - logits.amax(-1, keepdim=True)  # no probability changes, and βz cannot overflow
    beta = 1.0 / tau.to(logits.dtype)
    tempered = beta.unsqueeze(-1) * logits
    probabilities = tempered.softmax(-1)
    mean = (probabilities * logits).sum(-1)
    variance = (probabilities * (logits - mean.unsqueeze(-1)).square()).sum(-1)
    gamma = 1.0 / reference
    kl = (beta - gamma) * mean - tempered.logsumexp(-1) + (gamma * logits).logsumexp(-1)
    score = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - mean
    # Rounding can make the divergence of two equal distributions negative by as much as the last digit.
    return TokenStatistics(score=score, kl=kl.clamp(min=0.0), kl_slope=(beta - gamma) * variance)


def surrogate_loss(tau: Tensor, statistics: TokenStatistics, advantages: Tensor, kl_weight: float) -> Tensor:
    """Return a scalar whose gradient in τ is that of −Σ (advantage·log p_β(a) − λ·KL); its value means nothing.

    It takes temperatures (...) with a graph, the statistics of the tokens at them, the advantages (...) and λ.
    """
    slope = kl_weight * statistics.kl_slope - advantages * statistics.score
    return (slope.detach() * (1.0 / tau)).sum()


def leave_one_out(values: Tensor) -> Tensor:
    """Return every value (G, ...) of a group less the mean of the others; 0 for a group of one text."""
    size = len(values)
    if size < 2:
        return torch.zeros_like(values)
    return (values - values.mean(0)) * (size / (size - 1))


def distinct_advantages(rewards: Tensor, answers: Sequence[Hashable]) -> Tensor:
    """Return the advantages (G,) for the sum of the best rewards of a group's distinct answers, from rewards R ≥ 0 (G,).

    Text i adds m_i = max(0, R_i − the best R of the same answer among the others) to the sum, which is an unbiased reward
    for i, since what the others are worth without i is not changed by i. Its baseline is the mean of what each other text
    adds to the group without i.
    """
    own, baseline = rewards.new_zeros(2, len(answers))
    for answer in set(answers):
        members = [place for place, other in enumerate(answers) if other == answer]
        values = rewards[members].tolist()
        own[members] = rewards.new_tensor([_added(values, i) for i in range(len(values))])
        outside = [place for place, other in enumerate(answers) if other != answer]
        baseline[outside] += sum(_added(values, i) for i in range(len(values)))
        for i, place in enumerate(members):  # without text i, others of the same answer may be worth more
            rest = values[:i] + values[i + 1 :]
            baseline[place] += sum(_added(rest, j) for j in range(len(rest)))
    return own - baseline / max(1, len(answers) - 1)


def _added(values: Sequence[float], place: int) -> float:
    """Return what one of several equal answers adds to the best of the others."""
    others = [value for other, value in enumerate(values) if other != place]
    return max(0.0, values[place] - max(others, default=0.0))


def distinct_reward(rewards: Sequence[float], answers: Sequence[Hashable]) -> float:
    """Return the sum over distinct answers of their best reward, divided by the number of texts, of which there are some."""
    best: dict[Hashable, float] = {}
    for answer, reward in zip(answers, rewards, strict=True):
        best[answer] = max(best.get(answer, 0.0), reward)
    return sum(best.values()) / len(rewards)


def token_advantages(advantages: Tensor, kl: Tensor, kl_weight: float) -> Tensor:
    """Return the advantage of every token: that of its text, less λ times the divergence of the tokens after it.

    From the advantages A (G,) of one group and the divergences KL (G, T), which are 0 after the end of a text, it is
    A_i − λ·(Σ_{s>t} KL_is − the mean of the same over the other texts of the group): (G, T).
    """
    to_go = kl.flip(-1).cumsum(-1).flip(-1) - kl
    return advantages.unsqueeze(-1) - kl_weight * leave_one_out(to_go)
