"""The constant temperature that a dual encoder was trained at, which is part of its predictions of who belongs to whom.

An export of a loss with one temperature, fixed or learned, holds it in a small JSON file. A Transformers CLIPModel holds
its logarithm, negated, among its weights (`logit_scale`, Radford et al. 2021, section 2.5). A model whose temperatures
differ from sample to sample, or whose loss has none, holds neither.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from transformers import CLIPModel

from tempnet.models.dual_encoder_config import IMAGE_ENCODER_DIRECTORY
from tempnet.models.towers import load_with_missing, read_config

TEMPERATURE_FILE = "training_temperature.json"


def save_training_temperature(directory: str | Path, tau: float) -> None:
    """Write τ beside an exported dual encoder."""
    (Path(directory) / TEMPERATURE_FILE).write_text(json.dumps({"tau": tau}) + "\n")


def load_training_temperature(directory: str | Path) -> float | None:
    """Return the constant τ that a dual encoder or a Transformers CLIPModel was trained at; None if it holds none.

    Raises:
        ValueError: if the directory holds something else in its place, or τ is not positive and finite.
    """
    directory = Path(directory)
    path = directory / TEMPERATURE_FILE
    if path.is_file():
        try:
            tau = float(json.loads(path.read_text())["tau"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f'{path} is no JSON object {{"tau": number}}: {error}') from error
        return _checked(tau, str(path))
    if (directory / IMAGE_ENCODER_DIRECTORY).is_dir() or read_config(directory).model_type != "clip":
        return None
    clip, missing = load_with_missing(CLIPModel, directory)
    if "logit_scale" in missing:
        return None
    return _checked(math.exp(-clip.logit_scale.item()), f"logit_scale of {directory}")


def _checked(tau: float, place: str) -> float:
    if not 0.0 < tau < math.inf:
        raise ValueError(f"{place}: the temperature {tau:g} must be positive and finite")
    return tau
