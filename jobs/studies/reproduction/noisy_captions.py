"""Scoring of caption noise: the temperatures of pairs with noisy captions beside those of the other pairs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyarrow.fs import FileSelector

from jobs.engine.resumption import count_writers
from jobs.studies.reproduction.scoring import FinishedRun, Place
from pipelines.local_copy import local_copy
from pipelines.storage import read_bytes, resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisyCaptions:
    """Compares the temperatures of pairs with noisy captions with those of the other pairs, in %: `noisy_tau`.

    TempNets predict them anew; iSogCLR's temperatures are read from its last checkpoint. Which pairs are noisy at
    `share` depends on the seed alone, so a run without noise shows how much of the difference is not due to the noise.
    """

    share: float = 0.15
    num_pairs: int = 4000

    @property
    def data(self) -> Mapping[str, str]:
        """No data beyond those of the training are needed."""
        return {}

    def scores(self, runs: Sequence[FinishedRun], place: Place) -> dict[str, dict[str, float]]:
        """Returns the differences, as means over images and captions of the training set."""
        return {run.name: {"noisy_tau": self._difference(run)} for run in runs}

    def _difference(self, run: FinishedRun) -> float:
        from jobs.tasks.dual_encoder.config import ClipConfig
        from jobs.tasks.dual_encoder.data import pair_source, prepare_split, random_pairs

        config = run.config
        assert isinstance(config, ClipConfig)
        source = pair_source(config, prepare_split(config, "train"))
        count = min(self.num_pairs, source.manifest.num_pairs)
        ids = random_pairs(source.manifest.num_pairs, count, config.run.seed)
        places = source.locate(ids)
        batch = source.read(*places, 0)
        is_noisy = dataclasses.replace(source, caption_noise=self.share).read(*places, 0)["is_noisy"]
        if config.temperature.needs_tempnets:
            tau = _predict(run.export, batch)
        else:
            tau = _read_stored(config.run.directory, source.manifest.num_pairs)[:, ids]
        ratios = tau[:, is_noisy].mean(1) / tau[:, ~is_noisy].mean(1)
        return float(100 * (ratios - 1).mean())


def _predict(export: str, batch: Mapping[str, Any]) -> Any:
    """Returns the predicted temperatures (2, n) of images and captions."""
    import torch

    from tempnet.models.dual_encoder import DualEncoder, load_pair_tempnets

    place = local_copy(export)
    encoder, networks = DualEncoder.from_pretrained(place), load_pair_tempnets(place)
    parts = []
    with torch.no_grad():
        for at in range(0, len(batch["ids"]), 256):
            images, *tokens = (
                torch.from_numpy(batch[name][at : at + 256]) for name in ("images", "input_ids", "attention_mask")
            )
            embeddings = encoder.encode_images(images), encoder.encode_texts(*tokens)
            parts.append(torch.stack([network(rows) for network, rows in zip(networks, embeddings, strict=True)]))
    return torch.cat(parts, 1).double().numpy()


def _read_stored(directory: str, num_pairs: int) -> Any:
    """Returns the temperatures (2, N) of all training pairs from the last checkpoint.

    In a checkpoint, every rank has saved the samples that it owns.
    """
    import numpy as np
    from safetensors.numpy import load

    from tempnet.contrastive.state import state_file_names

    checkpoints = sorted(path for path in _names(directory) if path.startswith("checkpoint-"))
    last = f"{directory}/{checkpoints[-1]}" if checkpoints else directory
    files = state_file_names(count_writers(last))
    if not set(files) <= set(_names(last)):
        raise FileNotFoundError(f"{directory} holds no checkpoint with the temperatures of its samples")
    tau = np.empty((2, num_pairs))
    for rank, file in enumerate(files):
        tau[:, rank :: len(files)] = load(read_bytes(f"{last}/{file}"))["tau"]
    return tau


def _names(directory: str) -> list[str]:
    """Returns the names of the files and directories in a directory at a path or URI."""
    filesystem, path = resolve(directory)
    return [item.base_name for item in filesystem.get_file_info(FileSelector(path))]
