"""Evaluation of frozen sentence embeddings on small tasks by logistic regression, as in SentEval (arXiv 1803.05449 §3).

It has no hidden layer, which is SentEval's default. If a task has test sentences, the regularisation is chosen on its
development sentences, or by cross-validation on the training sentences if it has none. Otherwise accuracy is the mean over
cross-validation folds, and the regularisation is chosen anew within every fold.

Shapes: n sentences, d size of the embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import pearsonr, spearmanr
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold

# SentEval's grid of inverse regularisation strengths.
INVERSE_STRENGTHS = tuple(2.0**power for power in range(-2, 4))
_UNREGULARISED = 1e9
_NUM_ITERATIONS = 1000


@dataclass(frozen=True, slots=True)
class Labelled:
    """Features (n, d) and class labels (n,)."""

    features: np.ndarray
    labels: np.ndarray

    def __getitem__(self, rows: np.ndarray) -> Labelled:
        return Labelled(self.features[rows], self.labels[rows])


def pair_features(first: np.ndarray, second: np.ndarray, *, with_both: bool = False) -> np.ndarray:
    """Returns the features (n, 2d) of sentence pairs: |u − v| and u·v, element by element; (n, 4d) with u and v too."""
    both = [first, second] if with_both else []
    return np.concatenate([*both, np.abs(first - second), first * second], axis=1)


def transfer_accuracy(
    parts: Mapping[str, Labelled],
    *,
    num_folds: int,
    num_inner_folds: int,
    seed: int,
    is_regularised: bool = True,
) -> float:
    """Returns the accuracy of a logistic regression, from 0 to 1.

    Args:
        parts: `train`, `test` and optionally `dev`; or only `all`, which is cross-validated.
        num_folds: number of folds into which `all` is divided.
        num_inner_folds: number of folds used to choose the regularisation if there is no `dev`.
        seed: random seed of the folds.
        is_regularised: whether a regularisation is chosen; otherwise there is next to none, as of SNLI in SentEval.
    """
    if "all" not in parts:
        train = parts["train"]
        if not is_regularised:
            best = _UNREGULARISED
        elif "dev" in parts:
            best = max(INVERSE_STRENGTHS, key=lambda strength: _accuracy(train, parts["dev"], strength))
        else:
            best = _chosen_within(train, num_inner_folds, seed)
        return _accuracy(train, parts["test"], best)
    data = parts["all"]
    accuracies = []
    for inside, outside in _folds(data, num_folds, seed):
        best = _chosen_within(inside, num_inner_folds, seed)
        accuracies.append(_accuracy(inside, outside, best))
    return float(np.mean(accuracies))


def similarity_figures(
    first: np.ndarray, second: np.ndarray, scores: np.ndarray, sizes: Sequence[int] = ()
) -> dict[str, float]:
    """Returns Spearman's and Pearson's correlation of the cosines of embeddings (n, d) with the judgements (n,).

    Of several data sets with `sizes` of pairs, which follow each other, it is the mean (SentEval's `all`, `mean`).
    """
    norms = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    cosines = (first * second).sum(1) / np.maximum(norms, 1e-12)
    ends = np.cumsum(sizes)[:-1].astype(int)
    sets = list(zip(np.split(cosines, ends), np.split(scores, ends), strict=True))
    return {
        "spearman": float(np.mean([spearmanr(*pair)[0] for pair in sets])),
        "pearson": float(np.mean([pearsonr(*pair)[0] for pair in sets])),
    }


def _chosen_within(data: Labelled, num_folds: int, seed: int) -> float:
    folds = _folds(data, num_folds, seed)

    def mean(strength: float) -> float:
        return float(np.mean([_accuracy(inside, outside, strength) for inside, outside in folds]))

    return max(INVERSE_STRENGTHS, key=mean)  # among equal ones this takes the strongest regularisation


def _folds(data: Labelled, num_folds: int, seed: int) -> list[tuple[Labelled, Labelled]]:
    splitter = StratifiedKFold(num_folds, shuffle=True, random_state=seed)
    return [(data[inside], data[outside]) for inside, outside in splitter.split(data.features, data.labels)]


def _accuracy(train: Labelled, test: Labelled, inverse_strength: float) -> float:
    model = LogisticRegression(C=inverse_strength, max_iter=_NUM_ITERATIONS)
    return float(model.fit(train.features, train.labels).score(test.features, test.labels))
