"""Tables of measured tokens: one Parquet file per part and one row per token, read back a few thousand rows at a time.

Shapes: N tokens, J nodes of a profile, d hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor

from pipelines.storage import resolve
from tempnet.headroom.features import Tokens
from tempnet.headroom.profile import NUM_NODES, Profiles

_NUM_DOCUMENTS = b"num_documents"
_ROWS_AT_ONCE = 4096
# Hidden states are stored in half precision, whose largest number this is.
_MAX_HALF = 65504.0


def measured_table(
    tokens: Tokens, documents: np.ndarray, *, num_documents: int, is_end: np.ndarray | None = None
) -> pa.Table:
    """Returns the table of the N tokens of a part.

    Args:
        tokens: the tokens.
        documents: (N,) place of each token's document in the part.
        num_documents: number of documents of the part.
        is_end: (N,) bool, whether each token is the end-of-text token; None: none is.
    """
    columns = {
        "document": pa.array(documents.astype(np.int32)),
        "is_end": pa.array(np.zeros(len(documents), dtype=bool) if is_end is None else is_end),
        "target": pa.array(tokens.profiles.target.float().numpy()),
        "margin": pa.array(tokens.margin.float().numpy()),
        "maximum": pa.array(tokens.maximum.float().numpy()),
        "profile": _rows(tokens.profiles.values.float().flatten(1).numpy()),
        "hidden": _rows(tokens.hidden.clamp(-_MAX_HALF, _MAX_HALF).half().numpy()),
    }
    return pa.table(columns).replace_schema_metadata({_NUM_DOCUMENTS: str(num_documents)})


def read_measured(output: str, files: Sequence[str], *, with_end: bool = True) -> Iterator[tuple[Tokens, Tensor]]:
    """Yields the tokens of the tables in order, with the number (N,) of each token's document among all documents.

    Without `with_end`, end-of-text tokens are not among them.
    """
    num_before = 0
    for file in files:
        for batch in _batches(output, file):
            if not with_end and "is_end" in batch.schema.names:
                batch = batch.filter(pc.invert(batch["is_end"]))
            if batch.num_rows:
                yield _tokens(batch), torch.from_numpy(batch["document"].to_numpy().astype(np.int64)) + num_before
        num_before += count_documents(output, [file])


def end_losses(output: str, files: Sequence[str]) -> Tensor:
    """Returns the cross-entropies at τ = 1 of all end-of-text tokens: (n,)."""
    columns = ["is_end", "profile", "target"]
    ends = [batch.filter(batch["is_end"]) for file in files for batch in _batches(output, file, columns)]
    found = [_profiles(batch).cross_entropy(0.0) for batch in ends if batch.num_rows]
    return torch.cat([torch.empty(0, dtype=torch.float64), *found])


def count_documents(output: str, files: Sequence[str]) -> int:
    """Returns the number of documents of all parts."""
    total = 0
    for file in files:
        filesystem, path = resolve(f"{output}/{file}")
        total += int(pq.read_schema(path, filesystem=filesystem).metadata[_NUM_DOCUMENTS])
    return total


def _batches(output: str, file: str, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
    filesystem, path = resolve(f"{output}/{file}")
    with filesystem.open_input_file(path) as stream:
        yield from pq.ParquetFile(stream).iter_batches(batch_size=_ROWS_AT_ONCE, columns=columns)


def _tokens(batch: pa.RecordBatch) -> Tokens:
    return Tokens(
        _profiles(batch),
        _vector(batch["margin"]),
        _vector(batch["maximum"]),
        torch.from_numpy(_matrix(batch["hidden"], np.float16)).double(),
    )


def _profiles(batch: pa.RecordBatch) -> Profiles:
    values = _matrix(batch["profile"], np.float32).reshape(batch.num_rows, NUM_NODES, 3)
    return Profiles(torch.from_numpy(values).double(), _vector(batch["target"]))


def _rows(matrix: np.ndarray) -> pa.Array:
    """Returns the rows of a matrix as binary values of fixed size, which Parquet stores as they are."""
    matrix = np.ascontiguousarray(matrix)
    size = matrix.shape[1] * matrix.itemsize
    return pa.Array.from_buffers(pa.binary(size), len(matrix), [None, pa.py_buffer(matrix)])


def _matrix(column: pa.Array, dtype: type) -> np.ndarray:
    size = column.type.byte_width // np.dtype(dtype).itemsize
    flat: np.ndarray = np.frombuffer(column.buffers()[1], dtype=dtype)
    return flat[column.offset * size : (column.offset + len(column)) * size].reshape(len(column), size).copy()


def _vector(column: pa.Array) -> Tensor:
    return torch.from_numpy(column.to_numpy().astype(np.float64))
