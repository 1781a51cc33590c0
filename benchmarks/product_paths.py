"""The task of products: reach a target by a product of two digits and what is missing; texts, a verifier, and a split.

    5 7 : 6 * 8 = 4 8 + 9        57 = 6·8 + 9
    5 7 : 9 * 7 = 6 3 - 6        57 = 9·7 − 6

Any two factors from 2 to 9 lead to the target, so that a target has 64 paths, two free choices each; product, sign and
difference follow from them. Demonstrations prefer a product that is near: a path's probability falls as 1/(1 + distance).
Nothing in them is wrong: what a model of them gets wrong is its own arithmetic. The answer is the pair of factors, and it
is right if all that follows is right.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

END = "<end>"
WORDS = (END, *"0123456789", ":", "*", "=", "+", "-")
"""The vocabulary; a token's ID is its place. The end also opens a text."""
FACTORS = range(2, 10)
TARGETS = range(10, 100)
NUM_NEW_TOKENS = 10
"""Tokens of the longest path, with the end."""
_TEXT_LENGTH = 4 + NUM_NEW_TOKENS


def split_targets() -> dict[str, list[int]]:
    """Return the targets of the base, of training on rewards and of the verdict: 45, 30 and 15, the same for all seeds."""
    order = np.random.default_rng(0).permutation(np.array(TARGETS)).tolist()
    return {"base": order[30:75], "train": order[75:] + order[:15], "held_out": order[15:30]}


def prompt_of(target: int) -> str:
    """Return the prompt of a target, with the token that opens a text."""
    return " ".join((END, *str(target), ":"))


def path_of(target: int, first: int, second: int) -> str:
    """Return the path to a target by two factors."""
    product = first * second
    sign, distance = ("+", target - product) if product <= target else ("-", product - target)
    return " ".join((str(first), "*", str(second), "=", *str(product), sign, *str(distance)))


def draw_texts(number: int, targets: Sequence[int], rng: np.random.Generator) -> np.ndarray:
    """Return token IDs of demonstrations for random targets, padded with the end: (number, 14)."""
    pairs = np.array([(first, second) for first in FACTORS for second in FACTORS])
    products = pairs.prod(axis=1)
    texts = np.zeros((number, _TEXT_LENGTH), dtype=np.int64)
    for row, target in enumerate(rng.choice(np.array(targets), size=number)):
        weights = 1.0 / (1.0 + np.abs(products - target))
        first, second = pairs[rng.choice(len(pairs), p=weights / weights.sum())]
        tokens = tokens_of(f"{prompt_of(target)} {path_of(target, first, second)}")
        texts[row, : len(tokens)] = tokens
    return texts


def tokens_of(text: str) -> list[int]:
    """Return the token IDs of a text."""
    return [WORDS.index(word) for word in text.split()]


def verify(sample: Mapping[str, Any]) -> float:
    """Return 1 if the text of a sample is a right path to the `target` of its prompt, else 0; nothing is executed."""
    text = " ".join(str(sample["text"]).split())
    factors = re.match(r"([2-9]) \* ([2-9]) ", text)
    return float(factors is not None and text == path_of(int(sample["target"]), int(factors[1]), int(factors[2])))
