"""Figures of sampled texts, each a mean over prompts with its 95 % interval.

Shapes: a list of prompts, each with a list of its texts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from jobs.scoring.decoders.model import SampledText
from tempnet.decoders.measures import (
    distinct_correct,
    distinct_n,
    mean_interval,
    pass_at_k,
    samples_at_equal_cost,
    self_bleu,
)
from tempnet.intervals import Interval

DISTINCT_ORDER = 2
"""n of the distinct-n that is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFigures:
    """Figures of the texts of one rule; those that need a verifier are None without one."""

    log_probability: Interval
    """Log-probability of a token under the model at τ = 1, in nats: the higher, the safer the text."""
    distinct: Interval
    """distinct-2."""
    self_bleu: Interval
    """Self-BLEU."""
    length: float
    """Mean number of tokens drawn for a text."""
    num_counted: int | None = None
    """Number of texts that cost as much as k texts of τ = 1."""
    correct: Interval | None = None
    """Share of correct texts."""
    distinct_correct: Interval | None = None
    """Number of different correct answers in texts that cost no more than all those of τ = 1, over the latter's number."""
    pass_at_k: Interval | None = None
    """pass@k at equal tokens."""
    maj_at_k: Interval | None = None
    """maj@k at equal tokens: the most frequent answer of a group of texts is correct."""


def measure_prompts(
    texts: Sequence[Sequence[SampledText]],
    places: Sequence[int],
    *,
    k: int,
    reference_length: float,
    verify: Callable[[int, SampledText], tuple[Hashable | None, bool]] | None,
) -> PromptFigures:
    """Return the figures of a rule.

    Args:
        texts: for every prompt, its texts; each prompt has the same number.
        places: places of the prompts among all prompts, for the verifier.
        k: number of texts of pass@k and maj@k, in texts of τ = 1.
        reference_length: mean number of tokens of a text of τ = 1.
        verify: checks an answer.
    """
    num_samples = len(texts[0])
    lengths = [text.num_drawn for samples in texts for text in samples]
    length = sum(lengths) / len(lengths)
    plain = PromptFigures(
        log_probability=mean_interval([-text_loss([samples]) for samples in texts]),
        distinct=mean_interval([distinct_n([text.tokens for text in samples], DISTINCT_ORDER) for samples in texts]),
        self_bleu=mean_interval([self_bleu([text.tokens for text in samples]) for samples in texts]),
        length=length,
    )
    if verify is None:
        return plain
    checked = [[verify(place, text) for text in samples] for place, samples in zip(places, texts, strict=True)]
    counted = samples_at_equal_cost(k, length, reference_length, num_samples)
    within = samples_at_equal_cost(num_samples, length, reference_length, num_samples)
    right = [[is_right for _, is_right in samples] for samples in checked]
    return replace(
        plain,
        num_counted=counted,
        correct=mean_interval([sum(row) / num_samples for row in right]),
        distinct_correct=mean_interval(
            [distinct_correct(*zip(*samples[:within], strict=True)) / num_samples for samples in checked]
        ),
        pass_at_k=mean_interval([pass_at_k(num_samples, sum(row), counted) for row in right]),
        maj_at_k=mean_interval([_majority(samples, counted) for samples in checked]),
    )


def text_loss(texts: Sequence[Sequence[SampledText]]) -> float:
    """Return the NLL of a token of all texts under the model at τ = 1, in nats."""
    drawn = [text for samples in texts for text in samples]
    return -sum(text.log_probability for text in drawn) / max(1, sum(text.num_drawn for text in drawn))


def _majority(samples: Sequence[tuple[Hashable | None, bool]], k: int) -> float:
    """Return maj@k over the whole groups of k samples; ties go to the answer that occurs first, None has no vote."""
    wins = []
    for start in range(0, len(samples) // k * k, k):
        group = samples[start : start + k]
        votes = Counter(answer for answer, _ in group if answer is not None).most_common(1)
        wins.append(bool(votes) and dict(group)[votes[0][0]])
    return sum(wins) / len(wins)
