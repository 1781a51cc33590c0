"""Make small image data and small runs of the contrastive tasks, and read the state of the samples from checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from support import configure, places
from torch import Tensor

from jobs.tasks.dual_encoder.config import ClipConfig
from jobs.tasks.presets import clip, sentences
from jobs.tasks.sentence_encoder.config import SentenceConfig
from pipelines.sample.images import read_captions, write_images
from pipelines.text.tokenization import train_wordpiece
from tempnet.models.towers import random_tower

TOWER_OPTIONS = [
    "--model.image-size=32", "--model.embedding-size=16", "--model.image-stem-width=8", "--model.image-widths", "8", "16",
    "--model.image-depths", "1", "1", "--model.text-hidden-size=16", "--model.text-num-layers=1",
    "--model.text-num-heads=2", "--temperature.rho=1", "--temperature.hidden-size=8", "--temperature.num-prototypes=8",
    "--optimizer.batch-size=16", "--workers.num-threads=1", "--validation.batch-size=16",
]  # fmt: skip
"""Options that make the towers and TempNets of a preset of `train_clip` tiny."""

# With `target_tau`, ρ changes during the run, and it too must be the same over workers, stages and kills. Some gradients,
# such as those of an attention's key biases, are only rounding errors. With a smaller epsilon, Adam would make full-sized
# steps of them.
_CLIP_OPTIONS = [
    *TOWER_OPTIONS, "--run.num-steps=32", "--run.checkpoint-every=4", "--run.log-every=4", "--run.max-restarts=1",
    "--data.caption-noise=0.1", "--data.shuffle-window=50", "--data.num-readers=2", "--data.min-crop-scale=0.5",
    "--data.flip-probability=0.5", "--temperature.target-tau=0.02", "--optimizer.learning-rate-base=3e-3",
    "--optimizer.learning-rate-tempnet=1e-2", "--optimizer.epsilon=1e-4", "--optimizer.rest-share-tempnet=0",
    "--optimizer.max-grad-norm=1", "--workers.zero-stage=1", "--workers.precision=fp32", "--validation.every=16",
]  # fmt: skip
SENTENCE_OPTIONS = [
    "--run.num-steps=40", "--run.checkpoint-every=5", "--run.log-every=5", "--run.max-restarts=0",
    "--data.min-length=3", "--data.max-length=12", "--data.min-num-tokens=36", "--model.hidden-size=16",
    "--model.num-layers=1", "--model.num-heads=2", "--temperature.loss=tempnet", "--temperature.rho=1",
    "--temperature.hidden-size=8", "--temperature.num-prototypes=8", "--temperature.tau-min=0.01",
    "--temperature.tau-max=0.5", "--optimizer.batch-size=8", "--optimizer.learning-rate-base=3e-3",
    "--optimizer.learning-rate-tempnet=1e-2", "--optimizer.epsilon=1e-4", "--workers.precision=fp32",
    "--workers.num-threads=1", "--validation.every=20", "--validation.num-documents=15", "--validation.batch-size=4",
]  # fmt: skip


def write_tiny_images(directory: Path) -> Path:
    """Write 100 training pairs, 20 validation images, two classes and a tokenizer to a directory, and return it."""
    write_images(
        directory, num_images=100, num_retrieval_images=20, num_classes=2, num_images_per_class=2, image_size=32
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
    words = ["clip-cc3m-tempnet-small", *_CLIP_OPTIONS, *places(images, storage, name)]
    config: ClipConfig = configure(clip.PRESETS, words, sections)
    return config


def tiny_sentences(
    corpus: Path, wordpiece: Path, storage: Path, name: str, **sections: dict[str, Any]
) -> SentenceConfig:
    """Return a run of 40 steps of a small RoBERTa with TempNet, with two workers, ZeRO 1 and float32; see above."""
    words = ["declutr-small-small", *SENTENCE_OPTIONS, *places(corpus, storage, name), f"--data.tokenizer={wordpiece}"]
    config: SentenceConfig = configure(sentences.PRESETS, words, sections)
    return config


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
