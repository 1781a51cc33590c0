"""A worker of the bench: it holds the model and does one unit of work at a time.

The driver decides what is done next (`run_bench`); workers only train, score and sample. So the bench runs in the same way
with a pool of Ray's workers and in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from jobs.scoring.decoders.bench import (
    Choice,
    Comparison,
    Verifier,
    compare_on_prompts,
    compare_on_text,
    make_families,
    split_text,
    with_controls,
)
from jobs.scoring.decoders.learned import move_rule
from jobs.scoring.decoders.model import FrozenModel, MeasuredText, SampledText
from jobs.scoring.units import Finished
from pipelines.local_copy import local_copy
from tempnet.decoders.rules import Rule
from tempnet.loading import load_tempnet


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """What a worker needs; paths are absolute, because a worker has its own working directory."""

    model: str
    vocab_size: int
    bos_id: int
    precision: Literal["fp32", "bf16"] = "fp32"
    documents: tuple[tuple[int, ...], ...]
    """Token ids of the documents."""
    prompts: tuple[tuple[int, ...], ...]
    """Token ids of the prompts."""
    tempnets: Mapping[str, str]
    """Name → directory, URI or hub name of a TempNet that was trained elsewhere."""
    num_steps: int
    num_samples: int
    max_new_tokens: int
    k: int
    seed: int
    batch_size: int


@dataclass(frozen=True, slots=True)
class TextUnit:
    """Train the learned decoders and compare all of them on text."""

    title = "text"


@dataclass(frozen=True, slots=True)
class ControlUnit:
    """Make the controls of the chosen rules."""

    title = "controls"
    chosen: dict[str, Choice]


@dataclass(frozen=True, slots=True)
class SampleUnit:
    """Sample texts by a rule for some prompts."""

    number: int
    rule: Rule
    places: tuple[int, ...]

    @property
    def title(self) -> str:
        """Number and label of the rule."""
        return f"{self.number}: {self.rule.label}"


BenchUnit = TextUnit | ControlUnit | SampleUnit


class BenchWorker:
    """Holds the model, and does units of work."""

    def __init__(self, settings: BenchSettings, *, use_gpu: bool = False) -> None:
        self._settings = settings
        self._model = FrozenModel(
            settings.model,
            vocab_size=settings.vocab_size,
            bos_id=settings.bos_id,
            precision=settings.precision,
            use_gpu=use_gpu,
        )
        self._text: MeasuredText | None = None

    @property
    def text(self) -> MeasuredText:
        """The tokens of all documents, which the model reads when they are first needed."""
        if self._text is None:
            self._text = self._model.measure(self._settings.documents, self._settings.batch_size)
        return self._text

    def __call__(self, unit: BenchUnit) -> Finished:
        """Do a unit, whose result is sent to the driver."""
        return Finished(value=self.do(unit))

    def do(self, unit: BenchUnit) -> Any:
        """Do a unit: families and comparison of a `TextUnit`, rules of a `ControlUnit`, texts of a `SampleUnit`."""
        if isinstance(unit, TextUnit):
            return self._compare()
        if isinstance(unit, ControlUnit):
            for choice in unit.chosen.values():
                move_rule(choice.rule, self._model.device)
            return _on_cpu(with_controls(self._model, split_text(self.text)[0], unit.chosen))
        return self._sample(unit)

    def _compare(self) -> tuple[dict[str, list[Rule]], Comparison]:
        settings, model = self._settings, self._model
        tempnets = {name: load_tempnet(local_copy(place)) for name, place in settings.tempnets.items()}
        made = make_families(
            model, split_text(self.text)[0], tempnets, num_steps=settings.num_steps, seed=settings.seed
        )
        families = {name: [move_rule(rule, model.device) for rule in family] for name, family in made.items()}
        comparison = compare_on_text(model, self.text, families, seed=settings.seed)
        for family in families.values():
            for rule in family:
                move_rule(rule, torch.device("cpu"))
        return families, comparison

    def _sample(self, unit: SampleUnit) -> list[list[SampledText]]:
        settings = self._settings
        return self._model.sample(
            move_rule(unit.rule, self._model.device),
            [settings.prompts[place] for place in unit.places],
            num_samples=settings.num_samples,
            num_tokens=settings.max_new_tokens,
            seed=settings.seed,
            batch_size=settings.batch_size,
        )


def run_bench(
    settings: BenchSettings, run: Callable[[Sequence[BenchUnit]], list[Any]], verify: Verifier | None = None
) -> Comparison:
    """Run the bench from start to end.

    Args:
        settings: model, text and prompts.
        run: does units of work and returns their results in order.
        verify: checks answers.
    """
    families, comparison = run([TextUnit()])[0]

    def sample(rules: Sequence[Rule], places: Sequence[int]) -> list[list[list[SampledText]]]:
        return run([SampleUnit(number, rule, tuple(places)) for number, rule in enumerate(rules)])

    def add_controls(chosen: Mapping[str, Choice]) -> dict[str, Choice]:
        made: dict[str, Choice] = run([ControlUnit(dict(chosen))])[0]
        return made

    compare_on_prompts(comparison, families, sample, len(settings.prompts), add_controls, k=settings.k, verify=verify)
    return comparison


def _on_cpu(chosen: dict[str, Choice]) -> dict[str, Choice]:
    for choice in chosen.values():
        move_rule(choice.rule, torch.device("cpu"))
    return chosen
