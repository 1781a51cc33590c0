"""The task of forks and locks: six free digits, an equals sign, and their sorted copy; texts to learn from, and a verifier.

A prompt is a letter, which says what digits are frequent. The digits before the sign are forks: any is right, but the
frequent ones are likelier. Those after it are locks: one is right. In the training texts half of the locks are wrong, half
of these by one, so that a model of them spreads its probability over locks as widely as over forks, and is rarely right at
τ = 1. An answer is right if the second six digits are the first six, sorted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

LETTERS = "abcdefgh"
NUM_DIGITS = 6
END = "<end>"
WORDS = (END, *LETTERS, "=", *"0123456789")
"""The vocabulary; a token's ID is its place."""
NUM_NEW_TOKENS = 2 * NUM_DIGITS + 2
FORK_WEIGHTS = np.array([0.36, 0.22, 0.12, 0.08, 0.06, 0.05, 0.04, 0.03, 0.02, 0.02])
"""Probability of the digit that is so far above the letter's own, modulo 10."""
SHARE_RIGHT, SHARE_NEXT = 0.5, 0.25
"""Share of the locks that are right, and that are the next digit; all other digits share the rest."""


def draw_texts(number: int, rng: np.random.Generator) -> np.ndarray:
    """Return token IDs of texts, each a letter, forks, a sign, corrupted locks and the end: (number, 15)."""
    letters = rng.integers(len(LETTERS), size=(number, 1))
    forks = (rng.choice(10, size=(number, NUM_DIGITS), p=FORK_WEIGHTS) + letters) % 10
    locks = np.sort(forks, axis=-1)
    chance, other = rng.random(locks.shape), rng.integers(2, 10, size=locks.shape)
    shift = np.where(chance < SHARE_RIGHT, 0, np.where(chance < SHARE_RIGHT + SHARE_NEXT, 1, other))
    first_digit, sign = WORDS.index("0"), np.full((number, 1), WORDS.index("="))
    parts = (letters + 1, forks + first_digit, sign, (locks + shift) % 10 + first_digit, np.zeros_like(letters))
    return np.concatenate(parts, axis=-1)


def verify(sample: Mapping[str, Any]) -> float:
    """Return 1 if the text of a sample is six digits, a sign and the same digits sorted, else 0."""
    words = str(sample["text"]).split()
    forks, locks = words[:NUM_DIGITS], words[NUM_DIGITS + 1 :]
    is_right = len(forks) == NUM_DIGITS and all(len(word) == 1 and word.isdigit() for word in forks)
    return float(is_right and words[NUM_DIGITS : NUM_DIGITS + 1] == ["="] and locks == sorted(forks))
