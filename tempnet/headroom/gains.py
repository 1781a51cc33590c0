"""What a fitted temperature gains on documents that it was not fitted to: cross-entropy and calibration, with intervals.

The sums of every document's tokens are kept, because intervals treat tokens of one document as dependent
(`tempnet.intervals`: ratio estimators, and for the expected calibration error, ECE, a jackknife over groups of documents).

Shapes: N tokens, D documents, K folds, B bins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from tempnet.headroom.profile import NUM_NODES, TAU_RANGE, Profiles, clamp_log_beta
from tempnet.intervals import Interval, jackknife, ratio_interval

NUM_BINS = 15
_NUM_BINS_OF_TAU = 832
_LARGEST_LOG_TAU = math.log(TAU_RANGE[1])
# Number of groups of documents for the jackknife of the ECE.
_NUM_GROUPS = 100


class NamedSums:
    """Sums over the tokens of each of D documents, and bins of confidence for groups of documents, under names."""

    def __init__(self, num_documents: int) -> None:
        self.num_documents = num_documents
        self.bins: dict[str, Tensor] = {}
        """Name → number of tokens, summed confidence and number of correct predictions: (groups, B, 3)."""

    def _sum(self, sums: dict[str, Tensor], name: str, documents: Tensor, values: Tensor) -> None:
        known = sums.setdefault(name, torch.zeros(self.num_documents, dtype=torch.float64))
        known.index_add_(0, documents, values.double().cpu())

    def _add_bins(self, name: str, documents: Tensor, confidence: Tensor, correct: Tensor) -> None:
        num_groups = min(_NUM_GROUPS, self.num_documents)
        places = documents % num_groups * NUM_BINS + (confidence * NUM_BINS).long().clamp(max=NUM_BINS - 1)
        values = torch.stack([torch.ones_like(confidence), confidence, correct.to(confidence)], dim=-1)
        known = self.bins.setdefault(name, torch.zeros(num_groups, NUM_BINS, 3, dtype=torch.float64))
        known.view(-1, 3).index_add_(0, places, values.double())

    def calibration_error(self, name: str) -> Interval:
        """Return the ECE: the mean over tokens of |accuracy − mean confidence| of their bin, as a share."""
        return jackknife(expected_calibration_error, self.bins[name])


class DocumentSums(NamedSums):
    """Sums over the tokens of each of D documents, at temperatures that are named, from profiles with `num_nodes` nodes."""

    def __init__(self, num_documents: int, num_nodes: int = NUM_NODES) -> None:
        super().__init__(num_documents)
        self.counts = torch.zeros(num_documents, dtype=torch.float64)
        self.profiles = Profiles(
            torch.zeros(num_documents, num_nodes, 3, dtype=torch.float64),
            torch.zeros(num_documents, dtype=torch.float64),
        )
        self.losses: dict[str, Tensor] = {}
        """Name → summed cross-entropy of each document: (D,)."""
        self.second_order: dict[str, Tensor] = {}
        """Name → summed gain to second order: (D,)."""
        self.tau: dict[str, Tensor] = {}
        """Name → summed temperature: (D,)."""
        self.histograms: dict[str, Tensor] = {}
        """Name → number of tokens in equal bins of u = log β over the range of profiles."""

    def add_profiles(self, profiles: Profiles, documents: Tensor) -> None:
        """Add the profiles of tokens, whose documents (N,) are given."""
        self.counts.index_add_(0, documents, torch.ones_like(documents, dtype=torch.float64))
        self.profiles.values.index_add_(0, documents, profiles.values.double())
        self.profiles.target.index_add_(0, documents, profiles.target.double())

    def add(self, name: str, profiles: Profiles, documents: Tensor, log_beta: Tensor) -> None:
        """Add the losses, temperatures and confidences of tokens at u = `log_beta` (N,) under a name."""
        u = clamp_log_beta(log_beta)
        self._sum(self.losses, name, documents, profiles.cross_entropy(u))
        self._sum(self.tau, name, documents, (-u).exp())
        counts = torch.histc(u.double(), _NUM_BINS_OF_TAU, -_LARGEST_LOG_TAU, _LARGEST_LOG_TAU)
        self.histograms[name] = self.histograms.get(name, 0.0) + counts
        confidence = (-profiles.partition(u)[0]).exp().clamp(max=1.0)
        self._add_bins(name, documents, confidence, profiles.target == 0)

    def add_second_order(self, name: str, documents: Tensor, gain: Tensor) -> None:
        """Add the gains of tokens to second order (N,) under a name."""
        self._sum(self.second_order, name, documents, gain)

    def at_constant(self, tau: float) -> Tensor:
        """Return the summed cross-entropy of every document at one temperature: (D,)."""
        return self.profiles.cross_entropy(-math.log(tau))

    def add_constant(self, name: str, tau: float) -> None:
        """Compute the losses of all documents at one temperature, from their profiles, under a name."""
        self.losses[name] = self.at_constant(tau)

    def mean_tau(self, name: str) -> float:
        """Return the mean temperature over all tokens."""
        return (self.tau[name].sum() / self.counts.sum()).item()

    def tau_quantile(self, name: str, share: float) -> float:
        """Return the temperature below which a share of the tokens lies, to half a per cent of itself."""
        cumulative = self.histograms[name].flip(0).cumsum(0)  # from the smallest τ, which is the largest u
        place = int((cumulative >= share * cumulative[-1]).nonzero()[0])
        return math.exp(_LARGEST_LOG_TAU * (2.0 * (place + 0.5) / _NUM_BINS_OF_TAU - 1.0))

    def gain(self, name: str, over: str) -> Interval:
        """Return what `name` gains over `over`, in nats per token."""
        return ratio_interval(self.losses[over] - self.losses[name], self.counts)

    def calibration(self, name: str) -> Mapping[str, list[float]]:
        """Return number of tokens, mean confidence and accuracy of every bin that has tokens."""
        count, confidence, correct = self.bins[name].sum(0).unbind(-1)
        used = count > 0
        return {
            "num_tokens": count[used].tolist(),
            "confidence": (confidence[used] / count[used]).tolist(),
            "accuracy": (correct[used] / count[used]).tolist(),
        }

    def calibration_gain(self, name: str, over: str) -> Interval:
        """Return by how much the ECE of `name` is below that of `over`."""
        both = torch.stack([self.bins[over], self.bins[name]], dim=1)
        return jackknife(lambda bins: -expected_calibration_error(bins).diff(dim=-1).squeeze(-1), both)


def expected_calibration_error(bins: Tensor) -> Tensor:
    """Return the ECE (...,) of sums (..., B, 3): number of tokens, summed confidence, number of correct predictions."""
    return (bins[..., 2] - bins[..., 1]).abs().sum(-1) / bins[..., 0].sum(-1).clamp(min=1.0)
