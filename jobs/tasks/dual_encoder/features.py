"""The frozen towers of a run, and their stored embeddings (`jobs.prepare_features` stores them)."""

from __future__ import annotations

from jobs.tasks.dual_encoder.config import ClipConfig
from jobs.tasks.dual_encoder.models import encoder_sizes
from jobs.tasks.frozen_base import check_continues
from pipelines.features import PairEmbeddings, features_directory
from pipelines.images.manifest import ImageManifest
from pipelines.local_copy import checked_copy
from pipelines.text.tokenization import load_tokenizer, tokenizer_digest
from tempnet.base_model import BaseReference
from tempnet.models.dual_encoder import encoder_digest


def refer_to_towers(config: ClipConfig) -> BaseReference:
    """Return the reference to the frozen towers of a run.

    Raises:
        ValueError: if they are missing, or the run's directory names others than those that are there now.
    """
    path = config.model.path
    found = BaseReference(path=path, digest=encoder_digest(checked_copy(path, "model.path = ")))
    check_continues(config, path, found)
    return found


def caption_noise(config: ClipConfig, split: str) -> float:
    """Return the share of the captions of train or validation that have noise: validation has none."""
    return config.data.caption_noise if split == "train" else 0.0


def embeddings_of(config: ClipConfig, pairs: ImageManifest, towers: BaseReference, split: str) -> PairEmbeddings:
    """Return where the embeddings of prepared pairs are, or will be, for the towers and the precision of a run.

    Args:
        config: configuration of the run.
        pairs: the prepared pairs.
        towers: the frozen towers.
        split: train or validation.
    """
    noise = caption_noise(config, split)
    directory = features_directory(
        config.run.prepared_directory,
        pairs,
        kind="pairs",
        encoder=towers.digest,
        precision=config.workers.resolved_precision,
        tokenizer=tokenizer_digest(load_tokenizer(config.tokenizer, needs_eos=False)),
        num_text_tokens=config.data.num_text_tokens,
        **({"caption_noise": [noise, config.run.seed]} if noise else {}),
    )
    sizes = encoder_sizes(config)
    return PairEmbeddings(
        directory=directory,
        pairs=pairs,
        embedding_size=sizes.embedding_size,
        image_size=sizes.image_size,
        num_text_tokens=sizes.num_text_tokens,
    )


def find_embeddings(config: ClipConfig, pairs: ImageManifest, towers: BaseReference, split: str) -> PairEmbeddings:
    """Return the stored embeddings of prepared pairs; the arguments are those of :func:`embeddings_of`.

    Raises:
        FileNotFoundError: if they were not prepared, or not all of them.
    """
    wanted = embeddings_of(config, pairs, towers, split)
    try:
        return PairEmbeddings.load(wanted.directory, pairs)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"model.features = True, but the embeddings of data.{split} for these towers, captions and precision are not "
            f"stored in {wanted.directory}: store them by the same command with jobs.prepare_features in the place of "
            "jobs.train_clip"
        ) from error
