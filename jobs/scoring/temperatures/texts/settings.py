"""The settings of a prediction: a configuration, completed and checked against model, TempNet and text.

All of this happens before Ray is started or the base model is loaded.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pyarrow.fs import FileType
from transformers import AutoConfig, PretrainedConfig

from jobs.engine.fields import absolute_path
from jobs.engine.fingerprints import model_digest, tempnet_digest
from jobs.engine.identity import differences
from jobs.scoring.temperatures.texts.config import PredictTemperaturesConfig
from jobs.tasks.base import naming_field
from pipelines.archives import PLAIN_SUFFIXES, SUFFIXES, Archive, list_archives
from pipelines.local_copy import local_copy
from pipelines.storage import read_json, relative, resolve, write_json
from pipelines.text.tokenization import document_start_id, load_tokenizer, tokenizer_digest
from tempnet.loading import load_tempnet
from tempnet.network import TempNet
from tempnet.weights import check_weight_files

FORMAT_VERSION = 1
SETTINGS_FILE = "_settings.json"
_NUM_DIFFERENCES_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionSettings:
    """Settings for the workers; local paths are absolute, because a worker has its own working directory."""

    source: str
    model: str
    tempnet: str
    text_field: str
    context_length: int
    stride: int
    batch_size: int
    precision: Literal["fp32", "bf16", "int8", "fp8"]
    with_entropy: bool
    per_token: bool
    max_documents: int
    part_characters: int
    bos_id: int
    tau_min: float
    tau_max: float
    """The range of τ at inference is [tau_min, tau_max]."""
    model_digest: str
    tempnet_digest: str
    tokenizer_digest: str

    def record(self, archives: list[Archive]) -> dict[str, Any]:
        """Returns everything that decides the tables, as a flat mapping, without file locations and the batch size."""
        left_out = ("source", "model", "tempnet", "batch_size")
        values = {name: value for name, value in asdict(self).items() if name not in left_out}
        return {"version": FORMAT_VERSION, **values, **archive_sizes(self.source, archives)}


def archive_sizes(source: str, archives: list[Archive]) -> dict[str, int]:
    """Returns the size in bytes of every archive, by a name that holds its place in the source."""
    root = resolve(source)[1]
    return {f"archive {relative(archive.path, root)} (bytes)": archive.num_bytes for archive in archives}


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
    with naming_field("tempnet = " if config.tempnet else "model = "):
        network = load_tempnet(local_copy(config.tempnet or config.model))
    tokenizer = load_tokenizer(config.model)
    check_weight_files(place := local_copy(config.model))
    base = AutoConfig.from_pretrained(place, trust_remote_code=False).get_text_config()
    _check_vocabulary(config.model, network, num_tokens=len(tokenizer), num_logits=base.vocab_size)
    context_length, stride = choose_windows(config.model, base, config.context_length, config.stride)
    return PredictionSettings(
        source=absolute_path(config.text),
        model=absolute_path(config.model),
        tempnet=absolute_path(config.tempnet or config.model),
        text_field=config.text_field,
        context_length=context_length,
        stride=stride,
        batch_size=config.batch_size,
        precision=config.precision,
        with_entropy=config.with_entropy,
        per_token=config.per_token,
        max_documents=config.max_documents,
        part_characters=config.part_characters,
        bos_id=document_start_id(tokenizer),
        tau_min=network.config.tau_min,
        tau_max=network.config.tau_max if network.config.tau_max_eval is None else network.config.tau_max_eval,
        model_digest=model_digest(config.model),
        tempnet_digest=tempnet_digest(network),
        tokenizer_digest=tokenizer_digest(tokenizer),
    )


def choose_windows(model: str, base: PretrainedConfig, context_length: int, stride: int) -> tuple[int, int]:
    """Returns the length of a model's windows and the tokens between their starts, each as given or, for 0, its default.

    Raises:
        ValueError: if one of them does not fit, or the model does not say how long its windows may be.
    """
    longest = getattr(base, "max_position_embeddings", None)
    length = context_length or longest
    if length is None:
        raise ValueError(f"{model} does not say how many positions it reads: context_length is needed")
    if longest is not None and length > longest:
        raise ValueError(f"context_length = {length} must lie in 1 … {longest}, the positions of {model}")
    stride = stride or max(1, length // 2)
    if stride > length:
        raise ValueError(f"stride = {stride} must lie in 1 … {length}, the context length")
    return length, stride


def list_sources(uri: str) -> list[Archive]:
    """Returns the files to read.

    These are the plain text file or archive at the path or URI, or a directory's archives, or, if it has none, its
    plain text files.

    Raises:
        FileNotFoundError, ValueError: as `list_archives`.
    """
    filesystem, root = resolve(uri)
    if filesystem.get_file_info(root).type == FileType.Directory:
        try:
            return list_archives(uri)
        except FileNotFoundError:  # the directory has no archives, but it may have plain texts
            pass
    return list_archives(uri, SUFFIXES | PLAIN_SUFFIXES)


def claim_output(output: str, record: dict[str, Any]) -> None:
    """Create the output directory and write the settings to it, or check that it was begun with the same settings.

    Raises:
        OSError: if the directory cannot be written.
        ValueError: naming the settings that differ.
    """
    filesystem, path = resolve(output)
    filesystem.create_dir(path, recursive=True)
    known = read_json(f"{output}/{SETTINGS_FILE}")
    if known is None:
        write_json(f"{output}/{SETTINGS_FILE}", record)
    elif changes := differences(known, record):
        more = len(changes) - _NUM_DIFFERENCES_SHOWN
        shown = "; ".join(changes[:_NUM_DIFFERENCES_SHOWN]) + (f"; and {more} more" if more > 0 else "")
        raise ValueError(f"output = {output} was begun with other settings: choose another one. {shown}")


def record_digest(record: dict[str, Any]) -> str:
    """Returns a hash of a record of settings, as 16 hex digits."""
    return _digest(json.dumps(record, sort_keys=True).encode())


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


def _digest(*parts: bytes) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
