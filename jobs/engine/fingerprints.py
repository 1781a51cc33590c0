"""Fingerprints of models, which jobs store with their results to check later that the model is still the same."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from transformers import AutoConfig

from pipelines.local_copy import local_copy
from tempnet.network import TempNet

_DIGEST_SIZE = 12
_NUM_BLOCKS, _BLOCK_BYTES = 32, 1 << 16


def files_digest(paths: Iterable[Path]) -> str:
    """Return a digest (24 hex digits) of the names, sizes and content of files.

    Of files above 2 MiB, 32 blocks of 64 KiB spread over the content are read. Modification times are not included, so
    a copy has the same digest.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_SIZE)
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name}|{size}|".encode())
        if size <= _NUM_BLOCKS * _BLOCK_BYTES:
            digest.update(path.read_bytes())
            continue
        with path.open("rb") as file:
            for block in range(_NUM_BLOCKS):
                file.seek((size - _BLOCK_BYTES) * block // (_NUM_BLOCKS - 1))  # includes the first and the last block
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()


def model_digest(model: str, *, trust_remote_code: bool = False) -> str:
    """Return a digest (24 hex digits) of a model: of its name and commit if it is on the hub, else of its files.

    At a URI it is the same as that of a local copy.
    """
    model = local_copy(model)
    if Path(model).is_dir():
        return files_digest(sorted(path for path in Path(model).iterdir() if path.is_file()))
    config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    name = f"{model}@{getattr(config, '_commit_hash', None)}"
    return hashlib.blake2b(name.encode(), digest_size=_DIGEST_SIZE).hexdigest()


def tempnet_digest(network: TempNet) -> str:
    """Return a digest (24 hex digits) of a TempNet's configuration and weights."""
    content = json.dumps(dataclasses.asdict(network.config), sort_keys=True)
    digest = hashlib.blake2b(content.encode(), digest_size=_DIGEST_SIZE)
    for name, value in sorted(network.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
