"""Validation: the loss at τ = 1 and at the model's τ on held-out blocks, and a comparison with the TempNet's rivals.

Every rank scores its part of the blocks. Sums are added over ranks, and the rank correlation is computed over all
tokens, so these scores depend neither on the number of ranks nor on the micro-batches. The figures that need the
optimal temperature (the oracle), which are `regret`, `tau_oracle_mean` and the rivals, do depend on them: they are
computed on the first tokens of every micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from pipelines.stream import Batch
from pipelines.text.blocks import read_range
from pipelines.text.features import Features, read_feature_range
from pipelines.text.manifest import Manifest
from pipelines.text.packing import IGNORE_INDEX
from tempnet.dro import robust_loss
from tempnet.models.stored_base import to_bfloat16
from tempnet.oracle import SharedOracle
from tempnet.rivals import compare_with_constants, find_best_constant
from tempnet.softmax.config import TemperatureLossConfig
from tempnet.statistics import TemperatureStatistics, spearman

if TYPE_CHECKING:  # jobs that only prepare batches do not need DeepSpeed
    from deepspeed import DeepSpeedEngine

# Maximum number of logits kept for the comparison with the rivals (float32: 256 MiB).
MAX_LOGITS_KEPT = 1 << 26
_NUM_PASSAGE_TOKENS = 512
_FIELDS = ("input_ids", "position_ids", "targets")


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationPart:
    """One rank's part of the validation blocks, padded so that all ranks run the same number of micro-batches."""

    arrays: Batch
    """The blocks of this rank; padding has no valid targets."""
    num_blocks: int
    """Number of blocks of all ranks together."""

    @classmethod
    def read(cls, data: Manifest | Features, num_blocks: int, *, rank: int, world_size: int) -> ValidationPart:
        """Read the rank's part of the first `num_blocks` blocks (0: all) of a text or of its stored features."""
        manifest = data.text if isinstance(data, Features) else data

        def read_blocks(start: int, stop: int) -> Batch:
            if isinstance(data, Features):
                return read_feature_range(data, start, stop)
            return read_range(data, start, stop)

        total = min(num_blocks or manifest.num_rows, manifest.num_rows)
        size = -(-total // world_size)
        start, stop = min(rank * size, total), min((rank + 1) * size, total)
        arrays = read_blocks(start, stop) if start < stop else _ignored(read_blocks(0, 1))
        missing = size - len(arrays["targets"])
        if missing:
            filler = {name: np.repeat(value[:1], missing, axis=0) for name, value in arrays.items()}
            arrays = {name: np.concatenate([arrays[name], _ignored(filler)[name]]) for name in arrays}
        return cls(arrays=arrays, num_blocks=total)


def _ignored(arrays: Batch) -> Batch:
    return arrays | {"targets": np.full_like(arrays["targets"], IGNORE_INDEX)}


def to_tensors(arrays: Batch, device: torch.device) -> dict[str, Any]:
    """Convert the fields of blocks that the model reads into tensors; those of tokens are None with stored features."""
    tensors: dict[str, Any] = dict.fromkeys(_FIELDS)
    tensors |= {
        name: torch.from_numpy(np.ascontiguousarray(arrays[name])).to(device) for name in _FIELDS if name in arrays
    }
    if "hidden" in arrays:
        hidden = torch.from_numpy(np.ascontiguousarray(arrays["hidden"])).to(device)
        tensors["hidden"] = to_bfloat16(hidden) if hidden.dtype == torch.int16 else hidden
    return tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationDetails:
    """Details for the report, which only rank 0 computes."""

    histogram: list[float]
    """Histogram of τ over [τ₀, τ_max], as counts of the tokens of all ranks."""
    passage: dict[str, list[Any]]
    """A passage as lists `token`, `tau` and `entropy`; τ and entropy belong to the prediction *of* the token."""
    rivals: dict[str, float]
    """Comparison of τ with its rivals; see :func:`rivals`."""
    judged_by: str | None
    """Objective that the TempNet was trained with, which is a prefix of keys of `rivals`; None without a TempNet."""


class Searches:
    """Rivals of several networks on the same contexts: they depend on ρ and on the range of τ, and are sought once each."""

    def __init__(self) -> None:
        self.oracle = SharedOracle()
        self._constants: dict[tuple[float | None, float, float], float] = {}

    def best_constant(self, rho: float | None, find: Callable[[], float], *, tau_min: float, tau_max: float) -> float:
        """Return the best constant τ by the robust loss with a ρ, or by the cross-entropy (ρ = None)."""
        key = rho, tau_min, tau_max
        if key not in self._constants:
            self._constants[key] = find()
        return self._constants[key]


def validate(
    engine: DeepSpeedEngine,
    part: ValidationPart,
    *,
    loss_config: TemperatureLossConfig,
    micro_batch_size: int,
    num_oracle_tokens: int,
    with_details: bool,
    searches: Searches | None = None,
) -> tuple[dict[str, float], ValidationDetails | None]:
    """Score this rank's part of the validation blocks. All ranks must call this, in eval mode and without gradients.

    Args:
        engine: DeepSpeed around the module.
        part: this rank's part of the blocks.
        loss_config: the training loss.
        micro_batch_size: number of blocks scored at a time.
        num_oracle_tokens: number of tokens per rank on which regret and rivals are computed.
        with_details: whether to compute `ValidationDetails`.
        searches: what is known of the rivals, from other networks on the same contexts.

    Returns:
        The scores, equal on all ranks, and the details, on rank 0 if requested.
    """
    statistics = TemperatureStatistics.zeros(loss_config.tau_min, loss_config.tau_max, engine.device)
    kept: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    first_outputs = None
    pairs: list[Tensor] = []
    num_batches = -(-len(part.arrays["targets"]) // micro_batch_size)
    oracle_per_batch = -(-num_oracle_tokens // num_batches)
    for at in range(0, len(part.arrays["targets"]), micro_batch_size):
        chunk = {name: value[at : at + micro_batch_size] for name, value in part.arrays.items()}
        batch = to_tensors(chunk, engine.device)
        output = engine(**batch, num_targets=1.0, with_statistics=True, num_oracle_tokens=oracle_per_batch)
        statistics.sums += output["statistics"]
        is_valid = batch["targets"] != IGNORE_INDEX
        pairs.append(torch.stack([output["tau"].float(), output["entropy"].float(), is_valid.float()]))
        if with_details and dist.get_rank() == 0:
            logits = output["logits"][: max(1, MAX_LOGITS_KEPT // output["logits"].shape[-1] // num_batches)]
            blocks = at + is_valid.nonzero()[:, 0]
            tokens = (batch["targets"][is_valid], output["tau"][is_valid], blocks)
            kept.append((logits, *(values[: len(logits)] for values in tokens)))
            if first_outputs is None:
                first_outputs = (batch["targets"], output["tau"], output["entropy"])
    dist.all_reduce(statistics.sums)
    summary = statistics.summary() | {"tau_entropy_spearman": _pooled_spearman(torch.cat(pairs, dim=1))}
    if not (with_details and dist.get_rank() == 0):
        return summary, None
    logits, targets, tau, blocks = (torch.cat(column) for column in zip(*kept, strict=True))
    assert first_outputs is not None
    details = ValidationDetails(
        histogram=statistics.histogram.tolist(),
        passage=_passage(*first_outputs),
        rivals=rivals(logits, targets, tau, blocks, loss_config, searches),
        judged_by=_judged_by(loss_config),
    )
    return summary, details


def _pooled_spearman(own: Tensor) -> float:
    """Return the Spearman correlation of τ and entropy over the tokens of all ranks.

    This takes 12 bytes per token on every rank.

    Args:
        own: (3, blocks, T) holds τ, the entropy and whether the target is valid, for this rank's part. All ranks' parts
            have the same size.
    """
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    tau, entropy, is_valid = torch.cat(parts, dim=1).flatten(1)
    return float(spearman(tau[is_valid > 0], entropy[is_valid > 0]))


def rivals(
    logits: Tensor,
    targets: Tensor,
    tau: Tensor,
    blocks: Tensor,
    config: TemperatureLossConfig,
    searches: Searches | None = None,
) -> dict[str, float]:
    """Compare the given τ with its rivals on the same tokens.

    The rivals are both constants of `tempnet.rivals` (by the robust loss and by cross-entropy), τ = 1 and the optimal
    temperature, called the oracle (both by the robust loss).

    Args:
        logits: (n, V) logits of n tokens.
        targets: (n,) the tokens.
        tau: (n,) temperatures of the predictions.
        blocks: (n,) number of the block of each token; tokens of one block are not independent.
        config: the training loss.
        searches: what is known of the rivals for these logits; it is completed.

    Returns:
        The figures of :func:`tempnet.rivals.compare_with_constants` with the prefixes `robust/` and `cross_entropy/`,
        where the cross-entropy is that of logits/τ in nats per token; and `robust/tau_one_loss`, `robust/oracle_loss`,
        `oracle_tau_mean` and `num_tokens`.
    """

    def robust(temperature: Tensor) -> Tensor:
        return robust_loss(logits, targets, temperature, config.rho)

    def cross_entropy(temperature: Tensor) -> Tensor:
        return F.cross_entropy(logits / temperature[:, None], targets, reduction="none")

    searches = searches or Searches()
    comparison = {"num_tokens": float(len(targets))}
    bounds = {"tau_min": config.tau_min, "tau_max": config.tau_max}
    for name, losses, rho in (("robust", robust, config.rho), ("cross_entropy", cross_entropy, None)):
        best = searches.best_constant(rho, partial(find_best_constant, losses, tau, **bounds), **bounds)
        figures = compare_with_constants(losses, tau, blocks, best_constant=best, **bounds)
        comparison |= {f"{name}/{key}": value for key, value in figures.items()}
    oracle = searches.oracle(logits, config.rho, config.tau_min, config.tau_max)
    return comparison | {
        "robust/tau_one_loss": robust(torch.ones_like(tau)).double().mean().item(),
        "robust/oracle_loss": robust(oracle).double().mean().item(),
        "oracle_tau_mean": oracle.double().mean().item(),
    }


def _judged_by(config: TemperatureLossConfig) -> str | None:
    if config.kind.temperature != "tempnet":
        return None
    return "robust" if config.kind.objective == "robust" else "cross_entropy"


def _passage(targets: Tensor, tau: Tensor, entropy: Tensor) -> dict[str, list[Any]]:
    """Return the first predicted tokens, each with the τ and the entropy (at τ = 1, in nats) of its prediction."""
    is_valid = targets != IGNORE_INDEX
    return {
        name: values[is_valid][:_NUM_PASSAGE_TOKENS].tolist()
        for name, values in (("token", targets), ("tau", tau), ("entropy", entropy))
    }
