"""How well a decoding rule's distribution q predicts real text: negative log-likelihood, Brier score, calibration.

    NLL            −log q_y                                   infinite if the rule leaves out the token y of the text
    smoothed NLL   −log((1 − λ)·q_y + λ/K)                    finite for every rule, and the same λ for all of them
    Brier score    Σ_k (q_k − [k = y])² = Σ q² − 2·q_y + 1    in [0, 2]
    ECE            mean over tokens of |accuracy − confidence| of their bin, of the most probable token

Top-p, min-p and their like give some real tokens the probability 0, so their perplexity is infinite. The smoothed NLL is the
ε-perplexity of Martins et al. (arXiv 2004.02644, §4.1), (q + ε)/(1 + ε·K), written as a mixture with the uniform distribution
of share λ = ε·K/(1 + ε·K), so that it means the same for every vocabulary. K counts the tokens that are not banned.

Sums are kept for every document. Intervals treat the tokens of one document as dependent: those of NLL and Brier score are
ratio estimators over documents, those of the ECE a jackknife over groups of documents (`tempnet.intervals`).

Shapes: N tokens, V vocabulary, D documents, B bins.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tempnet.decoders.rule import entropy
from tempnet.headroom.gains import NUM_BINS, expected_calibration_error
from tempnet.intervals import Interval, jackknife, ratio_interval

SMOOTHING = 0.01
"""λ, the share of the uniform distribution in the smoothed NLL."""
_NUM_GROUPS = 100
SUMS = ("smoothed", "brier", "excluded", "entropy")
"""Names of the sums over tokens that are kept beside the bins, and beside the NLL of tokens that are not excluded."""


class Scores(NamedTuple):
    """What a rule makes of N tokens, each (N,)."""

    loss: Tensor
    """−log q_y in nats, +inf for an excluded token."""
    smoothed: Tensor
    """Smoothed NLL in nats."""
    brier: Tensor
    """Brier score."""
    excluded: Tensor
    """1 if the rule leaves out the token of the text, else 0."""
    entropy: Tensor
    """H(q) in nats."""
    confidence: Tensor
    """Largest q."""
    correct: Tensor
    """1 if the most probable token is that of the text, else 0."""


def score_tokens(log_probabilities: Tensor, targets: Tensor, *, num_allowed: Tensor | int | None = None) -> Scores:
    """Score the distributions of N tokens.

    Args:
        log_probabilities: (N, V) log q.
        targets: (N,) tokens of the text.
        num_allowed: K, (N,) or one for all rows: number of tokens that are not banned. Default: V.
    """
    loss = -log_probabilities.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    number = torch.as_tensor(log_probabilities.shape[-1] if num_allowed is None else num_allowed)
    right = torch.exp(-loss)
    confidence, predicted = log_probabilities.max(-1)
    return Scores(
        loss=loss,
        smoothed=-((1.0 - SMOOTHING) * right + SMOOTHING / number.to(right)).log(),
        brier=log_probabilities.exp().square().sum(-1) - 2.0 * right + 1.0,
        excluded=loss.isinf().to(right),
        entropy=entropy(log_probabilities),
        confidence=confidence.exp().clamp(max=1.0),
        correct=(predicted == targets).to(right),
    )


class LikelihoodSums:
    """Sums of scores over the tokens of every document, for rules that are named.

    Args:
        num_documents: D.
    """

    def __init__(self, num_documents: int) -> None:
        self.num_documents = num_documents
        self.sums: dict[str, dict[str, Tensor]] = {}
        """Rule → name of a score → its sum over the tokens of each document: (D,)."""
        self.bins: dict[str, Tensor] = {}
        """Rule → number of tokens, summed confidence and number of correct predictions: (groups, B, 3)."""

    def add(self, rule: str, documents: Tensor, scores: Scores) -> None:
        """Add the scores of tokens under the name of a rule.

        Args:
            rule: the name.
            documents: (N,) number of the document of each token.
            scores: their scores.
        """
        documents = documents.cpu()
        known = self.sums.setdefault(rule, {})
        values = {name: getattr(scores, name) for name in SUMS}
        values |= {"loss": scores.loss.where(scores.excluded == 0, 0.0), "count": torch.ones_like(scores.loss)}
        for name, value in values.items():
            total = known.setdefault(name, torch.zeros(self.num_documents, dtype=torch.float64))
            total.index_add_(0, documents, value.double().cpu())
        confidence = scores.confidence.double().cpu()
        places = (confidence * NUM_BINS).long().clamp(max=NUM_BINS - 1)
        groups = min(_NUM_GROUPS, self.num_documents)
        columns = torch.stack([torch.ones_like(confidence), confidence, scores.correct.double().cpu()], dim=-1)
        bins = self.bins.setdefault(rule, torch.zeros(groups, NUM_BINS, 3, dtype=torch.float64))
        bins.view(-1, 3).index_add_(0, documents % groups * NUM_BINS + places, columns)

    def mean(self, rule: str, name: str) -> Interval:
        """Return the mean over tokens of a score: one of `SUMS`."""
        return ratio_interval(self.sums[rule][name], self.sums[rule]["count"])

    def loss(self, rule: str) -> Interval:
        """Return the NLL per token; infinite if a token of the text is excluded."""
        if self.sums[rule]["excluded"].sum() > 0:
            return Interval(math.inf, math.nan)
        return ratio_interval(self.sums[rule]["loss"], self.sums[rule]["count"])

    def gain(self, rule: str, over: str, name: str = "smoothed") -> Interval:
        """Return by how much a score of `rule` is below that of `over`, per token and on the same tokens."""
        difference = self.sums[over][name] - self.sums[rule][name]
        return ratio_interval(difference, self.sums[rule]["count"])

    def calibration_error(self, rule: str) -> Interval:
        """Return the ECE, as a share."""
        return jackknife(expected_calibration_error, self.bins[rule])
