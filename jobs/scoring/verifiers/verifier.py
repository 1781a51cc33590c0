"""What a verifier is: its settings, what it judges, what it may answer; the two that compare with an answer; the panel.

A verifier gives a generated text a reward in [0, 1]. One that fails costs its sample, and the failure is counted.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jobs.engine.fields import check_positive
from jobs.scoring.generation.gsm8k import extract_answer, gold_answer
from tempnet.fingerprints import files_digest

# raised: an exception, or an exit status above 1; timed_out: no answer in time; died: the process ended without one;
# not_a_number: NaN, or something else than a number; out_of_range: a number outside [0, 1].
FailureReason = Literal["raised", "timed_out", "died", "not_a_number", "out_of_range"]

_AFTER_MARK = re.compile(r"####\s*(\S.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierSection:
    """What gives the texts their rewards."""

    name: str
    """exact: the text equals `answer` of its prompt. gsm8k: its number is the one after #### in `answer`. unit-tests: its
    code passes `tests` of its prompt, run under limits. MODULE:FUNCTION: a Python function of a dictionary with `prompt`,
    `text` and the prompt's other fields, which returns a number in [0, 1]. Else a command, which reads the same as JSON
    and prints such a number, or ends with status 0 (right) or 1 (wrong). The file of MODULE, or the files that the command
    names, identify a run: with another content it is begun anew."""
    seconds: float = 10.0
    """Time limit of a sample; for unit-tests, of its code, which has then failed, and of the CPU time of all its processes
    together."""
    memory_mib: int = 1024
    """Memory in MiB that the processes of the code of unit-tests may use together, and address space of each of them."""
    num_processes: int = 32
    """Number of processes that the code of unit-tests may have at a time."""
    file_mib: int = 16
    """Size in MiB of all files together that the code of unit-tests writes."""
    allow_unisolated: bool = False
    """Run the code of unit-tests also where this machine's kernel cannot isolate it: it may then read and write all that
    you may, and reach the network."""

    def __post_init__(self) -> None:
        check_positive("verifier", self, "seconds", "memory_mib", "num_processes", "file_mib")
        if not self.name:
            raise ValueError("verifier.name is empty: exact, gsm8k, unit-tests, MODULE:FUNCTION or a command")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A generated text, with what is known of its prompt."""

    prompt: str
    text: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Values that the file of prompts holds for the prompt, such as its reference answer."""

    def to_json(self) -> str:
        """Return `prompt`, `text` and the fields of the prompt under their own names, as one line of JSON."""
        return json.dumps({**self.fields, "prompt": self.prompt, "text": self.text}, ensure_ascii=False)


class VerifierError(Exception):
    """A verifier did not give a sample a reward; it costs that sample."""

    def __init__(self, reason: FailureReason, message: str) -> None:
        super().__init__(message)
        self.reason: FailureReason = reason


class Verifier:
    """Gives samples rewards; one object is used by one thread at a time."""

    def start(self) -> None:
        """Start what the verifier needs; raise ValueError if that is impossible."""

    def check(self, fields: Mapping[str, Any]) -> None:
        """Raise ValueError if a prompt with these fields lacks what the verifier compares a text with."""

    def files(self) -> list[Path]:
        """Return the files of the user's own code, once the verifier is started."""
        return []

    def judge(self, sample: Sample) -> float:
        """Return the reward of a sample, in [0, 1], or raise VerifierError."""
        raise NotImplementedError

    def close(self) -> None:
        """End what the verifier has started."""


def as_reward(value: Any) -> float:
    """Return what a verifier answered as a reward; VerifierError is raised if it is no number in [0, 1]."""
    if not isinstance(value, bool | int | float) or math.isnan(value):
        raise VerifierError("not_a_number", f"{value!r:.100} is not a number")
    if not 0.0 <= value <= 1.0:
        raise VerifierError("out_of_range", f"{value:g} does not lie in [0, 1]")
    return float(value)


class ExactMatch(Verifier):
    """1 for a text that equals `answer` of its prompt, both without white space at their ends, else 0."""

    def check(self, fields: Mapping[str, Any]) -> None:
        if not isinstance(fields.get("answer"), str):
            raise ValueError("verifier.name = exact compares with a string `answer`, which is missing")

    def judge(self, sample: Sample) -> float:
        return float(sample.text.strip() == str(sample.fields["answer"]).strip())


class Gsm8k(Verifier):
    """1 for a text whose number is that of the reference solution, in canonical form, else 0.

    The number of a text is the one after its last `####`, else that of `jobs.scoring.generation.gsm8k.extract_answer`. The
    reference is the number `gold`, or a solution `answer` that ends in `####` and a number.
    """

    def check(self, fields: Mapping[str, Any]) -> None:
        if "gold" not in fields and not isinstance(fields.get("answer"), str):
            raise ValueError("verifier.name = gsm8k compares with a solution `answer`, which is missing")
        self._gold(fields)

    def judge(self, sample: Sample) -> float:
        marked = _AFTER_MARK.findall(sample.text)
        return float(extract_answer(marked[-1] if marked else sample.text) == self._gold(sample.fields))

    def _gold(self, fields: Mapping[str, Any]) -> str:
        if "gold" not in fields:
            return gold_answer(fields["answer"])
        if (gold := extract_answer(str(fields["gold"]))) is None:
            raise ValueError(f"verifier.name = gsm8k compares with a number `gold`, and it is {fields['gold']!r:.100}")
        return gold


class Judgement(NamedTuple):
    rewards: list[float | None]
    """Reward of every sample; None if the verifier failed."""
    failures: Counter[FailureReason]
    """Number of samples lost, by reason."""
    first_failure: str


def make_verifier(settings: VerifierSection) -> Verifier:
    """Return the verifier of some settings; raises ValueError if it is a command that this machine does not have."""
    from jobs.scoring.verifiers.programs import FUNCTION, CommandVerifier, FunctionVerifier, UnitTests

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
        self._members = [make_verifier(settings) for _ in range(num_at_a_time)]

    def check(self, prompts: Iterable[tuple[int | str, Mapping[str, Any]]]) -> str:
        """Check the verifier and all prompts, each given by its ID and fields; return the digest of the user's own code.

        ValueError is raised if a function cannot be imported, or a prompt, which it names, lacks a reference.
        """
        self._members[0].start()
        for identity, fields in prompts:
            try:
                self._members[0].check(fields)
            except ValueError as error:
                raise ValueError(f"prompt {identity!r}: {error}") from error
        files = self._members[0].files()
        return files_digest(files, whole=True) if files else ""

    def judge(self, samples: Sequence[Sample]) -> Judgement:
        """Judge samples; the order in which they are judged changes nothing."""
        size = len(self._members)
        with ThreadPoolExecutor(size) as threads:
            parts = list(threads.map(_judge_part, self._members, [samples[start::size] for start in range(size)]))
        answers = [parts[place % size][place // size] for place in range(len(samples))]
        errors = [answer for answer in answers if isinstance(answer, VerifierError)]
        return Judgement(
            [None if isinstance(answer, VerifierError) else answer for answer in answers],
            Counter(error.reason for error in errors),
            str(errors[0]) if errors else "",
        )

    def close(self) -> None:
        for member in self._members:
            member.close()


def _judge_part(member: Verifier, samples: Sequence[Sample]) -> list[float | VerifierError]:
    answers: list[float | VerifierError] = []
    for sample in samples:
        try:
            answers.append(as_reward(member.judge(sample)))
        except VerifierError as error:
            answers.append(error)
        except Exception as error:
            answers.append(VerifierError("raised", f"{type(error).__name__}: {error}"))
    return answers
