"""Cells, each of which is one model on one task; finished cells are stored, so that an evaluation can continue."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from jobs.engine.export import model_digest
from jobs.engine.fields import absolute_path
from jobs.scoring.models import LoadedModel, ModelSpec
from jobs.scoring.sentence_encoders.config import EvaluateSentencesConfig
from jobs.scoring.sentence_encoders.transfer import Labelled, pair_features, similarity_figures, transfer_accuracy
from jobs.scoring.units import Finished
from pipelines.local_copy import check_source, local_copy
from pipelines.sentences.senteval import Examples, Judgements, SentenceTask
from pipelines.text.tokenization import load_tokenizer
from tempnet.models.sentence_encoder import SentenceEncoder, num_positions, saved_num_tokens

# Increase this whenever the same input would give other figures.
_VERSION = 2
_MOST_TOKENS = 512
_DTYPES = {"fp32": None, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceEncoderSpec(ModelSpec):
    """Description of a sentence encoder."""

    num_tokens: int
    """Maximum number of tokens per sentence; longer sentences are cut."""

    @classmethod
    def read(cls, label: str, path: str, config: EvaluateSentencesConfig) -> SentenceEncoderSpec:
        """Returns the description of an encoder, which is loaded once to check that it can be.

        Raises:
            ValueError: naming the path, if there is no encoder, if it has no tokenizer, or if it has fewer positions
                than `num_tokens`.
        """
        try:
            check_source(place := local_copy(path))
            encoder = SentenceEncoder.from_pretrained(place).encoder
            load_tokenizer(path, needs_eos=False)
        except ValueError as error:
            raise ValueError(f"models: {error}") from error
        most = num_positions(encoder.config) or _MOST_TOKENS
        if config.num_tokens > most:
            raise ValueError(f"num_tokens = {config.num_tokens} is more than the {most} positions of {path!r}")
        return cls(
            label=label,
            path=absolute_path(path),
            digest=model_digest(path),
            num_tokens=config.num_tokens or saved_num_tokens(place) or min(most, _MOST_TOKENS),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One model on one task or one set of similarity judgements."""

    model: SentenceEncoderSpec
    data: SentenceTask | Judgements
    options: Mapping[str, Any]
    """All other settings that decide the figures."""

    @property
    def title(self) -> str:
        """Name of the cell in messages."""
        return f"{self.model.label} · {self.data.name}"

    @property
    def key(self) -> str:
        """Hash of everything that decides the figures, as 24 hex digits."""
        content = [_VERSION, self.model.digest, self.model.num_tokens, dict(self.options), self.data.digest]
        return hashlib.blake2b(json.dumps(content).encode(), digest_size=12).hexdigest()

    @property
    def file(self) -> str:
        """Name of the file that stores the figures."""
        return f"{self.key}.json"


def cells(
    config: EvaluateSentencesConfig, models: Sequence[SentenceEncoderSpec], data: Sequence[SentenceTask | Judgements]
) -> list[Cell]:
    """Returns a cell for every combination of model and data, ordered by model."""
    options = {"precision": config.precision}
    folds = {"num_folds": config.num_folds, "num_inner_folds": config.num_inner_folds, "seed": config.seed}
    return [
        Cell(model=model, data=data_set, options=options | (folds if isinstance(data_set, SentenceTask) else {}))
        for model in models
        for data_set in data
    ]


class CellComputer:
    """Computes the figures of cells in a worker, which holds one model at a time."""

    def __init__(self, config: EvaluateSentencesConfig) -> None:
        self._config = config
        self._encoder = LoadedModel(self._load)

    def __call__(self, cell: Cell) -> Finished:
        """Compute accuracy or correlations, the number of sentences or pairs, and the share of texts that were cut."""
        encoder, tokenizer = self._encoder.get(cell.model), load_tokenizer(cell.model.path, needs_eos=False)
        return Finished(
            files={cell.file: compute(cell, encoder, tokenizer, batch_size=self._config.batch_size)},
            num_cases=cell.data.num_lines if isinstance(cell.data, SentenceTask) else len(cell.data.first),
        )

    def _load(self, spec: SentenceEncoderSpec) -> SentenceEncoder:
        model = SentenceEncoder.from_pretrained(local_copy(spec.path), autocast_dtype=_DTYPES[self._config.precision])
        return model.to("cuda" if self._config.workers.use_gpu else "cpu")


def compute(
    cell: Cell, model: SentenceEncoder, tokenizer: PreTrainedTokenizerFast, *, batch_size: int
) -> dict[str, float]:
    """Returns the figures of a cell, see :class:`CellComputer`."""
    num_texts = num_cut = 0

    def encode(texts: Sequence[str]) -> np.ndarray:
        nonlocal num_texts, num_cut
        num_texts += len(texts)
        num_cut += sum(len(row) > cell.model.num_tokens for row in tokenizer(list(texts), verbose=False)["input_ids"])
        return model.encode(texts, tokenizer, num_tokens=cell.model.num_tokens, batch_size=batch_size).numpy()

    data = cell.data
    if isinstance(data, Judgements):
        figures = similarity_figures(encode(data.first), encode(data.second), data.scores)
        return figures | {"num_pairs": len(data.first), "share_cut": num_cut / num_texts}

    def labelled(examples: Examples) -> Labelled:
        features = encode(examples.first)
        if examples.second is not None:
            features = pair_features(features, encode(examples.second))
        return Labelled(features, examples.labels)

    accuracy = transfer_accuracy(
        {name: labelled(part) for name, part in data.parts.items()},
        num_folds=cell.options["num_folds"],
        num_inner_folds=cell.options["num_inner_folds"],
        seed=cell.options["seed"],
    )
    num_sentences = sum(map(len, data.parts.values()))
    return {"accuracy": accuracy, "num_sentences": num_sentences, "share_cut": num_cut / num_texts}
