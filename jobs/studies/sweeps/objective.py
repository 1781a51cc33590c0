"""What decides among the trials in the band: the validation loss that is comparable between them, the lower the better.

For language models −log p of the next token, for dual encoders that of the pair that belongs together among all held-out
ones (`tempnet.contrastive.retrieval.cross_entropy`), at the model's own temperatures. The training loss depends on ρ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

TITLE = "cross-entropy at τ"


def loss_of(scores: Mapping[str, float]) -> float:
    """Of a validation, in nats; NaN where there is none."""
    return float(scores.get("cross_entropy_tau", math.nan))
