"""Reject unusable weights before anything is built or started, instead of where the damage first has an effect."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import nn


def check_weight_files(source: str | Path) -> None:
    """Reject truncated or corrupt files of weights. Only headers and file sizes are read.

    Args:
        source: a directory, in which every `*.safetensors` file is checked, or one such file; anything else, such as
            a hub name, is ignored.

    Raises:
        ValueError: if a file is truncated or corrupt; the message names the file.
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
    """Reject a model whose weights contain NaN, since every logit and every temperature would then be NaN as well.

    Args:
        module: the loaded model; parameters without data (on the device `meta`) are not checked.
        source: where the model was loaded from, for the error message.

    Raises:
        ValueError: if a parameter contains NaN; the message names the first one and how many of its values are NaN.
    """
    for name, parameter in module.named_parameters():
        # A sum is cheaper than a mask as large as the weight. It is NaN if a term is NaN or infinities cancel, so the
        # values are counted only then.
        if not parameter.is_meta and bool(parameter.detach().sum().isnan()) and (count := int(parameter.isnan().sum())):
            raise ValueError(
                f"the weights of {source} hold NaN: {count} of the {parameter.numel()} numbers of {name}. Did the training "
                "that made them diverge, or is the file damaged?"
            )
