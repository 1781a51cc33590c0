"""Makes a verifier by its name, and has several samples judged at a time; failures cost their samples and are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from jobs.scoring.verifiers.programs import FUNCTION, CommandVerifier, FunctionVerifier
from jobs.scoring.verifiers.unit_tests import UnitTests
from jobs.scoring.verifiers.verifier import (
    ExactMatch,
    FailureReason,
    Gsm8k,
    Sample,
    Verifier,
    VerifierError,
    VerifierSection,
    as_reward,
)


@dataclass(slots=True)
class Judgement:
    """What became of samples."""

    rewards: list[float | None]
    """Reward of every sample; None if the verifier failed."""
    failures: Counter[FailureReason] = field(default_factory=Counter)
    """Number of samples lost, by reason."""
    first_failure: str = ""
    """What the first failure says, in words."""


def make_verifier(settings: VerifierSection) -> Verifier:
    """Return the verifier of some settings.

    Raises:
        ValueError: if it is a command that this machine does not have.
    """
    if settings.name == "exact":
        return ExactMatch()
    if settings.name == "gsm8k":
        return Gsm8k()
    if settings.name == "unit-tests":
        return UnitTests(settings)
    kind = FunctionVerifier if FUNCTION.fullmatch(settings.name) else CommandVerifier
    return kind(settings.name, seconds=settings.seconds)


class Panel:
    """Verifiers of one kind, each of which judges one sample at a time."""

    def __init__(self, settings: VerifierSection, *, num_at_a_time: int = 1) -> None:
        """Make the verifiers; see :func:`make_verifier` for what is raised."""
        self._members = [make_verifier(settings) for _ in range(num_at_a_time)]

    def check(self, prompts: Iterable[tuple[int | str, Mapping[str, Any]]]) -> None:
        """Check the verifier and all prompts, each given by its ID and fields, before any text is generated.

        Raises:
            ValueError: if a function cannot be imported, or a prompt lacks a reference; the message names it.
        """
        first = self._members[0]
        if isinstance(first, FunctionVerifier):
            first.start()
        for identity, fields in prompts:
            try:
                first.check(fields)
            except ValueError as error:
                raise ValueError(f"prompt {identity!r}: {error}") from error

    def judge(self, samples: Sequence[Sample]) -> Judgement:
        """Judge samples; the order in which they are judged changes nothing."""
        size = len(self._members)
        with ThreadPoolExecutor(size) as threads:
            parts = list(threads.map(_judge_part, self._members, [samples[start::size] for start in range(size)]))
        judgement = Judgement([None] * len(samples))
        errors: dict[int, VerifierError] = {}
        for start, part in enumerate(parts):
            for place, answer in enumerate(part):
                if isinstance(answer, VerifierError):
                    errors[start + place * size] = answer
                else:
                    judgement.rewards[start + place * size] = answer
        judgement.failures.update(error.reason for error in errors.values())
        judgement.first_failure = str(errors[min(errors)]) if errors else ""
        return judgement

    def close(self) -> None:
        """End what the verifiers have started."""
        for member in self._members:
            member.close()


def _judge_part(member: Verifier, samples: Sequence[Sample]) -> list[float | VerifierError]:
    answers: list[float | VerifierError] = []
    for sample in samples:
        try:
            answers.append(as_reward(member.judge(sample)))
        except VerifierError as error:
            answers.append(error)
        except Exception as error:  # an error of a built-in verifier costs the sample too
            answers.append(VerifierError("raised", f"{type(error).__name__}: {error}"))
    return answers
