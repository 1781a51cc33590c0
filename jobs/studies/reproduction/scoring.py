"""Scoring the exports of finished runs with the evaluation jobs, which keep every score and reuse it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jobs.engine.config import TrainingConfig
from jobs.engine.resumption import count_writers, found_checkpoints
from pipelines.local_copy import local_copy
from pipelines.storage import read_bytes

if TYPE_CHECKING:
    from jobs.tasks.dual_encoder.config import ClipConfig
    from pipelines.images.pairs import PairSource


class FinishedRun(NamedTuple):
    config: TrainingConfig
    outcome: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.config.run.name

    @property
    def export(self) -> str:
        return str(self.outcome["export"])


class Scoring:
    """One way of scoring exports."""

    @property
    def data(self) -> Mapping[str, str]:
        """Name → default path of the data, which `--data NAME=PATH` replaces; an empty path: the data are optional."""
        return {}

    def scores(
        self, runs: Sequence[FinishedRun], data: Mapping[str, str], **common: Any
    ) -> dict[str, dict[str, float]]:
        """Return name of a run → its scores. Ray must be running; `common` are the fields of every evaluation job."""
        return {run.name: self.score(run) for run in runs}

    def score(self, run: FinishedRun) -> dict[str, float]:
        """Return the scores of one run, for what needs no evaluation job."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Retrieval(Scoring):
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
        captions = {f"{name}_captions": path for name, path in self.captions.items()}
        return {**self.retrieval, **self.zero_shot, **captions}

    def scores(
        self, runs: Sequence[FinishedRun], data: Mapping[str, str], **common: Any
    ) -> dict[str, dict[str, float]]:
        from jobs.scoring.dual_encoders.config import EvaluateClipConfig
        from jobs.scoring.dual_encoders.evaluate import evaluate

        config = EvaluateClipConfig(
            models=tuple(run.export for run in runs),
            retrieval=tuple(f"{name}={data[name]}" for name in self.retrieval),
            captions=tuple(f"{name}={path}" for name in self.retrieval if (path := data.get(f"{name}_captions"))),
            splits=tuple(f"{name}=test" for name in self.retrieval if self.captions.get(name)),
            zero_shot=tuple(f"{name}={data[name]}" for name in self.zero_shot),
            name="retrieval",
            **common,
        )
        return {run.name: column.metrics for run, column in zip(runs, evaluate(config).columns, strict=True)}


@dataclass(frozen=True, kw_only=True)
class Transfer(Scoring):
    """Scores sentence encoders on SentEval's tasks: `<task>/accuracy`, `mean_accuracy`, `mean_probing`."""

    directory: str
    num_folds: int = 10
    num_inner_folds: int = 5

    @property
    def data(self) -> Mapping[str, str]:
        return {"senteval": self.directory}

    def scores(
        self, runs: Sequence[FinishedRun], data: Mapping[str, str], **common: Any
    ) -> dict[str, dict[str, float]]:
        from jobs.scoring.sentence_encoders.config import EvaluateSentencesConfig
        from jobs.scoring.sentence_encoders.evaluate import evaluate, mean_accuracies

        config = EvaluateSentencesConfig(
            models=tuple(run.export for run in runs),
            data=data["senteval"],
            num_folds=self.num_folds,
            num_inner_folds=self.num_inner_folds,
            name="transfer",
            **common,
        )
        columns = zip(runs, evaluate(config).columns, strict=True)
        return {run.name: {**column.metrics, **mean_accuracies(column)} for run, column in columns}


