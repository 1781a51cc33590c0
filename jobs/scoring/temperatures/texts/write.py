"""Tables of results: one Parquet file per part and one row per document, with the part's totals as metadata."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from jobs.scoring.temperatures.tables import write_part
from jobs.scoring.temperatures.texts.parts import token_arrays
from jobs.scoring.temperatures.texts.settings import PredictionSettings
from jobs.scoring.temperatures.texts.totals import QUANTILES, Totals, quantile_name
from pipelines.storage import resolve
from tempnet.statistics import spearman

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


def write_table(table: pa.Table, totals: Totals, output: str, file: str) -> None:
    """Write a part's file, with its totals as metadata."""
    write_part(table.replace_schema_metadata({_TOTALS_KEY: json.dumps(totals.to_json())}), output, file)


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
