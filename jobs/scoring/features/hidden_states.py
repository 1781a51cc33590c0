"""Runs a frozen language model over the text of a run, once, and stores its last hidden states and its output layer."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from jobs.engine.cluster import start_ray
from jobs.scoring.config import LanguageModelPool
from jobs.scoring.features.job import FeatureJob, FeatureUnit, pool_options
from jobs.scoring.units import Finished, Work
from jobs.tasks.base import resolve_paths
from jobs.tasks.language_model.base import refer_to_base
from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.language_model.data import blocks_layout
from jobs.tasks.language_model.features import features_of
from jobs.tasks.language_model.models import autocast_dtype, build_base
from jobs.tasks.language_model.validation import to_tensors
from jobs.tasks.text.data import prepare_split
from pipelines.features import Features
from pipelines.stream import Batch
from pipelines.text.blocks import block_arrays, read_rows
from pipelines.text.tokenization import load_tokenizer
from tempnet.devices import input_device, move_base
from tempnet.models.causal_lm import TemperatureCausalLM
from tempnet.models.output_head import HEAD_FILE, save_head
from tempnet.softmax.config import TemperatureLossConfig


@dataclass(frozen=True, slots=True)
class Item:
    """A unit with the blocks that the model reads; without blocks for the output layer."""

    unit: FeatureUnit
    blocks: Batch | None


def units_of(features: Features) -> list[FeatureUnit]:
    """Return all files: that of the output layer, which is made first, and those of the blocks."""
    return [FeatureUnit(file=HEAD_FILE), *FeatureUnit.of(features.blocks)]


def read_unit(features: Features, unit: FeatureUnit) -> Iterator[Item]:
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
        base = build_base(config, tokenizer, device_map=config.model.device_map)
        base = move_base(base, "cuda" if config.workers.use_gpu else "cpu")
        self._device = input_device(base)
        self._module = TemperatureCausalLM(
            base,
            None,
            TemperatureLossConfig(name="ce", rho=0.0),
            vocab_size=len(tokenizer),
            freeze_base=True,
            attend_across_documents=config.data.attend_across_documents,
            autocast_dtype=autocast_dtype(config),
        )
        if self._module.head is None:
            raise ValueError(
                f"model.path = {config.model.path!r} does not compute its logits from its last hidden states by a matrix "
                "product, so the hidden states do not suffice for training: train without model.features"
            )

    @torch.inference_mode()
    def __call__(self, item: Item) -> Finished:
        """Compute the hidden states of an item, a micro-batch at a time, or the file of the output layer."""
        if item.blocks is None:
            return Finished(files={HEAD_FILE: self._head()})
        size, blocks = self._config.micro_batch_size, item.blocks
        parts = []
        for at in range(0, len(blocks["targets"]), size):
            tensors = to_tensors({name: value[at : at + size] for name, value in blocks.items()}, self._device)
            hidden = self._module.contexts(tensors["input_ids"], tensors["position_ids"])
            parts.append(hidden.to(torch.bfloat16).cpu().view(torch.int16).numpy())
        kept = {name: blocks[name] for name in ("targets", "digest")}
        files, part = item.unit.place
        content = files.encode(part, {"hidden": np.concatenate(parts), **kept})
        return Finished(files={part.file: content}, num_cases=part.stop - part.start)

    def _head(self) -> bytes:
        assert self._module.head is not None
        with tempfile.TemporaryDirectory(prefix="tempnet-head-") as name:
            file = Path(name) / HEAD_FILE
            save_head(self._module.base, self._module.head, self._module.vocab_size, file)
            return file.read_bytes()


def prepare_hidden_states(config: LanguageModelConfig) -> list[Features]:
    """Store the hidden states of the training and the validation text of a run, and return both.

    Raises:
        ValueError: if the base is not frozen, or the cluster is too small.
        OSError, ScoringFailedError: see :meth:`jobs.scoring.features.job.FeatureJob.run`.
    """
    if not config.model.is_frozen:
        raise ValueError(
            "model.freeze must be True: the hidden states of a base that is trained change with every step"
        )
    config = resolve_paths(config)
    start_ray()
    base = refer_to_base(config)
    found = [
        features_of(config, prepare_split(config, blocks_layout(config, split), split), base)
        for split in ("train", "validation")
    ]
    # The same text may be given twice.
    distinct = list({features.directory: features for features in found}.values())
    for features in distinct:
        job = FeatureJob(
            features=features,
            units=units_of(features),
            work=Work(
                model=partial(HiddenStates, config),
                read=partial(read_unit, features),
                title=lambda unit: unit.file,
                noun="blocks",
            ),
            save=partial(features.save, base.digest),
        )
        job.run(
            LanguageModelPool(
                **pool_options(config.workers),
                device_map=config.model.device_map,
                gpus_per_worker=config.model.num_gpus,
            )
        )
    return distinct
