"""Measures of sampled texts: diversity, and what a verifier says of their answers.

    distinct-n         different n-grams over n-grams, in all texts of a prompt      Li et al., arXiv 1510.03055
    self-BLEU          mean BLEU of a text against the others of its prompt          Zhu et al., arXiv 1802.01886
    pass@k             probability that k of the n texts hold a correct one          Chen et al., arXiv 2107.03374
    distinct-correct   number of different answers that are correct

A high self-BLEU means little diversity. A decoder that writes longer texts pays for more tokens, so `samples_at_equal_cost`
says how many of its texts cost as much as k texts of a reference.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence

from tempnet import intervals
from tempnet.intervals import Interval

Tokens = Sequence[Hashable]
"""A text as a sequence of tokens or words."""

# What BLEU counts instead of no match at all (Chen and Cherry 2014, method 1).
_NO_MATCH = 0.1


def count_ngrams(tokens: Tokens, n: int) -> Counter[tuple[Hashable, ...]]:
    """Return how often every n-gram occurs in a text."""
    return Counter(tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1))


def distinct_n(texts: Sequence[Tokens], n: int) -> float:
    """Return the number of different n-grams of all texts over the number of their n-grams; NaN if there are none."""
    counts: Counter[tuple[Hashable, ...]] = Counter()
    for text in texts:
        counts.update(count_ngrams(text, n))
    return len(counts) / counts.total() if counts else math.nan


def bleu(text: Tokens, references: Sequence[Tokens], max_n: int = 4) -> float:
    """Return the BLEU of a text: brevity penalty times the geometric mean of its clipped 1- to max_n-gram precisions.

    A precision of 0 is replaced by that of a tenth of a match, except that of single tokens, which makes the result 0. The
    penalty is exp(1 − r/c) for c < r, with c the length of the text and r that of the reference whose length is nearest,
    the shorter one of two.
    """
    if not text or not references:
        return 0.0
    counts = [count_ngrams(text, n) for n in range(1, max_n + 1)]
    known = []
    for n in range(1, max_n + 1):
        most: Counter[tuple[Hashable, ...]] = Counter()
        for reference in references:
            most |= count_ngrams(reference, n)  # The largest count over the references.
        known.append(most)
    matches = [(own & most).total() for own, most in zip(counts, known, strict=True)]
    return _bleu_of_matches(matches, len(text), [len(reference) for reference in references])


def self_bleu(texts: Sequence[Tokens], max_n: int = 4) -> float:
    """Return the mean BLEU of every text against all others; NaN for fewer than two texts.

    The largest count of an n-gram among the others is the largest of all, or the second largest for a text that has the
    largest itself. So the n-grams are counted once, and not once for every pair of texts.
    """
    if len(texts) < 2:
        return math.nan
    matches: list[list[int]] = [[] for _ in texts]
    for n in range(1, max_n + 1):
        counts = [count_ngrams(text, n) for text in texts]
        largest: dict[tuple[Hashable, ...], tuple[int, int]] = {}
        for own in counts:
            for ngram, number in own.items():
                first, second = largest.get(ngram, (0, 0))
                largest[ngram] = (max(first, number), max(second, min(first, number)))
        for place, own in enumerate(counts):
            others = ((number, largest[ngram]) for ngram, number in own.items())
            matches[place].append(
                sum(min(number, second if number == first else first) for number, (first, second) in others)
            )
    lengths = [len(text) for text in texts]
    scores = [
        _bleu_of_matches(found, lengths[place], [*lengths[:place], *lengths[place + 1 :]]) if lengths[place] else 0.0
        for place, found in enumerate(matches)
    ]
    return sum(scores) / len(scores)


def _bleu_of_matches(matches: Sequence[int], length: int, reference_lengths: Sequence[int]) -> float:
    """Return the BLEU of a text of some length from its clipped matches of single tokens, of pairs, and so on."""
    if not matches[0]:
        return 0.0
    logs = [
        math.log(
            (number or _NO_MATCH) / max(1, length - n)
        )  # a text has length − n + 1 n-grams, and n counts from 0 here
        for n, number in enumerate(matches)
    ]
    nearest = min(reference_lengths, key=lambda size: (abs(size - length), size))
    penalty = min(0.0, 1.0 - nearest / length)
    return math.exp(penalty + sum(logs) / len(matches))


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return 1 − C(n − c, k)/C(n, k), the share of the sets of k of n samples that hold a correct one.

    Raises:
        ValueError: if 1 ≤ k ≤ n or 0 ≤ c ≤ n does not hold.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k = {k} must lie in 1 … {num_samples}, the number of samples")
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"num_correct = {num_correct} must lie in 0 … {num_samples}, the number of samples")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def distinct_correct(answers: Sequence[Hashable | None], is_correct: Sequence[bool]) -> int:
    """Return the number of different answers that are correct.

    Raises:
        ValueError: if the two sequences differ in length.
    """
    return len({answer for answer, right in zip(answers, is_correct, strict=True) if right})


def samples_at_equal_cost(k: int, mean_length: float, reference_length: float, num_samples: int) -> int:
    """Return how many samples of `mean_length` tokens cost as much as k of `reference_length`: at least 1, at most all."""
    return max(1, min(num_samples, round(k * reference_length / max(mean_length, 1e-9))))


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the mean over independent prompts with its 95 % interval, without those whose value is NaN."""
    known = [value for value in values if not math.isnan(value)]
    return intervals.mean_interval(known) if known else Interval(math.nan, math.nan)
