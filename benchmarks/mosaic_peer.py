"""MosaicML Streaming as a peer of `benchmarks.object_store`: the same images as MDS shards, and the same views.

The package `mosaicml-streaming` asks for other versions of torch, numpy and Transformers than this project, so it is
installed without its dependencies in a directory of its own:

    pip install --no-deps --target DIR mosaicml-streaming==0.13.0 brotli python-snappy cramjam zstd catalogue
    PYTHONPATH=DIR .venv/bin/python -m benchmarks.object_store

It imports torchvision for data sets that are not used here; two names stand in for it.
"""

from __future__ import annotations

import importlib.util
import sys
import tarfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from benchmarks.image_pipeline import collate, make_transform

_COLUMNS = {"image": "bytes", "text": "str"}
_NUM_SAMPLES_AHEAD = 512


def version() -> str:
    """Return the version of the package; empty if it is not installed."""
    return _streaming().__version__ if importlib.util.find_spec("streaming") else ""


def write_shards(tars: list[Path], directory: Path) -> int:
    """Write the images and captions of tars as MDS shards of the default size, and return the bytes of all files."""
    with _streaming().MDSWriter(out=str(directory), columns=_COLUMNS) as writer:
        for path in tars:
            with tarfile.open(path) as tar:
                files = {info.name: tar.extractfile(info).read() for info in tar}  # type: ignore[union-attr]
            for name in sorted(files):
                if name.endswith(".jpg"):
                    writer.write({"image": files[name], "text": files[name[:-3] + "txt"].decode()})
    return sum(file.stat().st_size for file in directory.iterdir())


def epoch(
    remote: str | None, local: str, tokenizer: PreTrainedTokenizerFast, image_size: int, batch_size: int
) -> Iterator[Any]:
    """Yield the batches of a shuffled epoch.

    Args:
        remote: URI of the shards; None if they are in `local`.
        local: directory of the shards, or of the cache, which should be empty.
        tokenizer: tokenizer of the captions.
        image_size: side of the views.
        batch_size: number of images in a batch.
    """
    streaming = _streaming()
    streaming.base.util.clean_stale_shared_memory()
    transform = make_transform(image_size, with_draft=True)
    dataset = streaming.StreamingDataset(
        remote=remote, local=local, shuffle=True, batch_size=batch_size, predownload=_NUM_SAMPLES_AHEAD
    )

    def together(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return collate([transform((one["image"], one["text"].encode())) for one in samples], tokenizer)

    yield from torch.utils.data.DataLoader(dataset, batch_size=batch_size, collate_fn=together)


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
