"""Computing negative log-likelihoods of windows at several temperatures, from one forward pass of the base model.

Softmax, τ and entropy are computed in float32 for a chunk of tokens at a time; sums are accumulated in float64.
Shapes: B windows, T tokens, V vocabulary, N target tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from jobs.scoring.language_models.temperatures import TemperatureFunction, num_rows_a_chunk
from jobs.scoring.language_models.windows import ScoredWindow
from tempnet.devices import input_device
from tempnet.inference import record_hidden_states


@dataclass(slots=True, kw_only=True)
class Score:
    """The score of some windows at one temperature."""

    nll: float = 0.0
    """Sum of −log p over the target tokens, in nats."""
    num_tokens: int = 0
    num_windows: int = 0
    num_greedy: int = 0
    """Number of windows in which every target has the largest logit."""
    tau: list[np.ndarray] = field(default_factory=list)
    """τ of the targets, as a list of arrays, window after window in the order of scoring."""
    entropy: list[np.ndarray] = field(default_factory=list)
    """Entropy of the same predictions at τ = 1, in nats."""


@torch.no_grad()
def score_windows(
    base: PreTrainedModel,
    windows: Sequence[ScoredWindow],
    functions: Mapping[str, TemperatureFunction],
    *,
    vocab_size: int | None,
    batch_size: int,
) -> dict[str, Score]:
    """Score windows at each of several temperatures.

    Args:
        base: the base model.
        windows: the windows to score.
        functions: name → function that returns τ for logits and hidden states.
        vocab_size: logits beyond it are padding and ignored. None: all logits count.
        batch_size: number of windows per forward pass.

    Returns:
        name → score at that temperature.
    """
    scores = {name: Score() for name in functions}
    # sorted by length, so that batches need little padding
    order = sorted(windows, key=lambda window: -len(window.inputs))
    for at in range(0, len(order), batch_size):
        _score_batch(base, order[at : at + batch_size], functions, scores, vocab_size)
    return scores


def _score_batch(
    base: PreTrainedModel,
    windows: Sequence[ScoredWindow],
    functions: Mapping[str, TemperatureFunction],
    scores: dict[str, Score],
    vocab_size: int | None,
) -> None:
    device = input_device(base)
    length = max(len(window.inputs) for window in windows)
    # Padding on the right needs no mask: the model is causal, and no position after the end of a window is scored.
    inputs = torch.tensor([window.inputs + (0,) * (length - len(window.inputs)) for window in windows], device=device)
    with record_hidden_states(base) as seen:
        logits = base(input_ids=inputs, use_cache=False).logits.flatten(0, 1)  # (B·T, V)
    hidden = seen[-1].flatten(0, 1)
    positions = [
        row * length + column
        for row, window in enumerate(windows)
        for column in range(len(window.inputs) - len(window.targets), len(window.inputs))
    ]
    owners = [row for row, window in enumerate(windows) for _ in window.targets]
    targets = [target for window in windows for target in window.targets]
    num_missed = torch.zeros(len(windows), dtype=torch.long, device=device)
    num_rows = num_rows_a_chunk(logits.shape[-1])
    for begin in range(0, len(positions), num_rows):
        chunk = slice(begin, begin + num_rows)
        places = torch.tensor(positions[chunk], device=device)
        rows, states = logits[places][:, :vocab_size].float(), hidden[places.to(hidden.device)].to(device)
        target = torch.tensor(targets[chunk], device=device)
        num_missed.index_add_(0, torch.tensor(owners[chunk], device=device), (rows.argmax(-1) != target).long())
        entropy = _entropy(rows).cpu().numpy()
        for name, function in functions.items():
            tau = function(rows, states)
            scaled = rows / tau.unsqueeze(-1)
            nll = torch.logsumexp(scaled, -1) - scaled.gather(-1, target.unsqueeze(-1)).squeeze(-1)
            score = scores[name]
            score.nll += float(nll.double().sum())
            score.tau.append(tau.cpu().numpy())
            score.entropy.append(entropy)
    for score in scores.values():
        score.num_tokens += len(targets)
        score.num_windows += len(windows)
        score.num_greedy += int((num_missed == 0).sum())


def _entropy(logits: Tensor) -> Tensor:
    """Returns the entropy (N,) of softmax(logits) at τ = 1, in nats; logits are (N, V)."""
    log_probs = torch.log_softmax(logits, dim=-1)
    return -(log_probs.exp() * log_probs).sum(-1)
