"""Runs a frozen base model over the text of a run, once, and stores its last hidden states.

A unit of the scheduler (`jobs.scoring.stages`) is a file of features: its blocks are read in a Ray task, a pool of models
computes their hidden states, and another task writes the file. Files that exist are not made again.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pyarrow.fs import FileSelector

from jobs.engine.cluster import start_ray
from jobs.scoring.config import PoolSection
from jobs.scoring.stages import ScoringFailedError, Stages, run_stages
from jobs.tasks.base import resolve_paths
from jobs.tasks.language_model.base import refer_to_base
from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.language_model.data import blocks_layout
from jobs.tasks.language_model.features import features_of
from jobs.tasks.language_model.models import autocast_dtype, build_base
from jobs.tasks.language_model.validation import to_tensors
from jobs.tasks.text.data import prepare_split
from pipelines.object_store import is_local
from pipelines.storage import exists, resolve, write_bytes
from pipelines.stream import Batch
from pipelines.text.blocks import block_arrays
from pipelines.text.features import FeaturePart, Features, write_part
from pipelines.text.rows import read_rows
from pipelines.text.tokenization import load_tokenizer
from tempnet.base_model import BaseReference
from tempnet.models.causal_lm import TemperatureCausalLM
from tempnet.models.stored_base import HEAD_FILE, save_head
from tempnet.softmax.reference import TemperatureLossConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What one item of the pool makes: a file of features, or, without a part, the file of the output layer."""

    part: FeaturePart | None

    @property
    def file(self) -> str:
        """Name of the file."""
        return self.part.file if self.part else HEAD_FILE


@dataclass(frozen=True, slots=True)
class Item:
    """A unit with the blocks that the model reads; without blocks for the output layer."""

    unit: Unit
    blocks: Batch | None


@dataclass(frozen=True, slots=True)
class Result:
    """A unit with what the model made of it."""

    unit: Unit
    blocks: Batch | None
    hidden: np.ndarray | None
    """(n, T, d) int16, the bits of bfloat16 numbers."""
    head: bytes
    """Content of the file of the output layer; empty for features."""


def read_unit(features: Features, unit: Unit) -> Iterator[Item]:
    """Yield the only item of a unit."""
    if unit.part is None:
        yield Item(unit, None)
        return
    text, part = features.text, unit.part
    table = read_rows(text, text.shards[part.shard], range(part.start, part.stop))
    yield Item(unit, block_arrays(text, table))


class HiddenStates:
    """A base model that computes the last hidden states of blocks, as training with this base would."""

    def __init__(self, config: LanguageModelConfig) -> None:
        tokenizer = load_tokenizer(config.tokenizer)
        self._config = config
        self._device = torch.device("cuda" if config.workers.use_gpu else "cpu")
        self._module = TemperatureCausalLM(
            build_base(config, tokenizer),
            None,
            TemperatureLossConfig(name="ce", rho=0.0),
            vocab_size=len(tokenizer),
            freeze_base=True,
            attend_across_documents=config.data.attend_across_documents,
            autocast_dtype=autocast_dtype(config),
        ).to(self._device)
        if self._module.head is None:
            raise ValueError(
                f"model.path = {config.model.path!r} does not compute its logits from its last hidden states by a matrix "
                "product, so the hidden states do not suffice for training: train without model.features"
            )

    @torch.inference_mode()
    def __call__(self, item: Item) -> Result:
        """Compute the hidden states of an item, a micro-batch at a time, or the file of the output layer."""
        if item.blocks is None:
            return Result(item.unit, None, None, self._head())
        size, blocks = self._config.micro_batch_size, item.blocks
        parts = []
        for at in range(0, len(blocks["targets"]), size):
            tensors = to_tensors({name: value[at : at + size] for name, value in blocks.items()}, self._device)
            hidden = self._module.contexts(tensors["input_ids"], tensors["position_ids"])
            parts.append(hidden.to(torch.bfloat16).cpu().view(torch.int16).numpy())
        kept = {name: blocks[name] for name in ("targets", "digest")}
        return Result(item.unit, kept, np.concatenate(parts), b"")

    def _head(self) -> bytes:
        import tempfile

        assert self._module.head is not None
        with tempfile.TemporaryDirectory(prefix="tempnet-head-") as name:
            file = Path(name) / HEAD_FILE
            save_head(self._module.base, self._module.head, self._module.vocab_size, file)
            return file.read_bytes()


