"""MosaicML Streaming and LitData as peers of `benchmarks.object_store`: the same images in their formats, and the same views.

Both ask for torchvision, and MosaicML Streaming for other versions of torch and Transformers than this project, so they are
installed without their dependencies in a directory of their own:

    pip install --no-deps --target DIR mosaicml-streaming==0.13.0 brotli python-snappy cramjam zstd catalogue \
        litdata==0.2.76 lightning-utilities obstore tifffile
    PYTHONPATH=DIR .venv/bin/python -m benchmarks.object_store

MosaicML Streaming imports torchvision for data sets that are not used here; two names stand in for it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tarfile
import types
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerFast

from benchmarks.image_pipeline import collate, make_transform

_COLUMNS = {"image": "bytes", "text": "str"}
_NUM_SAMPLES_AHEAD = 512


class Peer(NamedTuple):
    """A format of its own, and what reads it."""

    title: str
    write: Callable[[list[Path], Path], None]
    """Writes the images and captions of tars into a directory."""
    dataset: Callable[[str | None, str, str, int], Any]
    """(URI of the shards, or None; their directory, or that of the cache; endpoint of the store; batch size) → data set."""


def installed_peers() -> list[Peer]:
    """Return the peers that are installed."""
    peers = {
        "streaming": ("mosaicml-streaming", "MosaicML Streaming", write_mosaic, mosaic_dataset),
        "litdata": ("litdata", "LitData", write_litdata, litdata_dataset),
    }
    return [
        Peer(f"{title} {version(package)}", write, dataset)
        for module, (package, title, write, dataset) in peers.items()
        if importlib.util.find_spec(module)
    ]


def read_tar(path: Path | str) -> Iterator[dict[str, Any]]:
    """Yield the images and captions of a tar, in the order of their names."""
    with tarfile.open(path) as tar:
        files = {info.name: tar.extractfile(info).read() for info in tar}  # type: ignore[union-attr]
    for name in sorted(files):
        if name.endswith(".jpg"):
            yield {"image": files[name], "text": files[name[:-3] + "txt"].decode()}


def batches(
    dataset: Any, tokenizer: PreTrainedTokenizerFast, image_size: int, batch_size: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the batches of a data set's shuffled epoch, as views of `image_size` pixels and tokens."""
    transform = make_transform(image_size, with_draft=True)

    def together(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return collate([transform((one["image"], one["text"].encode())) for one in samples], tokenizer)

    yield from torch.utils.data.DataLoader(dataset, batch_size=batch_size, collate_fn=together)


def write_mosaic(tars: list[Path], directory: Path) -> None:
    """Write MDS shards of the default size."""
    with _streaming().MDSWriter(out=str(directory), columns=_COLUMNS) as writer:
        for path in tars:
            for sample in read_tar(path):
                writer.write(sample)


def mosaic_dataset(remote: str | None, local: str, endpoint: str, batch_size: int) -> Any:
    """Return a data set of MDS shards; the endpoint comes from the environment."""
    streaming = _streaming()
    streaming.base.util.clean_stale_shared_memory()
    return streaming.StreamingDataset(
        remote=remote, local=local, shuffle=True, batch_size=batch_size, predownload=_NUM_SAMPLES_AHEAD
    )


def write_litdata(tars: list[Path], directory: Path) -> None:
    """Write chunks of the size that LitData's documentation uses."""
    import litdata

    litdata.optimize(
        read_tar, list(map(str, tars)), output_dir=str(directory), chunk_bytes="64MB", num_workers=1, verbose=False
    )


def litdata_dataset(remote: str | None, local: str, endpoint: str, batch_size: int) -> Any:
    """Return a data set of LitData's chunks."""
    import litdata

    os.environ["AWS_ALLOW_HTTP"] = "true"  # the store is on loopback
    options = {"endpoint_url": endpoint} if remote else None
    return litdata.StreamingDataset(
        remote or local, cache_dir=local if remote else None, shuffle=True, drop_last=False, storage_options=options
    )


def _streaming() -> Any:
    if "torchvision" not in sys.modules and importlib.util.find_spec("torchvision") is None:
        names = {"datasets": ("VisionDataset", "CIFAR10"), "transforms": (), "transforms.functional": ("to_tensor",)}
        sys.modules["torchvision"] = types.ModuleType("torchvision")
        for name, members in names.items():
            module = sys.modules[f"torchvision.{name}"] = types.ModuleType(f"torchvision.{name}")
            for member in members:
                setattr(module, member, type(member, (), {}))
    import streaming

    return streaming
