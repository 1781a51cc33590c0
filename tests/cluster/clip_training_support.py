"""Make small image data and small contrastive configurations for the cluster tests.

Executed as a module, it trains one such configuration:

python -m clip_training_support IMAGES STORAGE NAME '{"section": {"field": value}}'
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from support import tiny_run

from jobs.engine.config import OptimizerSection, TrackingSection, WorkersSection
from jobs.engine.launch import train
from jobs.scoring.mlflow_models import record_models
from jobs.tasks.dual_encoder.config import (
    ClipConfig,
    DualEncoderSection,
    PairDataSection,
    PairTemperatureSection,
    RetrievalValidationSection,
)
from jobs.tasks.dual_encoder.plan import make_plan
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
    return replace(
        config, **{section: replace(getattr(config, section), **values) for section, values in sections.items()}
    )


if __name__ == "__main__":
    images, storage, name, sections = sys.argv[1:]
    train(
        make_plan(tiny_clip_config(Path(images), Path(storage), name, **json.loads(sections))),
        record_models=record_models,
    )
