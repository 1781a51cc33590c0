"""What a verifier judges, what it may answer, and what becomes of a sample whose verifier fails."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

# raised: an exception, or an exit status above 1; timed_out: no answer in time; died: the process ended without one;
# not_a_number: NaN, or something else than a number; out_of_range: a number outside [0, 1].
FailureReason = Literal["raised", "timed_out", "died", "not_a_number", "out_of_range"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A generated text, with what is known of its prompt."""

    prompt: str
    """The text that the model was given."""
    text: str
    """The text that it generated, without special tokens."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Values that the file of prompts holds for the prompt, such as its reference answer."""

    def values(self) -> dict[str, Any]:
        """Return the sample as plain values: `prompt`, `text`, and the fields of the prompt under their own names."""
        return {**self.fields, "prompt": self.prompt, "text": self.text}

    def to_json(self) -> str:
        """Return :meth:`values` as one line of JSON."""
        return json.dumps(self.values(), ensure_ascii=False)


class VerifierError(Exception):
    """A verifier did not give a sample a reward; it costs that sample."""

    def __init__(self, reason: FailureReason, message: str) -> None:
        super().__init__(message)
        self.reason: FailureReason = reason


class Verifier(Protocol):
    """Gives samples rewards; one object is used by one thread at a time."""

    def check(self, fields: Mapping[str, Any]) -> None:
        """Raise ValueError if a prompt with these fields lacks what the verifier compares a text with."""

    def judge(self, sample: Sample) -> float:
        """Return the reward of a sample, in [0, 1].

        Raises:
            VerifierError: if it fails.
        """

    def close(self) -> None:
        """End what the verifier has started."""


def as_reward(value: Any) -> float:
    """Return what a verifier answered as a reward in [0, 1]; True is 1 and False is 0.

    Raises:
        VerifierError: if it is no number in this range.
    """
    if not isinstance(value, bool | int | float) or math.isnan(value):
        raise VerifierError("not_a_number", f"{value!r:.100} is not a number")
    if not 0.0 <= value <= 1.0:
        raise VerifierError("out_of_range", f"{value:g} does not lie in [0, 1]")
    return float(value)
