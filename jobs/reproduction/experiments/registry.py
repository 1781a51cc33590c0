"""All experiments by their id, and ids that are part of another."""

from __future__ import annotations

import difflib

from jobs.reproduction.experiment import Experiment, Scale, Study
from jobs.reproduction.experiments import contrastive, networks, sentences, temperatures, texts, training


def _table_18(scale: Scale) -> tuple[Study, ...]:
    return (*networks.table_18(scale), *contrastive.table_18(scale))


_TABLE_18 = Experiment(
    id="T18",
    title="Robust loss against cross-entropy",
    source="TempNet Table 18",
    claim="robust loss and stop-gradient both help, CLIP's by far the most",
    studies=_table_18,
)

EXPERIMENTS: dict[str, Experiment] = {
    one.id: one
    for one in (
        *training.EXPERIMENTS,
        *temperatures.EXPERIMENTS,
        *networks.EXPERIMENTS,
        _TABLE_18,
        *texts.EXPERIMENTS,
        *contrastive.EXPERIMENTS,
        *sentences.EXPERIMENTS,
    )
}
"""In the order of the help."""

ALIASES = {"T7": "T3", "T8": "T3", "T9": "T3", "F10": "F2", "F5-left": "F5"}
"""Table or figure → the experiment that it is a part of."""


def find(name: str) -> Experiment:
    """By id, in any case.

    Raises:
        ValueError: naming the nearest ids.
    """
    ids = {one.lower(): one for one in (*EXPERIMENTS, *ALIASES)}
    if name.lower() not in ids:
        near = difflib.get_close_matches(name.lower(), ids, n=3, cutoff=0.4)
        hint = (
            f"did you mean {' or '.join(ids[one] for one in near)}?" if near else f"there are: {', '.join(EXPERIMENTS)}"
        )
        raise ValueError(f"experiment {name!r} is unknown: {hint}")
    found = ids[name.lower()]
    return EXPERIMENTS[ALIASES.get(found, found)]
