"""Exports a dual encoder, whose towers load with Transformers alone, with its tokenizer and its temperatures."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from jobs.engine.export import open_export
from tempnet.contrastive.losses import ContrastiveLoss
from tempnet.models.dual_encoder import (
    IMAGE_TEMPNET_DIRECTORY,
    TEXT_TEMPNET_DIRECTORY,
    DualEncoder,
    save_training_temperature,
)


def export_encoder(encoder: DualEncoder, loss: ContrastiveLoss, tokenizer: PreTrainedTokenizerFast, uri: str) -> None:
    """Write dual encoder, tokenizer and the loss's TempNets or constant τ into `uri`, overwriting an earlier export."""
    with open_export(uri) as directory:
        encoder.save_pretrained(directory, tokenizer)
        if (tau := loss.constant_tau) is not None:
            save_training_temperature(directory, tau)
        for network, name in (
            (loss.image_tempnet, IMAGE_TEMPNET_DIRECTORY),
            (loss.text_tempnet, TEXT_TEMPNET_DIRECTORY),
        ):
            if network is not None:
                network.save_pretrained(directory / name)
