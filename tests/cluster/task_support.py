"""Make small image data and small runs of the contrastive tasks, and read the state of the samples from checkpoints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from support import tiny_run, with_sections
from torch import Tensor

from jobs.engine.config import OptimizerSection, TrackingSection, WorkersSection
from jobs.tasks.config import UnimodalSection
from jobs.tasks.dual_encoder.config import (
    ClipConfig,
    DualEncoderSection,
    PairDataSection,
    PairTemperatureSection,
    RetrievalValidationSection,
)
from jobs.tasks.presets.sentences import PRESETS
from jobs.tasks.sentence_encoder.config import SentenceConfig
from pipelines.sample.images import read_captions, write_images
from pipelines.text.tokenization import train_wordpiece
from tempnet.models.towers import random_tower

NUM_PAIRS = 100


def write_tiny_images(directory: Path) -> Path:
    """Write 100 training pairs, 20 validation images, two classes and a tokenizer to a directory, and return it."""
    write_images(
        directory, num_images=NUM_PAIRS, num_retrieval_images=20, num_classes=2, num_images_per_class=2, image_size=32
    )
    train_wordpiece(read_captions(directory / "train"), 600).save_pretrained(directory / "tokenizer")
    return directory


def write_smooth_tower(directory: Path) -> str:
    """Write a random image tower that does not enlarge rounding errors, and return its directory.

    It has batch norms but no ReLU or max pooling, at whose kinks a rounding error switches gradients on or off.
    """
    sizes = {"hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4, "layer_type": "x", "hidden_act": "gelu"}
    random_tower("regnet", "image", embedding_size=8, **sizes).save_pretrained(directory)
    return str(directory)


def tiny_clip_config(images: Path, storage: Path, name: str, **sections: dict[str, Any]) -> ClipConfig:
    """Return a run of 32 steps (5 epochs) of two tiny towers with two workers, ZeRO 1 and float32.

    `sections` maps the name of a section to the fields to override in it.
    """
    config = ClipConfig(
        run=tiny_run(images, storage, name, num_steps=32, checkpoint_every=4, log_every=4, max_restarts=1),
        data=PairDataSection(
            train=str(images / "train"),
            validation=str(images / "validation"),
            tokenizer=str(images / "tokenizer"),
            caption_noise=0.1,
            shuffle_window=50,
            num_readers=2,
        ),
        model=DualEncoderSection(
            image_size=32,
            embedding_size=16,
            image_stem_width=8,
            image_widths=(8, 16),
            image_depths=(1, 1),
            image_block="basic",
            text_hidden_size=16,
            text_num_layers=1,
            text_num_heads=2,
            text_dropout=0.0,
        ),
        # With `target_tau`, ρ changes during the run, and it too must be the same over workers, stages and kills.
        temperature=PairTemperatureSection(loss="tempnet", rho=1.0, target_tau=0.02, hidden_size=8, num_prototypes=8),
        # Some gradients, such as those of an attention's key biases, are only rounding errors. With a smaller epsilon,
        # Adam would make full-sized steps of them.
        optimizer=OptimizerSection(
            batch_size=16, learning_rate_base=3e-3, learning_rate_tempnet=1e-2, weight_decay=0.02, epsilon=1e-4
        ),
        workers=WorkersSection(num_workers=2, cpus_per_worker=0.5, zero_stage=1, precision="fp32", num_threads=1),
        validation=RetrievalValidationSection(every=16, batch_size=16),
        tracking=TrackingSection(experiment="contrastive"),
    )
    changed: ClipConfig = with_sections(config, sections)
    return changed


def tiny_sentences(
    corpus: Path, wordpiece: Path, storage: Path, name: str, **sections: dict[str, Any]
) -> SentenceConfig:
    """Return a run of 40 steps of a small RoBERTa with TempNet, with two workers, ZeRO 1 and float32.

    `sections` maps the name of a section to the fields to override in it.
    """
    config = PRESETS["declutr-small-small"]()
    config = replace(
        config,
        run=tiny_run(corpus, storage, name, num_steps=40, checkpoint_every=5, log_every=5, max_restarts=0),
        data=replace(
            config.data,
            train=str(corpus / "train"),
            validation=str(corpus / "validation"),
            tokenizer=str(wordpiece),
            min_length=3,
            max_length=12,
            min_num_tokens=36,
        ),
        model=replace(config.model, hidden_size=16, num_layers=1, num_heads=2),
        temperature=UnimodalSection(
            loss="tempnet", rho=1.0, hidden_size=8, num_prototypes=8, tau_min=0.01, tau_max=0.5
        ),
        # With a smaller epsilon, Adam would make full-sized steps of gradients that are only rounding errors.
        optimizer=replace(
            config.optimizer, batch_size=8, learning_rate_base=3e-3, learning_rate_tempnet=1e-2, epsilon=1e-4
        ),
        workers=replace(config.workers, precision="fp32", num_threads=1),
        validation=replace(config.validation, every=20, num_documents=15, batch_size=4),
    )
    changed: SentenceConfig = with_sections(config, sections)
    return changed


def sample_states(outcome: dict[str, Any], step: int) -> dict[str, Tensor]:
    """Return the columns (2, N) of the samples' state in a checkpoint, joined over the ranks that wrote it, by sample ID.

    A task without such a state has no columns.
    """
    directory = Path(outcome["directory"]) / f"checkpoint-{step:08d}"
    # Another number of workers may have been killed while it saved the same step, and have left some of its files.
    num_writers = json.loads((directory / "files-00000.json").read_text())["world_size"]
    parts = [load_file(file) for file in sorted(directory.glob(f"samples-*-of-{num_writers:05d}.safetensors"))]
    assert len(parts) in (0, num_writers)
    columns = {}
    for name in parts[0] if parts else ():
        whole = torch.full((2, sum(part[name].shape[1] for part in parts)), torch.nan)
        for rank, part in enumerate(parts):
            whole[:, rank :: len(parts)] = part[name]
        columns[name] = whole
    return columns
