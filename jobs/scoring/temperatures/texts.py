"""Temperatures of texts: τ, and the entropy at τ = 1, of every token: archives → parts → a pool of models → tables.

The tables have one row per document, and the totals of their part, which can be added, as metadata.

Shapes: B windows, T positions of the longest window, N new tokens of a batch, d hidden size, V effective vocabulary.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import torch
from torch import Tensor

from jobs.engine.cluster import start_ray
from jobs.engine.export import tempnet_digest
from jobs.engine.fields import absolute_path
from jobs.scoring.temperatures.config import SUMMARY_FILE, PredictTemperaturesConfig
from jobs.scoring.text_parts import (
    Part,
    TextSettings,
    checked_model,
    checked_tempnet,
    list_sources,
    load_model,
    map_archives,
    part_files,
    read_documents,
    text_options,
    token_arrays,
    tokenise,
)
from jobs.scoring.units import Finished, settings_digest, to_parquet
from jobs.tasks.language_model.report import ColouredText, coloured_page, describe_predictions
from pipelines.storage import exists, resolve, write_bytes, write_json
from pipelines.text.tokenization import load_tokenizer, token_pieces
from pipelines.text.windows import ReadingWindow, batches, windows_of
from tempnet.devices import input_device
from tempnet.inference import CachedFold, record_hidden_states
from tempnet.models.causal_lm import NUM_LIKELIEST
from tempnet.models.output_head import find_output_head
from tempnet.statistics import histogram_quantile, spearman

# Maximum number of logits held in float32 at a time (64 MiB).
_NUM_LOGITS_AT_ONCE = 1 << 24
QUANTILES = {f"tau_q{round(100 * share):02d}": share for share in (0.05, 0.25, 0.5, 0.75, 0.95)}
"""Column of a quantile → its share."""
NUM_BINS = 10_000
_TOTALS_KEY = b"totals"
_UNIT = "temperature, dimensionless"


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionSettings(TextSettings):
    own_fields = ("with_entropy", "per_token")
    tau_min: float
    tau_max: float
    """The range of τ at inference is [tau_min, tau_max]."""
    tempnet_digest: str


def resolve_settings(config: PredictTemperaturesConfig) -> PredictionSettings:
    archives = list_sources(config.text)
    return replace(model_settings(config), archives=archives)


def model_settings(config: PredictTemperaturesConfig) -> PredictionSettings:
    """Returns the settings of a configuration without looking at its text; errors are those of `resolve_settings`."""
    base, tokenizer = checked_model(config.model, "model = ")
    tempnet, field = config.tempnet or config.model, "tempnet = " if config.tempnet else "model = "
    network = checked_tempnet(tempnet, field, config.model, base, tokenizer)
    config = replace(config, tempnet=absolute_path(tempnet))
    return PredictionSettings(
        **text_options(config, tokenizer, base),
        tau_min=network.config.tau_min,
        tau_max=network.config.inference_tau_max,
        tempnet_digest=tempnet_digest(network),
    )


class TokenChunk(NamedTuple):
    """Some of the new tokens of a batch: as many as have room for their logits."""

    hidden: Tensor
    """(n, d) hidden states, as TempNets read them."""
    targets: Tensor
    """(n,) int64: the tokens."""
    logits: Callable[[], Tensor]
    """Returns the logits (n, V) in float32."""


class TokenReader:
    """Runs a language model over documents; what it gives does not depend on the batch.

    Logits that are a function of the last hidden states (`find_output_head`) are computed only where they are asked for.
    """

    def __init__(self, settings: TextSettings, tempnet: str = "") -> None:
        config = settings.config
        self._settings: Any = settings
        self._vocab_size = len(load_tokenizer(config.model))
        base, self._network = load_model(config.model, tempnet, config.precision, config.workers)
        self._base: Any = base
        self._device = input_device(base)
        self._head = find_output_head(base)

    def read(self, documents: Sequence[np.ndarray]) -> Iterator[tuple[list[ReadingWindow], Iterator[TokenChunk]]]:
        """Yields the windows of documents (n,) in batches, padded on the right, with their new tokens, one after another."""
        config, bos = self._settings.config, self._settings.bos_id
        streams = [torch.from_numpy(np.concatenate([[bos], ids]).astype(np.int64)) for ids in documents]
        lengths = {"context_length": config.context_length, "stride": config.stride}
        windows = [window for number, ids in enumerate(documents) for window in windows_of(number, len(ids), **lengths)]
        for batch in batches(windows, config.batch_size):
            shape = len(batch), max(window.num_positions for window in batch)
            input_ids, targets = torch.full(shape, bos), torch.zeros(shape, dtype=torch.long)
            is_new = torch.zeros(shape, dtype=torch.bool)
            for row, window in enumerate(batch):
                stream, stop = streams[window.document], window.num_positions
                input_ids[row, :stop] = stream[window.start : window.stop]
                targets[row, :stop] = stream[window.start + 1 : window.stop + 1]
                is_new[row, window.first - window.start : stop] = True
            yield batch, self._chunks(*(tensor.to(self._device) for tensor in (input_ids, targets, is_new)))

    def _chunks(self, input_ids: Tensor, targets: Tensor, is_new: Tensor) -> Iterator[TokenChunk]:
        logits: Tensor | None = None
        if self._head is None:
            with record_hidden_states(self._base) as seen:
                logits = self._base(input_ids=input_ids, use_cache=False).logits[is_new]
            states = hidden = seen[0].to(self._device)[is_new]
        else:
            hidden = self._base.base_model(input_ids=input_ids, use_cache=False)[0].to(self._device)[is_new]
            states = self._head.scaled(hidden)
        wanted = targets[is_new]
        size = max(1, _NUM_LOGITS_AT_ONCE // self._vocab_size)
        for at in range(0, len(hidden), size):
            rows = slice(at, at + size)
            part = None if logits is None else logits[rows]
            yield TokenChunk(states[rows], wanted[rows], partial(self._logits, hidden[rows], part))

    def _logits(self, hidden: Tensor, logits: Tensor | None) -> Tensor:
        if logits is None:
            assert self._head is not None
            logits = self._head.logits(self._base, hidden, self._vocab_size).to(self._device)
        return logits[:, : self._vocab_size].float()


class Prediction(NamedTuple):
    """Predictions for one document of n tokens; element i belongs to the prediction of token i."""

    tau: np.ndarray
    """(n,) float32: the temperatures."""
    entropy: np.ndarray | None
    """(n,) float32: the entropies at τ = 1, in nats; None if they were not requested."""
    at_tau: Sequence[np.ndarray]
    """If requested, seven (n,) float32: entropy at τ in nats, probabilities and ids of the likeliest three tokens."""


class Predictor(TokenReader):
    """Predicts τ and entropy; if τ can be computed from the hidden state, logits are needed only for the entropy."""

    def __init__(self, settings: PredictionSettings, *, at_tau: bool = False) -> None:
        config = settings.config
        super().__init__(settings, config.tempnet)
        assert self._network is not None
        self._with_entropy, self._at_tau, self._tempnet = config.with_entropy, at_tau, self._network
        self._fold = CachedFold.of(self._base, self._tempnet)

    def __call__(self, part: Part) -> Finished:
        """Make the table of a part."""
        predictions = self.predict(token_arrays(part.table["token_ids"]))
        file = to_parquet(part_table(part, predictions, self._settings))
        return Finished(files={part.file: file}, num_cases=sum(len(one.tau) for one in predictions))

    @torch.inference_mode()
    def predict(self, documents: Sequence[np.ndarray]) -> list[Prediction]:
        figures = [np.empty((9 if self._at_tau else 2, len(ids)), dtype=np.float32) for ids in documents]
        for windows, chunks in self.read(documents):
            predicted = torch.cat([self._figures(chunk) for chunk in chunks], dim=-1).cpu().numpy()
            if bad := int((~np.isfinite(predicted[0])).sum()):
                raise ValueError(
                    f"model = {self._settings.config.model!r}: τ of {bad} of {predicted.shape[1]} tokens is not finite"
                )
            ends = np.cumsum([window.stop - window.first for window in windows])
            for window, part in zip(windows, np.split(predicted, ends[:-1], axis=1), strict=True):
                figures[window.document][: len(part), window.first : window.stop] = part
        return [Prediction(tau, entropy if self._with_entropy else None, rest) for tau, entropy, *rest in figures]

    def _figures(self, chunk: TokenChunk) -> Tensor:
        """Returns (1, 2 or 9, n): τ, and the entropy H = −Σ p log p in nats and the rest of `Prediction` if requested."""
        logits = chunk.logits() if self._with_entropy or self._fold is None else chunk.hidden
        tau = self._tempnet(logits, chunk.hidden) if self._fold is None else self._fold.temperatures(chunk.hidden)
        if not self._with_entropy:
            return tau.unsqueeze(0)
        log_probs = torch.log_softmax(logits, dim=-1)
        rows = [tau, -(log_probs.exp() * log_probs).sum(-1)]
        if self._at_tau:
            log_probs = torch.log_softmax(logits / tau.unsqueeze(-1), dim=-1)
            top = log_probs.exp().topk(NUM_LIKELIEST)
            rows += [-(log_probs.exp() * log_probs).sum(-1), *top.values.T, *top.indices.float().T]
        return torch.stack(rows)


def table_schema(*, with_entropy: bool, per_token: bool) -> pa.Schema:
    """Returns the columns of a table, each with its unit and meaning; figures of a document without tokens are null."""
    columns: list[tuple[str, pa.DataType, str, str]] = [
        ("source", pa.string(), "path", "the archive, relative to what was read"),
        ("key", pa.string(), "name", "the document: archive[/member]:index of the record"),
        ("num_tokens", pa.int64(), "tokens", "without the token that opens the document"),
        ("tau_mean", pa.float64(), _UNIT, "mean over the document's tokens of the τ that predicts them"),
        ("tau_std", pa.float64(), _UNIT, "standard deviation over the document's tokens"),
        *((name, pa.float64(), _UNIT, f"{share:.0%} quantile over the tokens") for name, share in QUANTILES.items()),
    ]
    if with_entropy:
        columns += [
            ("entropy_mean", pa.float64(), "nats", "mean over the tokens of the entropy of the prediction at τ = 1"),
            ("tau_entropy_spearman", pa.float64(), "rank correlation", "of τ and entropy; 0 if either is constant"),
        ]
    if per_token:
        columns += [
            ("token_ids", pa.list_(pa.int32()), "token id", "the document's tokens"),
            ("tau", pa.list_(pa.float32()), _UNIT, "element i: of the prediction of token i"),
        ]
        if with_entropy:
            columns += [("entropy", pa.list_(pa.float32()), "nats", "element i: of the prediction of token i at τ = 1")]
    return pa.schema(
        [pa.field(name, kind, metadata={"unit": unit, "meaning": meaning}) for name, kind, unit, meaning in columns]
    )


def part_table(part: Part, predictions: Sequence[Prediction], settings: PredictionSettings) -> pa.Table:
    """Returns the table of a predicted part, with a histogram of τ as metadata."""
    rows = [
        {"source": part.source, "key": key, "token_ids": ids, **one._asdict(), **_figures(one)}
        for key, ids, one in zip(
            part.table["key"].to_pylist(), token_arrays(part.table["token_ids"]), predictions, strict=True
        )
    ]
    schema = table_schema(with_entropy=settings.config.with_entropy, per_token=settings.config.per_token)
    columns = {name: [row[name] for row in rows] for name in schema.names}
    low, high = settings.tau_min, settings.tau_max
    tau = np.concatenate([one.tau for one in predictions]).astype(np.float64)
    places = np.clip((tau - low) / (high - low) * NUM_BINS, 0, NUM_BINS - 1)
    bins, counts = np.unique(places.astype(np.int64), return_counts=True)
    histogram = {"bins": [*zip(bins.tolist(), counts.tolist(), strict=True)]}
    return pa.table(columns, schema=schema).replace_schema_metadata({_TOTALS_KEY: json.dumps(histogram)})


def _figures(prediction: Prediction) -> dict[str, float | int | None]:
    """Returns the figures of one document."""
    tau, entropy, _ = prediction
    names = ["tau_mean", "tau_std", *QUANTILES]
    if len(tau) == 0:
        return {"num_tokens": 0, **dict.fromkeys([*names, "entropy_mean", "tau_entropy_spearman"])}
    exact = tau.astype(np.float64)
    values = [exact.mean(), exact.std(), *np.quantile(exact, list(QUANTILES.values()))]
    figures: dict[str, float | int | None] = {"num_tokens": len(tau), **dict(zip(names, values, strict=True))}
    if entropy is not None:
        figures["entropy_mean"] = entropy.mean(dtype=np.float64)
        figures["tau_entropy_spearman"] = float(spearman(torch.from_numpy(tau), torch.from_numpy(entropy)))
    return figures


def total_figures(output: str, files: Sequence[str], settings: PredictionSettings) -> dict[str, Any]:
    """Returns number of documents and tokens of all parts, and mean, standard deviation and quantiles of τ, mean entropy.

    Quantiles are exact to within one bin, which is the range of τ / NUM_BINS. Without tokens, all but the numbers are None.
    """
    names = ["num_tokens", "tau_mean", "tau_std", *(["entropy_mean"] if settings.config.with_entropy else [])]
    histogram = torch.zeros(NUM_BINS, dtype=torch.float64)
    parts = {name: [np.empty(0)] for name in names}
    for file in files:
        filesystem, path = resolve(f"{output}/{file}")
        table = pq.read_table(path, filesystem=filesystem, columns=names)
        for place, count in json.loads(table.schema.metadata[_TOTALS_KEY])["bins"]:
            histogram[place] += count
        for name, values in parts.items():
            values.append(table[name].to_numpy())
    columns = {name: np.concatenate(values) for name, values in parts.items()}
    weights = columns.pop("num_tokens")
    numbers = {"num_documents": len(weights), "num_tokens": int(weights.sum())}
    if not numbers["num_tokens"]:
        return numbers | dict.fromkeys(["tau_mean", "tau_std", *QUANTILES, "entropy_mean"])

    def mean(values: np.ndarray) -> float:
        return float(np.average(np.nan_to_num(values), weights=weights))

    tau = mean(columns["tau_mean"])
    variance = mean(columns["tau_std"] ** 2 + columns["tau_mean"] ** 2) - tau**2
    tau_range = settings.tau_min, settings.tau_max
    return {
        **numbers,
        "tau_mean": tau,
        "tau_std": math.sqrt(max(variance, 0.0)),
        **{name: histogram_quantile(histogram, share, *tau_range) for name, share in QUANTILES.items()},
        "entropy_mean": mean(columns["entropy_mean"]) if settings.config.with_entropy else None,
    }


def predict_archives(settings: PredictionSettings, output: str) -> dict[str, Any]:
    """Write the missing parts in `output` and the summary, and return the summary; Ray is started if needed."""
    started = time.monotonic()
    read, outcome = map_archives(settings, output, partial(Predictor, settings))
    record, problems = settings.record(), Counter[str]()
    for entry in read:
        problems.update(entry.problems)
    summary = {
        "num_archives": len(read),
        "num_parts": sum(entry.num_parts for entry in read),
        **total_figures(output, part_files(read), settings),
        "problems": problems,
        "examples": [example for entry in read for example in entry.examples][:5],
        "settings_digest": settings_digest(record),
        "settings": record,
    }
    write_json(f"{output}/{SUMMARY_FILE}", summary)
    return summary | {"num_tokens_now": outcome.num_cases, "seconds_now": time.monotonic() - started}


def first_documents_on_worker(settings: PredictionSettings, num_tokens: int) -> dict[str, ColouredText]:
    """Returns `first_documents` from a Ray task with a worker's resources, since this machine may have no GPU."""
    start_ray()
    workers = settings.config.workers
    task = ray.remote(num_cpus=workers.cpus_per_worker, num_gpus=workers.num_gpus)(first_documents)
    found: dict[str, ColouredText] = ray.get(task.remote(settings, num_tokens))
    return found


