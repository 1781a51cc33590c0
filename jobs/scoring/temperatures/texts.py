"""Predicting τ, and the entropy at τ = 1, of every token of documents: checked settings, and the predictor.

All checks happen before Ray is started or the base model is loaded.

Shapes: B windows, T positions of the longest window, N new tokens of a batch, d hidden size, V effective vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from jobs.engine.fields import absolute_path
from jobs.engine.fingerprints import tempnet_digest
from jobs.scoring.temperatures.config import PredictTemperaturesConfig
from jobs.scoring.text_sources import TextSettings, list_sources, read_in_batches, text_options
from jobs.tasks.base import naming_field
from pipelines.archives import Archive
from pipelines.local_copy import local_copy
from pipelines.text.tokenization import load_tokenizer
from tempnet.base_model import read_config
from tempnet.devices import DeviceMap, input_device, move_base
from tempnet.inference import CachedFold, can_fold, record_hidden_states
from tempnet.loading import load_causal_lm, load_tempnet
from tempnet.models.output_head import output_weight
from tempnet.network import TempNet
from tempnet.weights import check_weight_files

# Maximum number of logits held in float32 at a time (64 MiB).
_NUM_LOGITS_AT_ONCE = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionSettings(TextSettings):
    """Settings of a prediction, for the workers."""

    tempnet: str
    with_entropy: bool
    per_token: bool
    tau_min: float
    tau_max: float
    """The range of τ at inference is [tau_min, tau_max]."""
    tempnet_digest: str


def resolve_settings(config: PredictTemperaturesConfig) -> tuple[PredictionSettings, list[Archive]]:
    """Returns the settings and the archives of a configuration.

    Raises:
        FileNotFoundError, OSError: if the text, the model or the TempNet is missing.
        ValueError: if they do not fit together, or a field does not fit them.
    """
    archives = list_sources(config.text)
    return model_settings(config), archives


def model_settings(config: PredictTemperaturesConfig) -> PredictionSettings:
    """Returns the settings of a configuration without looking at its text.

    Raises:
        FileNotFoundError, OSError: if the model or the TempNet is missing.
        ValueError: if they do not fit together, or a field does not fit them.
    """
    with naming_field("model = "):
        check_weight_files(place := local_copy(config.model))
        base = read_config(place).get_text_config()
    with naming_field("tempnet = " if config.tempnet else "model = "):
        network = load_tempnet(local_copy(config.tempnet or config.model))
    tokenizer = load_tokenizer(config.model)
    _check_vocabulary(config.model, network, num_tokens=len(tokenizer), num_logits=base.vocab_size)
    return PredictionSettings(
        **text_options(config, tokenizer, base),
        tempnet=absolute_path(config.tempnet or config.model),
        with_entropy=config.with_entropy,
        per_token=config.per_token,
        tau_min=network.config.tau_min,
        tau_max=network.config.tau_max if network.config.tau_max_eval is None else network.config.tau_max_eval,
        tempnet_digest=tempnet_digest(network),
    )


def _check_vocabulary(model: str, network: TempNet, *, num_tokens: int, num_logits: int) -> None:
    if network.config.kind == "embeddings":
        raise ValueError(f"the TempNet of {model} reads embeddings, not the logits of a language model")
    if num_tokens != network.config.input_size:
        raise ValueError(
            f"the tokenizer of {model} has {num_tokens} tokens, its TempNet was built for a vocabulary of "
            f"{network.config.input_size}"
        )
    if num_logits < network.config.input_size:
        raise ValueError(
            f"the TempNet was built for a vocabulary of {network.config.input_size}, {model} has {num_logits} logits"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predictions for one document of n tokens; element i belongs to the prediction of token i."""

    tau: np.ndarray
    """(n,) float32: the temperatures."""
    entropy: np.ndarray | None
    """(n,) float32: the entropies at τ = 1, in nats; None if they were not requested."""


