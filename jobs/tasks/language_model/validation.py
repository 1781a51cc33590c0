"""Validation: the loss at τ = 1 and at the model's τ on held-out text, and a comparison with the TempNet's rivals.

Every rank scores its part of the blocks, which hold whole windows of documents (`pipelines.text.windows`): the predictions
that the headroom test makes of the same text. All figures come from sums over the tokens of all ranks, or over those of
every document, so that they depend neither on the number of ranks nor on the micro-batches. The optimal temperature (the
oracle) is computed for tokens that are spread evenly over all of them; `regret` and `tau_oracle_mean` are means over these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pipelines.features import Features, read_feature_range
from pipelines.stream import Batch
from pipelines.text.blocks import read_range, without_end
from pipelines.text.manifest import Manifest
from pipelines.text.packing import IGNORE_INDEX
from tempnet.baselines import compare_sums, find_best_constant
from tempnet.headroom.gains import DocumentSums
from tempnet.headroom.profile import NUM_NODES, Profiles, num_nodes_down_to
from tempnet.models.output_head import to_bfloat16
from tempnet.softmax.config import TemperatureLossConfig
from tempnet.statistics import TemperatureStatistics, spearman

if TYPE_CHECKING:  # jobs that only prepare batches do not need DeepSpeed
    from deepspeed import DeepSpeedEngine

_NUM_PASSAGE_TOKENS = 512
_FIELDS = ("input_ids", "position_ids", "targets")


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationPart:
    """One rank's part of the validation blocks, padded so that all ranks run the same number of micro-batches."""

    arrays: Batch
    """The blocks of this rank; padding has no valid targets. `documents` (n, T) tells documents of all ranks apart."""
    num_blocks: int
    """Number of blocks of all ranks together."""

    @classmethod
    def read(
        cls, data: Manifest | Features, num_blocks: int, *, rank: int, world_size: int, end_is_target: bool = True
    ) -> ValidationPart:
        """Read the rank's part of the first `num_blocks` blocks (0: all) of a text or of its stored features."""
        manifest = data.text if isinstance(data, Features) else data

        def read_blocks(start: int, stop: int) -> Batch:
            arrays = read_range(manifest, start, stop)
            arrays["documents"] += arrays.pop("parts")[:, None] << 32
            if isinstance(data, Features):
                arrays = read_feature_range(data, start, stop) | {"documents": arrays["documents"]}
            return arrays if end_is_target else without_end(arrays, manifest)

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
    """Comparison of τ with its rivals on all tokens; see :func:`rivals`."""
    judged_by: str | None
    """Objective that the TempNet was trained with, which is a prefix of keys of `rivals`; None without a TempNet."""


class LearnedSums:
    """Sums over the tokens of every document of what is known of them at constant τ and at the model's own.

    Documents are numbered in the order of their names over all ranks, all of which must create this object together.

    Args:
        arrays: this rank's blocks.
        num_nodes: number of nodes of the tokens' profiles.
    """

    def __init__(self, arrays: Batch, num_nodes: int) -> None:
        own = np.unique(arrays["documents"][arrays["targets"] != IGNORE_INDEX])
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, own)
        names = np.unique(np.concatenate(parts))
        self._numbers = np.searchsorted(names, arrays["documents"])
        self.of_constants = DocumentSums(len(names), num_nodes)
        self.learned = torch.zeros(3, len(names), dtype=torch.float64)
        """Of the model's own τ: the sums of the cross-entropy ℓ, of τ·ℓ and of τ, each (D,)."""

    def add(self, at: int, targets: Tensor, output: dict[str, Any]) -> None:
        """Add the tokens of the micro-batch that starts at block `at`."""
        is_valid = targets != IGNORE_INDEX
        documents = torch.from_numpy(self._numbers[at : at + len(targets)])[is_valid.cpu()]
        values, target = output["profiles"]
        self.of_constants.add_profiles(Profiles(values.cpu(), target.cpu()), documents)
        tau, loss = (output[name][is_valid].double().cpu() for name in ("tau", "cross_entropy_tau"))
        self.learned.index_add_(1, documents, torch.stack([loss, tau * loss, tau]))

    def add_up(self, device: torch.device) -> None:
        """Add the sums of all ranks up, in place."""
        sums = self.of_constants
        for values in (self.learned, sums.counts, sums.profiles.values, sums.profiles.target):
            total = values.to(device)
            dist.all_reduce(total)
            values.copy_(total)