@dataclass(frozen=True, kw_only=True)
class Language(Scoring):
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

    def scores(
        self, runs: Sequence[FinishedRun], data: Mapping[str, str], **common: Any
    ) -> dict[str, dict[str, float]]:
        from jobs.scoring.language_models.config import EvaluateConfig
        from jobs.scoring.language_models.evaluate import evaluate
        from tempnet.loading import find_tempnet

        groups: dict[str, list[FinishedRun]] = {}
        for run in runs:
            groups.setdefault("tempnet" if find_tempnet(run.export) else "one", []).append(run)
        scores: dict[str, dict[str, float]] = {run.name: {} for run in runs}
        for own, group in groups.items():
            temperatures = self.temperatures if own == "tempnet" else ("one",)
            config = EvaluateConfig(
                models=tuple(run.export for run in group),
                temperatures=temperatures,
                wikitext=data["wikitext"],
                lambada=data.get("lambada", ""),
                tasks=self.tasks,
                name=f"language-{own}",
                **common,
            )
            for number, column in enumerate(evaluate(config).columns):
                temperature = column.parameters["temperature"]
                suffix = "" if temperature == own else f" at {temperature}"
                found = {f"{key}{suffix}": value for key, value in column.metrics.items()}
                scores[group[number // len(temperatures)].name] |= found
        return scores


@dataclass(frozen=True, kw_only=True)
class History(Scoring):
    """Reads a validation score in the course of training: `<score>@1` … `<score>@num_points`.

    It is that of the validations nearest to `num_points` evenly spaced steps.
    """

    name: str
    num_points: int

    def score(self, run: FinishedRun) -> dict[str, float]:
        history = {one["step"]: one["scores"][self.name] for one in run.outcome["validations"]}
        wanted = [run.config.run.num_steps * point // self.num_points for point in range(1, self.num_points + 1)]
        nearest = [min(sorted(history), key=lambda step: abs(step - place)) for place in wanted]
        return {f"{self.name}@{point}": history[step] for point, step in enumerate(nearest, start=1)}


@dataclass(frozen=True, kw_only=True)
class NoisyCaptions(Scoring):
    """Compares the temperatures of pairs with noisy captions with those of the other pairs, in %: `noisy_tau`.

    It is the mean over images and captions of the training set. TempNets predict them anew; iSogCLR's temperatures are read
    from its last checkpoint. Which pairs are noisy at `share` depends on the seed alone, so a run without noise shows how
    much of the difference is not due to the noise.
    """

    share: float = 0.15
    num_pairs: int = 4000

    def score(self, run: FinishedRun) -> dict[str, float]:
        config, source, ids = _draw_pairs(run, "train", self.num_pairs)
        places = source.locate(ids)
        batch = source.read(*places, 0)
        is_noisy = dataclasses.replace(source, caption_noise=self.share).read(*places, 0)["is_noisy"]
        if config.temperature.needs_tempnets:
            tau = _predict(run.export, batch)
        else:
            tau = read_stored_temperatures(config.run.directory, source.manifest.num_pairs)[:, ids]
        ratios = tau[:, is_noisy].mean(1) / tau[:, ~is_noisy].mean(1)
        return {"noisy_tau": float(100 * (ratios - 1).mean())}


@dataclass(frozen=True, kw_only=True)
class LabelCorrelation(Scoring):
    """Correlates the predicted temperatures of held-out pairs with a number beside their images: `label_spearman`.

    It is the mean over images and captions of Spearman's rank correlation.
    """

    label: str
    """Field of the JSON files beside the images."""
    num_pairs: int = 2000

    def score(self, run: FinishedRun) -> dict[str, float]:
        import pyarrow as pa

        from jobs.scoring.temperatures.pairs import MODALITIES, correlate, labelled_temperatures
        from pipelines.images.manifest import read_index

        config, source, ids = _draw_pairs(run, "validation", self.num_pairs)
        manifest = source.manifest
        keys = [key for shard in range(len(manifest.shards)) for key in read_index(manifest, shard)["key"].to_pylist()]
        tau = _predict(run.export, source.read(*source.locate(ids), 0))
        columns = {"key": [keys[pair] for pair in ids], **dict(zip(MODALITIES, tau, strict=True))}
        samples = labelled_temperatures(pa.table(columns), config.data.validation, self.label)
        return {"label_spearman": float(np.mean([found.mean for found in correlate(samples, self.label).values()]))}


def _draw_pairs(run: FinishedRun, split: str, count: int) -> tuple[ClipConfig, PairSource, np.ndarray]:
    """Return the configuration of a run, what reads the pairs of one of its splits, and the ids of some of them."""
    from jobs.tasks.base import draw_samples
    from jobs.tasks.dual_encoder.config import ClipConfig
    from jobs.tasks.dual_encoder.task import pair_source
    from jobs.tasks.images import prepare_split

    config = run.config
    assert isinstance(config, ClipConfig)
    source = pair_source(config, prepare_split(config, split))
    num_pairs = source.manifest.num_pairs
    return config, source, draw_samples(num_pairs, min(count, num_pairs), config.run.seed)


def _predict(export: str, batch: Mapping[str, Any]) -> Any:
    """Return the predicted temperatures (2, n) of images and captions."""
    import torch

    from tempnet.models.dual_encoder import DualEncoder, load_pair_tempnets

    place = local_copy(export)
    encoder, networks = DualEncoder.from_pretrained(place), load_pair_tempnets(place)
    parts = []
    with torch.no_grad():
        for at in range(0, len(batch["ids"]), 256):
            images, *tokens = (
                torch.from_numpy(batch[name][at : at + 256]) for name in ("images", "input_ids", "attention_mask")
            )
            embeddings = encoder.encode_images(images), encoder.encode_texts(*tokens)
            parts.append(torch.stack([network(rows) for network, rows in zip(networks, embeddings, strict=True)]))
    return torch.cat(parts, 1).double().numpy()


def read_stored_temperatures(directory: str, num_pairs: int) -> Any:
    """Return the temperatures (2, N) of all training pairs from the last checkpoint, where every rank has saved its own."""
    from safetensors.numpy import load

    from tempnet.contrastive.state import state_file_names

    last = f"{directory}/{max(found_checkpoints(directory), default='')}"
    files = state_file_names(count_writers(last))
    tau = np.empty((2, num_pairs))
    for rank, file in enumerate(files):
        tau[:, rank :: len(files)] = load(read_bytes(f"{last}/{file}"))["tau"]
    return tau