class Predictor:
    """Predicts τ and entropy with a model and its TempNet; predictions do not depend on the batch.

    Padding is on the right and never attended to. If τ can be computed from the hidden state
    (`tempnet.inference.can_fold`), the model's output layer is run on one position only, and logits are computed only
    for the entropy, a chunk of tokens at a time. Otherwise the model computes its logits once, and they are converted
    to float32 one chunk at a time.
    """

    def __init__(self, settings: PredictionSettings, *, use_gpu: bool = False, device_map: DeviceMap = None) -> None:
        if use_gpu and not torch.cuda.is_available():
            raise ValueError("workers.use_gpu = True: torch finds no CUDA device here")
        base, network = load_causal_lm(
            local_copy(settings.model),
            local_copy(settings.tempnet),
            dtype=settings.precision,
            device_map=device_map,
            fetch=local_copy,
        )
        self._settings = settings
        self._base: Any = move_base(base, "cuda" if use_gpu else "cpu")
        self._device = input_device(base)
        self._tempnet = network.to(self._device)
        self._vocab_size = network.config.input_size
        self._fold = CachedFold.of(base, network) if can_fold(base, network) else None

    @torch.inference_mode()
    def predict(self, documents: Sequence[np.ndarray]) -> list[Prediction]:
        """Returns the predictions for every document, given as token ids (n,)."""
        figures = [np.empty((2, len(ids)), dtype=np.float32) for ids in documents]  # τ and entropy
        for batch, input_ids, _, is_new in read_in_batches(documents, self._settings):
            predicted = self._predict_batch(input_ids.to(self._device), is_new.to(self._device)).cpu().numpy()
            ends = np.cumsum([window.stop - window.first for window in batch])
            for window, part in zip(batch, np.split(predicted, ends[:-1], axis=1), strict=True):
                figures[window.document][: len(part), window.first : window.stop] = part
        with_entropy = self._settings.with_entropy
        return [Prediction(tau=tau, entropy=entropy if with_entropy else None) for tau, entropy in figures]

    def _predict_batch(self, input_ids: Tensor, is_new: Tensor) -> Tensor:
        """Returns (1 or 2, N) for a batch's new tokens, window after window: τ, and the entropy if it is requested."""
        places = is_new.flatten().nonzero().squeeze(1)
        chunks = places.split(max(1, _NUM_LOGITS_AT_ONCE // self._vocab_size))
        with record_hidden_states(self._base, passes_all=self._fold is None) as seen:
            logits = self._base(input_ids=input_ids, use_cache=False).logits.flatten(0, 1)[:, : self._vocab_size]
        hidden = seen[0].flatten(0, 1).to(self._device)
        if self._fold is not None:
            return torch.cat([self._figures_of_hidden(hidden[chunk]) for chunk in chunks], dim=-1)
        parts = ((logits[chunk].float(), hidden[chunk]) for chunk in chunks)
        return torch.cat([self._figures(part, self._tempnet(part, states)) for part, states in parts], dim=-1)

    def _figures_of_hidden(self, hidden: Tensor) -> Tensor:
        """Computes the same as `_figures`, from hidden states (N, d) before the output layer."""
        assert self._fold is not None
        tau = self._fold.temperatures(hidden)
        if not self._settings.with_entropy:
            return tau.unsqueeze(0)
        weight = output_weight(self._base)[0][: self._vocab_size]  # that of a spread model may be on another device
        return self._figures(F.linear(hidden.to(weight.device), weight).to(self._device, torch.float32), tau)

    def _figures(self, logits: Tensor, tau: Tensor) -> Tensor:
        """Returns (1 or 2, N) for float32 logits (N, V): τ, and the entropy H = −Σ p log p in nats if it is requested."""
        if not self._settings.with_entropy:
            return tau.unsqueeze(0)
        log_probs = torch.log_softmax(logits, dim=-1)
        return torch.stack([tau, -(log_probs.exp() * log_probs).sum(-1)])
