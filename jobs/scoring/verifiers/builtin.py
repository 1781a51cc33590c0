"""The verifiers that compare a text with the reference answer of its prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jobs.scoring.generation.gsm8k import extract_answer, gold_answer
from jobs.scoring.verifiers.samples import Sample

_AFTER_MARK = re.compile(r"####\s*(\S.*)")


class ExactMatch:
    """1 for a text that equals `answer` of its prompt, both without white space at their ends, else 0."""

    def check(self, fields: Mapping[str, Any]) -> None:
        """Check that the prompt has a string `answer`."""
        if not isinstance(fields.get("answer"), str):
            raise ValueError("verifier.name = exact compares with a string `answer`, which is missing")

    def judge(self, sample: Sample) -> float:
        """Return 1 or 0."""
        return float(sample.text.strip() == str(sample.fields["answer"]).strip())

    def close(self) -> None:
        """End nothing."""


class Gsm8k:
    """1 for a text whose number is that of the reference solution, in canonical form, else 0.

    The number of a text is the one after its last `####`, else that of `jobs.scoring.generation.gsm8k.extract_answer`. The
    reference is `gold`, as the format gsm8k reads it, or a solution `answer` that ends in `####` and a number.
    """

    def check(self, fields: Mapping[str, Any]) -> None:
        """Check that the prompt has a reference number."""
        if "gold" not in fields:
            if not isinstance(fields.get("answer"), str):
                raise ValueError("verifier.name = gsm8k compares with a solution `answer`, which is missing")
            gold_answer(fields["answer"])

    def judge(self, sample: Sample) -> float:
        """Return 1 or 0."""
        fields = sample.fields
        gold = fields["gold"] if "gold" in fields else gold_answer(fields["answer"])
        marked = _AFTER_MARK.findall(sample.text)
        return float(extract_answer(marked[-1] if marked else sample.text) == gold)

    def close(self) -> None:
        """End nothing."""
