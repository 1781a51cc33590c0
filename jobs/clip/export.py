"""Export: a dual encoder whose towers load with Transformers alone, its tokenizer, and the TempNets beside it."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pyarrow.fs
from transformers import PreTrainedTokenizerFast

from pipelines.archives import resolve
from tempnet.models.dual_encoder import IMAGE_TEMPNET_DIRECTORY, TEXT_TEMPNET_DIRECTORY
from tempnet.models.temperature_dual_encoder import TemperatureDualEncoder


def export_encoder(module: TemperatureDualEncoder, tokenizer: PreTrainedTokenizerFast, uri: str) -> None:
    """Write the directory at `uri`, over what an earlier export left there."""
    directory = Path(tempfile.mkdtemp(prefix="tempnet-export-"))
    module.encoder.save_pretrained(directory, tokenizer)
    for network, name in (
        (module.loss.image_tempnet, IMAGE_TEMPNET_DIRECTORY),
        (module.loss.text_tempnet, TEXT_TEMPNET_DIRECTORY),
    ):
        if network is not None:
            network.save_pretrained(directory / name)
    filesystem, path = resolve(uri)
    filesystem.create_dir(path, recursive=True)
    pyarrow.fs.copy_files(str(directory), path, destination_filesystem=filesystem)
    shutil.rmtree(directory)
