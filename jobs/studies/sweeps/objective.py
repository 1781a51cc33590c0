"""The objective among trials in the band: a validation loss that is comparable between them, the lower the better.

For language models it is −log p of the next token; for dual encoders, −log p of the matching partner among all held-out
ones (`tempnet.contrastive.retrieval.cross_entropy`); both at the model's own temperatures. The training loss is not
comparable, because it depends on ρ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

LOSS = "cross_entropy_tau"
"""Name of the objective among the scores of a validation."""
TITLE = "cross-entropy at τ"
"""Name of the objective in tables and messages."""


def loss_of(scores: Mapping[str, float]) -> float:
    """Returns the objective of a validation, in nats; NaN if it has none."""
    return float(scores.get(LOSS, math.nan))
