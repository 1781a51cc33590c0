"""Tables of the temperatures of texts: one row per document, with the totals of a part, which can be added, as metadata.

Totals are counts, sums and a fine histogram, from which the figures over all parts are computed.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from jobs.scoring.temperatures.texts import PredictionSettings
from jobs.scoring.text_parts import token_arrays
from jobs.scoring.units import to_parquet
from pipelines.storage import resolve
from tempnet.statistics import histogram_quantile, spearman

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
NUM_BINS = 10_000


def quantile_name(share: float) -> str:
    """Returns the name of a quantile's column, such as tau_q05."""
    return f"tau_q{round(100 * share):02d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over the tokens of a group of documents."""

    num_documents: int
    num_tokens: int
    tau: float
    tau_squared: float
    entropy: float | None
    """Sum of the entropies, in nats; None if they were not predicted."""
    bins: dict[int, int]
    """Bin of τ → number of tokens, for NUM_BINS equal bins over the range of τ; empty bins are left out."""

    @classmethod
    def of(
        cls, tau: np.ndarray, entropy: np.ndarray | None, *, num_documents: int, tau_range: tuple[float, float]
    ) -> Totals:
        """Returns the totals of temperatures (N,) and entropies (N,)."""
        low, high = tau_range
        places = np.clip((tau.astype(np.float64) - low) / (high - low) * NUM_BINS, 0, NUM_BINS - 1).astype(np.int64)
        bins, counts = np.unique(places, return_counts=True)
        return cls(
            num_documents=num_documents,
            num_tokens=len(tau),
            tau=float(tau.sum(dtype=np.float64)),
            tau_squared=float(np.square(tau, dtype=np.float64).sum()),
            entropy=None if entropy is None else float(entropy.sum(dtype=np.float64)),
            bins=dict(zip(bins.tolist(), counts.tolist(), strict=True)),
        )

    @classmethod
    def sum(cls, parts: list[Totals]) -> Totals:
        """Returns the sum of the totals of at least one part."""
        bins: dict[int, int] = {}
        for part in parts:
            for place, count in part.bins.items():
                bins[place] = bins.get(place, 0) + count
        entropies = [part.entropy for part in parts]
        return cls(
            num_documents=sum(part.num_documents for part in parts),
            num_tokens=sum(part.num_tokens for part in parts),
            tau=math.fsum(part.tau for part in parts),
            tau_squared=math.fsum(part.tau_squared for part in parts),
            entropy=None if None in entropies else math.fsum(value for value in entropies if value is not None),
            bins=dict(sorted(bins.items())),
        )

    def figures(self, tau_range: tuple[float, float]) -> dict[str, Any]:
        """Returns mean, standard deviation and quantiles of τ, and the mean entropy; without tokens they are None.

        Quantiles are exact to within one bin, which is the range of τ / NUM_BINS.
        """
        count = self.num_tokens
        mean = self.tau / count if count else None
        histogram = torch.zeros(NUM_BINS, dtype=torch.float64)
        histogram[list(self.bins)] = torch.tensor(list(self.bins.values()), dtype=torch.float64)
        return {
            "tau_mean": mean,
            "tau_std": math.sqrt(max(self.tau_squared / count - mean**2, 0.0)) if mean is not None else None,
            **{
                quantile_name(share): histogram_quantile(histogram, share, *tau_range) if count else None
                for share in QUANTILES
            },
            "entropy_mean": self.entropy / count if count and self.entropy is not None else None,
        }

    def to_json(self) -> dict[str, Any]:
        """Returns the totals as JSON values, the inverse of `from_json`."""
        return asdict(self) | {"bins": [list(item) for item in self.bins.items()]}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Totals:
        """Returns the totals that `to_json` has converted."""
        return cls(**{**values, "bins": dict(values["bins"])})


_TOTALS_KEY = b"totals"
_UNIT = "temperature, dimensionless"


def table_schema(*, with_entropy: bool, per_token: bool) -> pa.Schema:
    """Returns the columns of a table, each with its unit and meaning; figures of a document without tokens are null."""
    columns: list[tuple[str, pa.DataType, str, str]] = [
        ("source", pa.string(), "path", "the archive, relative to what was read"),
        ("key", pa.string(), "name", "the document: archive[/member]:index of the record"),
        ("num_tokens", pa.int64(), "tokens", "without the token that opens the document"),
        ("tau_mean", pa.float64(), _UNIT, "mean over the document's tokens of the τ that predicts them"),
        ("tau_std", pa.float64(), _UNIT, "standard deviation over the document's tokens"),
        *((quantile_name(share), pa.float64(), _UNIT, f"{share:.0%} quantile over the tokens") for share in QUANTILES),
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


def document_table(part: pa.Table, source: str, settings: PredictionSettings) -> tuple[pa.Table, Totals]:
    """Returns the table of a predicted part (`key`, `token_ids`, `tau`, and optionally `entropy`), and its totals."""
    taus = token_arrays(part["tau"])
    entropies = token_arrays(part["entropy"]) if settings.with_entropy else [None] * len(taus)
    rows = [
        {"source": source, "key": key, **_figures(tau, entropy)}
        for key, tau, entropy in zip(part["key"].to_pylist(), taus, entropies, strict=True)
    ]
    schema = table_schema(with_entropy=settings.with_entropy, per_token=settings.per_token)
    columns = {
        name: part[name] if name in part.column_names and name != "key" else [row[name] for row in rows]
        for name in schema.names
    }
    totals = Totals.of(
        np.concatenate(taus),
        np.concatenate([values for values in entropies if values is not None]) if settings.with_entropy else None,
        num_documents=len(taus),
        tau_range=(settings.tau_min, settings.tau_max),
    )
    return pa.table(columns, schema=schema), totals


def encode_table(table: pa.Table, totals: Totals) -> bytes:
    """Returns the content of a part's file, with its totals as metadata."""
    return to_parquet(table.replace_schema_metadata({_TOTALS_KEY: json.dumps(totals.to_json())}))


def read_totals(output: str, file: str) -> Totals:
    """Reads the totals of a part from the metadata of its file."""
    filesystem, path = resolve(f"{output}/{file}")
    metadata = pq.read_schema(path, filesystem=filesystem).metadata
    return Totals.from_json(json.loads(metadata[_TOTALS_KEY]))


def _figures(tau: np.ndarray, entropy: np.ndarray | None) -> dict[str, float | int | None]:
    """Returns the figures of one document; tau and entropy are (n,)."""
    names = ["tau_mean", "tau_std", *map(quantile_name, QUANTILES)]
    if len(tau) == 0:
        return {"num_tokens": 0, **dict.fromkeys([*names, "entropy_mean", "tau_entropy_spearman"])}
    exact = tau.astype(np.float64)
    figures: dict[str, float | int | None] = {"num_tokens": len(tau)}
    figures |= dict(zip(names, [exact.mean(), exact.std(), *np.quantile(exact, QUANTILES)], strict=True))
    if entropy is not None:
        figures["entropy_mean"] = entropy.mean(dtype=np.float64)
        figures["tau_entropy_spearman"] = float(
            spearman(torch.from_numpy(tau.copy()), torch.from_numpy(entropy.copy()))
        )
    return figures
