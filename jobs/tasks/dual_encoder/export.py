"""Exports a dual encoder, whose towers load with Transformers alone, together with its tokenizer and its TempNets."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from jobs.engine.export import open_export
from tempnet.contrastive.losses import ContrastiveLoss
from tempnet.models.dual_encoder import IMAGE_TEMPNET_DIRECTORY, TEXT_TEMPNET_DIRECTORY, DualEncoder


def export_encoder(encoder: DualEncoder, loss: ContrastiveLoss, tokenizer: PreTrainedTokenizerFast, uri: str) -> None:
    """Write dual encoder, tokenizer and the loss's TempNets to the directory at `uri`, overwriting an earlier export."""
    with open_export(uri) as directory:
        encoder.save_pretrained(directory, tokenizer)
        for network, name in (
            (loss.image_tempnet, IMAGE_TEMPNET_DIRECTORY),
            (loss.text_tempnet, TEXT_TEMPNET_DIRECTORY),
        ):
            if network is not None:
                network.save_pretrained(directory / name)
