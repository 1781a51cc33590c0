"""Weights that cannot be used are refused where they are loaded, not where their NaN first shows."""

from __future__ import annotations

from pathlib import Path

from torch import nn


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
