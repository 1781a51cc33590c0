"""Validation: loss at τ = 1 and at τ on held-out blocks, and what a temperature network is worth against its rivals.

Every rank scores its part of the blocks; sums are added over ranks, and the rank correlation is that of all tokens, so these
do not depend on the number of ranks nor on micro-batches. The tokens that the oracle is solved for do: they are the first of
every micro-batch, and `regret`, `tau_oracle_mean` and the rivals are figures of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pipelines.stream import Batch
from pipelines.text.blocks import read_range
from pipelines.text.manifest import Manifest
from pipelines.text.packing import IGNORE_INDEX
from tempnet.dro import optimal_temperature, robust_loss
from tempnet.rivals import compare_with_constants
from tempnet.softmax.reference import TemperatureLossConfig
from tempnet.statistics import TemperatureStatistics, spearman
from torch import Tensor

if TYPE_CHECKING:  # jobs that only prepare batches need no DeepSpeed
    from deepspeed import DeepSpeedEngine

# Logits kept for the comparison with the best constant temperature: at most this many numbers (float32: 256 MiB).
_MAX_LOGITS_KEPT = 1 << 26
_NUM_PASSAGE_TOKENS = 512
_FIELDS = ("input_ids", "position_ids", "targets")


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationPart:
    """One rank's part of the validation blocks, padded so that all ranks run equally many micro-batches."""

    arrays: Batch
    num_blocks: int
    """Blocks in all parts together."""

    @classmethod
    def read(cls, manifest: Manifest, num_blocks: int, *, rank: int, world_size: int) -> ValidationPart:
        """The rank's share of the first `num_blocks` blocks (0: all)."""
        total = min(num_blocks or manifest.num_rows, manifest.num_rows)
        size = -(-total // world_size)
        start, stop = min(rank * size, total), min((rank + 1) * size, total)
        arrays = read_range(manifest, start, stop) if start < stop else _ignored(read_range(manifest, 0, 1))
        missing = size - len(arrays["targets"])
        if missing:
            filler = {name: np.repeat(value[:1], missing, axis=0) for name, value in arrays.items()}
            arrays = {name: np.concatenate([arrays[name], _ignored(filler)[name]]) for name in arrays}
        return cls(arrays=arrays, num_blocks=total)


def _ignored(arrays: Batch) -> Batch:
    return arrays | {"targets": np.full_like(arrays["targets"], IGNORE_INDEX)}


def to_tensors(arrays: Batch, device: torch.device) -> dict[str, Tensor]:
    """The training fields of some blocks as tensors."""
    return {name: torch.from_numpy(np.ascontiguousarray(arrays[name])).to(device) for name in _FIELDS}


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationDetails:
    """What only rank 0 looks at: the temperatures of a passage, and the rivals of the temperature network."""

    histogram: list[float]
    """Counts of τ over [τ₀, τ_max], all ranks."""
    passage: dict[str, list[Any]]
    """`token`, `tau` and `entropy` of a run of tokens; τ and entropy belong to the prediction *of* the token."""
    rivals: dict[str, float]
    """See :func:`rivals`."""
    judged_by: str | None
    """The loss that the TempNet was trained on, a prefix of `rivals`; None where no TempNet predicts."""


def validate(
    engine: DeepSpeedEngine,
    part: ValidationPart,
    *,
    loss_config: TemperatureLossConfig,
    micro_batch_size: int,
    num_oracle_tokens: int,
    with_details: bool,
) -> tuple[dict[str, float], ValidationDetails | None]:
    """Score the part, in eval mode and without a graph; all ranks must call it. Details come on rank 0 only.

    Args:
        num_oracle_tokens: tokens of a rank on which regret and rivals are computed.
        with_details: whether to compute `ValidationDetails`.
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
            logits = output["logits"][: max(1, _MAX_LOGITS_KEPT // output["logits"].shape[-1] // num_batches)]
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
        rivals=rivals(logits, targets, tau, blocks, loss_config),
        judged_by=_judged_by(loss_config),
    )
    return summary, details


def _pooled_spearman(own: Tensor) -> float:
    """Rank correlation of τ and entropy over the tokens of all ranks; 12 bytes a token on each of them.

    `own` (3, blocks, T) holds τ, entropy and whether there is a target; parts are equally large on all ranks.
    """
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    tau, entropy, is_valid = torch.cat(parts, dim=1).flatten(1)
    return float(spearman(tau[is_valid > 0], entropy[is_valid > 0]))


def rivals(
    logits: Tensor, targets: Tensor, tau: Tensor, blocks: Tensor, config: TemperatureLossConfig
) -> dict[str, float]:
    """The given τ beside its rivals on the same rows: both constants by either loss, τ = 1 and the oracle by the robust one.

    Args:
        logits, targets, tau: (n, V), (n,), (n,).
        blocks: (n,) the block of each token; tokens of one block are not independent.

    Returns:
        The figures of :func:`tempnet.rivals.compare_with_constants` under `robust/` and `cross_entropy/`, the latter that of
        logits/τ in nats a token; `robust/tau_one_loss`, `robust/oracle_loss`, `oracle_tau_mean`, `num_tokens`.
    """

    def robust(temperature: Tensor) -> Tensor:
        return robust_loss(logits, targets, temperature, config.rho)

    def cross_entropy(temperature: Tensor) -> Tensor:
        return F.cross_entropy(logits / temperature[:, None], targets, reduction="none")

    found = {"num_tokens": float(len(targets))}
    for name, losses in (("robust", robust), ("cross_entropy", cross_entropy)):
        figures = compare_with_constants(losses, tau, blocks, tau_min=config.tau_min, tau_max=config.tau_max)
        found |= {f"{name}/{key}": value for key, value in figures.items()}
    oracle = optimal_temperature(logits, config.rho, config.tau_min, config.tau_max)
    return found | {
        "robust/tau_one_loss": robust(torch.ones_like(tau)).double().mean().item(),
        "robust/oracle_loss": robust(oracle).double().mean().item(),
        "oracle_tau_mean": oracle.double().mean().item(),
    }


def _judged_by(config: TemperatureLossConfig) -> str | None:
    return config.kind.objective if config.kind.temperature == "tempnet" else None


def _passage(targets: Tensor, tau: Tensor, entropy: Tensor) -> dict[str, list[Any]]:
    """The first tokens that are predicted, each with the τ and the entropy (τ = 1, nats) of its prediction."""
    is_valid = targets != IGNORE_INDEX
    return {
        name: values[is_valid][:_NUM_PASSAGE_TOKENS].tolist()
        for name, values in (("token", targets), ("tau", tau), ("entropy", entropy))
    }
