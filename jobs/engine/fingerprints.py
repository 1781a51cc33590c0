"""Fingerprints of models, which jobs store with their results to check later that the model is still the same."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

from transformers import AutoConfig

from pipelines.local_copy import local_copy
from tempnet.fingerprints import files_digest
from tempnet.network import TempNet

_DIGEST_SIZE = 12


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