def write_result(features: Features, result: Result) -> int:
    """Write the file of a unit and return its size in bytes."""
    unit = result.unit
    if unit.part is None:
        write_bytes(f"{features.directory}/{HEAD_FILE}", result.head)
        return len(result.head)
    assert result.hidden is not None
    assert result.blocks is not None
    return write_part(features, unit.part, result.hidden, result.blocks)


def prepare_features(config: LanguageModelConfig) -> list[Features]:
    """Store the hidden states of the training and the validation text of a run, and return both.

    Raises:
        ValueError: if the base is not frozen, or the cluster is too small.
        OSError: if there is no room for the features; the message says how much they take.
        ScoringFailedError: if files could not be made; the others are kept.
    """
    if not config.model.is_frozen:
        raise ValueError(
            "model.freeze must be True: the hidden states of a base that is trained change with every step"
        )
    config = resolve_paths(config)
    start_ray()
    base = refer_to_base(config)
    layout = blocks_layout(config)
    found = [features_of(config, prepare_split(config, layout, split), base) for split in ("train", "validation")]
    # The same text may be given twice.
    distinct = list({features.directory: features for features in found}.values())
    for features in distinct:
        _prepare(config, features, base)
    return distinct


def describe_size(features: Features) -> str:
    """Return how much the features take, in total and per token."""
    num_tokens = features.text.num_rows * features.context_length
    return (
        f"{features.num_bytes / 2**30:.2f} GiB: {num_tokens:,} tokens × {features.bytes_per_token:,.0f} bytes "
        f"(hidden size {features.hidden_size} in bfloat16, and the target)"
    )


def _prepare(config: LanguageModelConfig, features: Features, base: BaseReference) -> None:
    print(f"{features.directory}\n{describe_size(features)}", flush=True)
    if exists(f"{features.directory}/manifest.json"):
        print("stored before", flush=True)
        return
    filesystem, path = resolve(features.directory)
    filesystem.create_dir(path, recursive=True)
    done = {entry.base_name: entry.size or 0 for entry in filesystem.get_file_info(FileSelector(path))}
    _check_room(features, sum(done.values()))
    units = [Unit(part=part) for part in (None, *features.parts())]
    missing = [unit for unit in units if unit.file not in done]
    workers = config.workers
    started = time.monotonic()
    failed = run_stages(
        Stages(
            model=partial(HiddenStates, config),
            read=partial(read_unit, features),
            write=partial(write_result, features),
        ),
        missing,
        PoolSection(num_workers=workers.max_workers, use_gpu=workers.use_gpu, cpus_per_worker=workers.cpus_per_worker),
        title=lambda unit: unit.file,
        keep=partial(_describe, features),
    )
    if failed:
        raise ScoringFailedError(failed)
    features.save(base.digest)
    print(f"stored in {time.monotonic() - started:.0f} s", flush=True)


def _describe(features: Features, unit: Unit, num_bytes: Any, seconds: float) -> str:
    if unit.part is None:
        return f"{num_bytes / 2**20:.1f} MiB"
    num_tokens = (unit.part.stop - unit.part.start) * features.context_length
    return f"{num_bytes / 2**20:.1f} MiB  {num_tokens / max(seconds, 1e-9):,.0f} tokens/s"


def _check_room(features: Features, num_bytes_done: int) -> None:
    filesystem, path = resolve(features.directory)
    if not is_local(filesystem):
        return
    free = shutil.disk_usage(path).free
    needed = features.num_bytes - num_bytes_done
    if needed > free:
        raise OSError(
            f"{features.directory} takes {needed / 2**30:.2f} GiB more, and its disk has {free / 2**30:.2f} GiB left: make "
            "room, or set run.prepared to a directory on another disk"
        )
