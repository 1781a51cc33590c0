"""Predictors that turn texts into temperatures, one for each kind of export; tensors are read from safetensors only.

Shapes: n texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from mlflow.types import ColSpec, DataType, Schema
from mlflow.types.schema import Array

from jobs.scoring.dual_encoders.encoder import DualEncoderSpec, Encoder
from jobs.scoring.temperatures.config import PredictTemperaturesConfig
from jobs.scoring.temperatures.texts import Predictor, model_settings
from pipelines.text.tokenization import load_tokenizer, token_pieces
from tempnet.loading import find_tempnet, load_tempnet
from tempnet.models.dual_encoder import TEXT_TEMPNET_DIRECTORY
from tempnet.models.sentence_encoder import SentenceEncoder
from tempnet.models.towers import load_tower
from tempnet.network import TempNet

INPUTS = Schema([ColSpec(DataType.string, "text")])
EXAMPLES = ["The temperature of a softmax decides how sharply a model commits.", "People guess it."]
_BATCH_SIZE = 16
_TAU = ColSpec(DataType.double, "tau")


class TokenTemperatures:
    """Predicts with a language model: the tokens, the τ that predicts each, and the mean τ (NaN without tokens)."""

    outputs = Schema([_TAU, ColSpec(Array(DataType.string), "tokens"), ColSpec(Array(DataType.double), "token_tau")])

    def __init__(self, export: Path) -> None:
        config = PredictTemperaturesConfig(model=str(export), text="", batch_size=_BATCH_SIZE, with_entropy=False)
        self._predictor = Predictor(model_settings(config))
        self._tokenizer = load_tokenizer(str(export))

    def __call__(self, texts: Sequence[str]) -> pd.DataFrame:
        ids = self._tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []
        predictions = self._predictor.predict([np.array(row, dtype=np.int32) for row in ids])
        token_tau = [prediction.tau.astype(np.float64) for prediction in predictions]
        return pd.DataFrame(
            {
                "tau": [float(row.mean()) if len(row) else float("nan") for row in token_tau],
                "tokens": [token_pieces(self._tokenizer, row) for row in ids],
                "token_tau": [row.tolist() for row in token_tau],
            }
        )


class CaptionTemperatures:
    """Predicts with a dual encoder: the τ of every caption, by the TempNet of its texts."""

    outputs = Schema([_TAU])

    def __init__(self, export: Path) -> None:
        self._encoder = Encoder(DualEncoderSpec.read("export", str(export)), precision="fp32", batch_size=_BATCH_SIZE)
        self._tempnet = TempNet.from_pretrained(export / TEXT_TEMPNET_DIRECTORY)

    @torch.inference_mode()
    def __call__(self, texts: Sequence[str]) -> pd.DataFrame:
        tau = self._tempnet(torch.from_numpy(self._encoder.texts(texts)))
        return pd.DataFrame({"tau": tau.double().numpy()})


class SentenceTemperatures:
    """Predicts with a sentence encoder: the τ of every text, which is cut to the tokens of a training span."""

    outputs = Schema([_TAU])

    def __init__(self, export: Path) -> None:
        self._encoder = SentenceEncoder(load_tower(export, "text"))
        self._tokenizer = load_tokenizer(str(export), needs_eos=False)
        self._tempnet = load_tempnet(export)

    @torch.inference_mode()
    def __call__(self, texts: Sequence[str]) -> pd.DataFrame:
        rows = F.normalize(self._encoder.encode(texts, self._tokenizer, batch_size=_BATCH_SIZE), dim=-1)
        return pd.DataFrame({"tau": self._tempnet(rows).double().numpy()})


TextPredictor: TypeAlias = TokenTemperatures | CaptionTemperatures | SentenceTemperatures
"""Predicts temperatures of texts with an export, whose directory it is created from: one row for every text."""


def predictor_kind(export: Path) -> type[TextPredictor] | None:
    """Returns the class that predicts temperatures with an export, or None if the export has no TempNet."""
    if (export / TEXT_TEMPNET_DIRECTORY).is_dir():
        return CaptionTemperatures
    if find_tempnet(export) is None:
        return None
    return SentenceTemperatures if load_tempnet(export).config.kind == "embeddings" else TokenTemperatures
