"""All experiments by their id, and the ids of tables and figures that belong to another experiment."""

from __future__ import annotations

import difflib

from jobs.studies.reproduction.experiment import Experiment
from jobs.studies.reproduction.experiments import (
    caption_noise,
    contrastive_losses,
    networks,
    sentences,
    temperatures,
    texts,
    training,
)

EXPERIMENTS: dict[str, Experiment] = {
    experiment.id: experiment
    for experiment in (
        *training.EXPERIMENTS,
        *temperatures.EXPERIMENTS,
        *networks.EXPERIMENTS,
        *texts.EXPERIMENTS,
        *contrastive_losses.EXPERIMENTS,
        *caption_noise.EXPERIMENTS,
        *sentences.EXPERIMENTS,
    )
}
"""Id → experiment, in the order in which the help lists them."""

ALIASES = {"T7": "T3", "T8": "T3", "T9": "T3", "F10": "F2", "F5-left": "F5"}
"""Id of a table or figure → id of the experiment that it is a part of."""


def find(name: str) -> Experiment:
    """Returns the experiment with an id or alias, in upper or lower case.

    Raises:
        ValueError: naming the most similar ids, if the id is unknown.
    """
    ids = {id.lower(): id for id in (*EXPERIMENTS, *ALIASES)}
    if name.lower() not in ids:
        near = difflib.get_close_matches(name.lower(), ids, n=3, cutoff=0.4)
        hint = (
            f"did you mean {' or '.join(ids[key] for key in near)}?" if near else f"there are: {', '.join(EXPERIMENTS)}"
        )
        raise ValueError(f"experiment {name!r} is unknown: {hint}")
    id = ids[name.lower()]
    return EXPERIMENTS[ALIASES.get(id, id)]
