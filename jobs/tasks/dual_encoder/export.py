"""Exports a dual encoder, whose towers load with Transformers alone, with its tokenizer and its temperatures."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from jobs.engine.export import open_export
from tempnet.models.dual_encoder import IMAGE_TEMPNET_DIRECTORY, TEXT_TEMPNET_DIRECTORY
from tempnet.models.temperature_dual_encoder import TemperatureDualEncoder
from tempnet.models.training_temperature import save_training_temperature


def export_encoder(module: TemperatureDualEncoder, tokenizer: PreTrainedTokenizerFast, uri: str) -> None:
    """Write dual encoder, tokenizer and TempNets, or the constant τ, into `uri`, overwriting an earlier export."""
    with open_export(uri) as directory:
        module.encoder.save_pretrained(directory, tokenizer)
        if (tau := module.loss.constant_tau) is not None:
            save_training_temperature(directory, tau)
        for network, name in (
            (module.loss.image_tempnet, IMAGE_TEMPNET_DIRECTORY),
            (module.loss.text_tempnet, TEXT_TEMPNET_DIRECTORY),
        ):
            if network is not None:
                network.save_pretrained(directory / name)