def validate(
    engine: DeepSpeedEngine,
    part: ValidationPart,
    *,
    loss_config: TemperatureLossConfig,
    vocab_size: int,
    micro_batch_size: int,
    num_oracle_tokens: int,
    with_details: bool,
) -> tuple[dict[str, float], ValidationDetails | None]:
    """Score this rank's part of the validation blocks. All ranks must call this, in eval mode and without gradients.

    Args:
        engine: DeepSpeed around the module.
        part: this rank's part of the blocks.
        loss_config: the training loss.
        vocab_size: V, the effective vocabulary.
        micro_batch_size: number of blocks scored at a time.
        num_oracle_tokens: number of tokens of all ranks for which the optimal temperature is computed.
        with_details: whether to compute `ValidationDetails`.

    Returns:
        The scores, equal on all ranks, and the details, on rank 0 if requested.
    """
    statistics = TemperatureStatistics.zeros(loss_config.tau_min, loss_config.tau_max, engine.device)
    is_robust = loss_config.kind.objective == "robust"
    num_nodes = num_nodes_down_to(loss_config.tau_min) if is_robust else NUM_NODES
    oracle_rows = _spread_evenly(part.arrays["targets"] != IGNORE_INDEX, num_oracle_tokens, engine.device)
    sums = LearnedSums(part.arrays, num_nodes) if with_details else None
    first_outputs = None
    pairs: list[Tensor] = []
    for at in range(0, len(part.arrays["targets"]), micro_batch_size):
        chunk = {name: value[at : at + micro_batch_size] for name, value in part.arrays.items()}
        batch = to_tensors(chunk, engine.device)
        output = engine(
            **batch,
            num_targets=1.0,
            with_statistics=True,
            oracle_rows=oracle_rows[at : at + micro_batch_size],
            num_profile_nodes=num_nodes if sums else 0,
        )
        statistics.sums += output["statistics"]
        is_valid = batch["targets"] != IGNORE_INDEX
        pairs.append(torch.stack([output["tau"].float(), output["entropy"].float(), is_valid.float()]))
        if sums is not None:
            sums.add(at, batch["targets"], output)
            first_outputs = first_outputs or (batch["targets"], output["tau"], output["entropy"])
    dist.all_reduce(statistics.sums)
    tau, entropy = _gather(torch.cat(pairs, dim=1))
    summary = statistics.summary() | {"tau_entropy_spearman": float(spearman(tau, entropy))}
    if sums is None:
        return summary, None
    sums.add_up(engine.device)
    if dist.get_rank() > 0:
        return summary, None
    assert first_outputs is not None
    figures = rivals(sums, tau, loss_config, vocab_size)
    if is_robust:
        figures |= {
            "robust/oracle_loss": figures["robust/loss"] - summary["regret"],
            "oracle_tau_mean": summary["tau_oracle_mean"],
        }
    details = ValidationDetails(
        histogram=statistics.histogram.tolist(),
        passage=_passage(*first_outputs),
        rivals=figures,
        judged_by=_judged_by(loss_config),
    )
    return summary, details


def _spread_evenly(is_valid: np.ndarray, number: int, device: torch.device) -> Tensor:
    """Choose tokens that are spread evenly over the valid ones of all ranks: (blocks, T), for this rank's part."""
    counts = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=device)
    counts[dist.get_rank()] = int(is_valid.sum())
    dist.all_reduce(counts)
    total = max(int(counts.sum()), 1)
    places = int(counts[: dist.get_rank()].sum()) + np.cumsum(is_valid).reshape(is_valid.shape)  # counted from 1
    number = min(number, total)
    chosen = is_valid & (places * number // total > (places - 1) * number // total)
    return torch.from_numpy(chosen).to(device)


def _gather(own: Tensor) -> tuple[Tensor, Tensor]:
    """Return τ and entropy of the tokens of all ranks: (N,) each. This takes 12 bytes per token on every rank.

    Args:
        own: (3, blocks, T) holds τ, the entropy and whether the target is valid, for this rank's part. All ranks' parts
            have the same size.
    """
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    tau, entropy, is_valid = torch.cat(parts, dim=1).flatten(1)
    return tau[is_valid > 0], entropy[is_valid > 0]


def rivals(sums: LearnedSums, tau: Tensor, config: TemperatureLossConfig, vocab_size: int) -> dict[str, float]:
    """Compare the model's τ with its rivals on the same tokens.

    The best constant of the cross-entropy is that of the headroom test, in the range of `tempnet.headroom.profile`; that of
    the robust loss lies within the bounds of its τ.

    Args:
        sums: sums over documents, of all ranks.
        tau: (N,) temperatures of all tokens.
        config: the training loss.
        vocab_size: V.

    Returns:
        The figures of :func:`tempnet.baselines.compare_sums` with the prefix `cross_entropy/`, where the cross-entropy is
        that of logits/τ in nats per token, and, if the training loss is robust, `robust/`, too; `cross_entropy/tau_one_loss`,
        `num_tokens` and `num_documents`.
    """
    known, counts = sums.of_constants, sums.of_constants.counts
    cross_entropy, weighted, total_tau = sums.learned
    mean = (total_tau.sum() / counts.sum()).item()
    of_all = {"counts": counts, "mean": mean, "tau": tau}
    best = math.exp(-known.profiles.best_constant())
    found = {"cross_entropy": compare_sums(cross_entropy, known.at_constant, best_constant=best, **of_all)}
    if config.kind.objective == "robust":
        offset = config.rho - math.log(vocab_size)

        def robust(constant: float) -> Tensor:
            return constant * (known.at_constant(constant) + offset * counts)

        number = counts.sum().item()
        best = find_best_constant(lambda value: robust(value).sum().item() / number, config.tau_min, config.tau_max)
        found["robust"] = compare_sums(weighted + offset * total_tau, robust, best_constant=best, **of_all)
    figures = {f"{loss}/{key}": value for loss, values in found.items() for key, value in values.items()}
    return figures | {
        "cross_entropy/tau_one_loss": (known.at_constant(1.0).sum() / counts.sum()).item(),
        "num_tokens": counts.sum().item(),
        "num_documents": float((counts > 0).sum()),
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
