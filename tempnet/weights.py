"""Weights that cannot be used are refused before anything is built or started, not where their damage first shows."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import nn


def check_weight_files(source: str | Path) -> None:
    """Refuse a file of weights that is cut or corrupt. Only headers and file sizes are read.

    Args:
        source: a directory, in which every `*.safetensors` is looked at, or one such file; anything else, such as a hub
            name, is passed over.

    Raises:
        ValueError: naming the file.
    """
    path = Path(source)
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        if file.suffix != ".safetensors" or not file.is_file():
            continue
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError as error:
            raise ValueError(
                f"{file} ({file.stat().st_size} bytes) is cut or corrupt: {error}; copy or export it again"
            ) from error


def check_weights(module: nn.Module, source: str | Path) -> None:
    """Refuse a model whose weights hold NaN: every logit and every temperature would be NaN as well.

    Args:
        module: the loaded model; parameters without data (on the device `meta`) are not looked at.
        source: where it was loaded from, for the message.

    Raises:
        ValueError: naming the first such tensor and how many of its numbers are NaN.
    """
    for name, parameter in module.named_parameters():
        # A sum is one pass without a mask as large as the weight; it is NaN if a term is, or if infinities cancel.
        if not parameter.is_meta and bool(parameter.detach().sum().isnan()) and (count := int(parameter.isnan().sum())):
            raise ValueError(
                f"the weights of {source} hold NaN: {count} of the {parameter.numel()} numbers of {name}. Did the training "
                "that made them diverge, or is the file damaged?"
            )