def first_documents(settings: PredictionSettings, num_tokens: int) -> dict[str, ColouredText]:
    """Returns key → text with what is known of its tokens, for the first documents, of at most `num_tokens` tokens in all."""
    config = settings.config
    tokenizer = load_tokenizer(config.model)
    examples: list[str] = []
    documents: list[tuple[str, np.ndarray]] = []
    num_left = num_tokens
    for document in read_documents(config, settings.archives, Counter(), examples):
        (ids,) = token_arrays(tokenise([document], tokenizer)["token_ids"])
        if len(ids):
            documents.append((document.key, ids[:num_left]))
            num_left -= len(documents[-1][1])
        if num_left == 0:
            break
    if not documents:
        raise ValueError(f"{config.text} holds no readable text: {'; '.join(examples)}")
    predictor = Predictor(replace(settings, config=replace(config, with_entropy=True)), at_tau=True)
    predictions = predictor.predict([ids for _, ids in documents])
    sections: dict[str, ColouredText] = {}
    for (key, array), prediction in zip(documents, predictions, strict=True):
        assert prediction.entropy is not None
        ids, (entropy, *top) = array.tolist(), prediction.at_tau
        shares, likeliest = (np.transpose(part).tolist() for part in (top[:NUM_LIKELIEST], top[NUM_LIKELIEST:]))
        notes = describe_predictions(tokenizer, ids, entropy.tolist(), likeliest, shares)
        sections[key] = (token_pieces(tokenizer, ids), prediction.tau.tolist(), prediction.entropy.tolist(), notes)
    return sections


def write_page(path: str, text: str, sections: dict[str, ColouredText]) -> None:
    write_bytes(path, coloured_page(title=f"Temperatures of {text}", sections=sections).encode())


def check_page(path: str) -> None:
    """Check that the page can be written (OSError), before any work starts, by making an empty one unless there is one."""
    if "://" not in path:
        with Path(path).open("a", encoding="utf-8"):
            pass
    elif not exists(path):
        write_bytes(path, b"")
