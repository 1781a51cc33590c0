"""Scoring the exports of finished runs with the evaluation jobs, which keep every score and reuse it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jobs.engine.config import TrackingSection, TrainingConfig
from jobs.scoring.config import LanguageModelPool

_UNTRACKED = TrackingSection(enabled=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """A finished run with its outcome."""

    config: TrainingConfig
    outcome: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.config.run.name

    @property
    def export(self) -> str:
        """Location of its exported model."""
        return str(self.outcome["export"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The resources for scoring: a directory, data and workers."""

    directory: str
    """Directory of the experiment."""
    data: Mapping[str, str]
    """Name → path of the data that the scoring needs."""
    workers: LanguageModelPool


class Scoring(Protocol):
    """One way of scoring exports."""

    @property
    def data(self) -> Mapping[str, str]:
        """Name → default path of the data, which `--data NAME=PATH` replaces; an empty path: the data are optional."""
        ...

    def scores(self, runs: Sequence[FinishedRun], place: Place) -> dict[str, dict[str, float]]:
        """Returns name of a run → its scores. Ray must be running.

        Raises:
            ValueError, OSError, ScoringFailedError: as the evaluation jobs.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrieval:
    """Scores dual encoders: recalls on held-out images with captions, and zero-shot accuracies, as `<set>/<figure>`."""

    retrieval: Mapping[str, str]
    """Name of a set → path of its images."""
    captions: Mapping[str, str] = field(default_factory=dict)
    """Name of a set → JSON file in Karpathy's form, of which the test split is used; empty: the captions beside the
    images."""
    zero_shot: Mapping[str, str] = field(default_factory=dict)
    """Name of a set → path with one folder of images per class."""

    @property
    def data(self) -> Mapping[str, str]:
        """Paths of the sets by name, and of their captions by `<name>_captions`."""
        return {
            **self.retrieval,
            **self.zero_shot,
            **{f"{name}_captions": path for name, path in self.captions.items()},
        }

    def scores(self, runs: Sequence[FinishedRun], place: Place) -> dict[str, dict[str, float]]:
        """Scores the runs with `jobs.evaluate_clip`."""
        from jobs.scoring.dual_encoders.config import EvaluateClipConfig
        from jobs.scoring.dual_encoders.evaluate import evaluate

        captions = [f"{name}={path}" for name in self.retrieval if (path := place.data.get(f"{name}_captions"))]
        columns = evaluate(
            EvaluateClipConfig(
                models=tuple(run.export for run in runs),
                retrieval=tuple(f"{name}={place.data[name]}" for name in self.retrieval),
                captions=tuple(captions),
                splits=tuple(f"{name}=test" for name in self.retrieval if self.captions.get(name)),
                zero_shot=tuple(f"{name}={place.data[name]}" for name in self.zero_shot),
                name="retrieval",
                storage=place.directory,
                workers=place.workers,
                tracking=_UNTRACKED,
            )
        ).columns
        return {run.name: dict(column.metrics) for run, column in zip(runs, columns, strict=True)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Scores sentence encoders on SentEval's tasks: `<task>/accuracy`, and `mean_accuracy`."""

    directory: str
    num_folds: int = 10
    num_inner_folds: int = 5

    @property
    def data(self) -> Mapping[str, str]:
        """The directory of SentEval's tasks."""
        return {"senteval": self.directory}

    def scores(self, runs: Sequence[FinishedRun], place: Place) -> dict[str, dict[str, float]]:
        """Scores the runs with `jobs.evaluate_sentences`."""
        from jobs.scoring.sentence_encoders.config import EvaluateSentencesConfig
        from jobs.scoring.sentence_encoders.evaluate import evaluate, mean_accuracy

        columns = evaluate(
            EvaluateSentencesConfig(
                models=tuple(run.export for run in runs),
                data=place.data["senteval"],
                num_folds=self.num_folds,
                num_inner_folds=self.num_inner_folds,
                name="transfer",
                storage=place.directory,
                workers=place.workers,
                tracking=_UNTRACKED,
            )
        ).columns
        return {
            run.name: {**column.metrics, "mean_accuracy": mean_accuracy(column) or 0.0}
            for run, column in zip(runs, columns, strict=True)
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """Scores language models at their own temperatures: WikiText-2 word perplexity, LAMBADA, and harness tasks.

    A model with a TempNet is scored at the `temperatures`, any other at τ = 1. Scores are named `<task>/<figure>`, or
    `<task>/<figure> at <temperature>` for temperatures other than the model's own.
    """

    wikitext: str = "data/wikitext2_test.txt"
    lambada: str = "data/lambada_test.jsonl"
    """JSONL file of LAMBADA; empty: it is not scored."""
    tasks: tuple[str, ...] = ("piqa", "hellaswag", "arc_easy", "arc_challenge", "openbookqa")
    temperatures: tuple[str, ...] = ("tempnet",)
    """Temperatures for models with a TempNet, as in `jobs.evaluate_lm`."""

    @property
    def data(self) -> Mapping[str, str]:
        """The two files; the harness loads its tasks from the hub."""
        return {"wikitext": self.wikitext} | ({"lambada": self.lambada} if self.lambada else {})

    def scores(self, runs: Sequence[FinishedRun], place: Place) -> dict[str, dict[str, float]]:
        """Scores the runs with `jobs.evaluate_lm`."""
        from jobs.scoring.language_models.config import EvaluateConfig
        from jobs.scoring.language_models.evaluate import evaluate
        from tempnet.loading import find_tempnet

        predicted = [run for run in runs if find_tempnet(run.export)]
        scores: dict[str, dict[str, float]] = {run.name: {} for run in runs}
        for own, group, temperatures in (
            ("tempnet", predicted, self.temperatures),
            ("one", [run for run in runs if run not in predicted], ("one",)),
        ):
            if not group:
                continue
            columns = evaluate(
                EvaluateConfig(
                    models=tuple(run.export for run in group),
                    temperatures=temperatures,
                    wikitext=place.data["wikitext"],
                    lambada=place.data.get("lambada", ""),
                    tasks=self.tasks,
                    name=f"language-{own}",
                    storage=place.directory,
                    workers=place.workers,
                    tracking=_UNTRACKED,
                )
            ).columns
            for number, column in enumerate(columns):
                name = group[number // len(temperatures)].name
                temperature = column.parameters["temperature"]
                suffix = "" if temperature == own else f" at {temperature}"
                scores[name] |= {f"{key}{suffix}": value for key, value in column.metrics.items()}
        return scores


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Reads a validation score in the course of training: `<score>@1` … `<score>@num_points`."""

    score: str
    num_points: int

    @property
    def data(self) -> Mapping[str, str]:
        """No data are needed."""
        return {}

    def scores(self, runs: Sequence[FinishedRun], place: Place) -> dict[str, dict[str, float]]:
        """Returns the scores of the validations nearest to `num_points` evenly spaced steps."""
        scores = {}
        for run in runs:
            history = {
                validation["step"]: validation["scores"][self.score] for validation in run.outcome["validations"]
            }
            steps = sorted(history)
            wanted = [run.config.run.num_steps * point // self.num_points for point in range(1, self.num_points + 1)]
            nearest = [min(steps, key=lambda step, goal=goal: abs(step - goal)) for goal in wanted]  # type: ignore[misc]
            scores[run.name] = {f"{self.score}@{point}": history[step] for point, step in enumerate(nearest, start=1)}
        return scores
