"""Validation: the loss at τ = 1 and at the model's τ on held-out text, and a comparison with the TempNet's rivals.

Every rank scores its part of the blocks, which hold whole windows of documents (`pipelines.text.windows`): the predictions
that the headroom test makes of the same text. All figures come from sums over the tokens of all ranks, or over those of
every document, so that they depend neither on the number of ranks nor on the micro-batches. The optimal temperature (the
oracle) is computed for tokens that are spread evenly over all of them; `regret` and `tau_oracle_mean` are means over these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from jobs.tasks.base import to_device
from pipelines.features import Features, read_feature_range
from pipelines.stream import Batch
from pipelines.text.blocks import read_range, without_end
from pipelines.text.manifest import Manifest
from pipelines.text.packing import IGNORE_INDEX
from tempnet.baselines import compare_sums, find_best_constant
from tempnet.headroom.gains import DocumentSums
from tempnet.headroom.profile import NUM_NODES, Profiles, num_nodes_down_to
from tempnet.models.causal_lm import CausalLMOutput
from tempnet.softmax.config import TemperatureLossConfig
from tempnet.statistics import TemperatureStatistics, spearman

_NUM_PASSAGE_TOKENS = 512
_FIELDS = ("input_ids", "position_ids", "targets")


def read_part(
    data: Manifest | Features, num_blocks: int, *, rank: int, world_size: int, end_is_target: bool = True
) -> Batch:
    """Read a rank's part of the first `num_blocks` blocks (0: all) of a text or of its stored features.

    It is padded by blocks without valid targets, so that all ranks run the same number of micro-batches. `documents` (n, T)
    tells documents of all ranks apart.
    """
    manifest = data.text if isinstance(data, Features) else data

    def read_blocks(start: int, stop: int) -> Batch:
        arrays = read_range(manifest, start, stop)
        arrays["documents"] += arrays.pop("parts")[:, None] << 32
        if isinstance(data, Features):
            arrays = read_feature_range(data, start, stop) | {"documents": arrays["documents"]}
        return arrays if end_is_target else without_end(arrays, manifest)

    total = min(num_blocks or manifest.num_rows, manifest.num_rows)
    size = -(-total // world_size)
    start = min(rank * size, total)
    number = min(size, total - start)
    arrays = read_blocks(start, start + number) if number else read_blocks(0, 1)
    arrays = {name: np.concatenate([one[:number], *[one[:1]] * (size - number)]) for name, one in arrays.items()}
    arrays["targets"][number:] = IGNORE_INDEX
    return arrays


def to_tensors(arrays: Batch, device: torch.device) -> dict[str, Any]:
    """Convert the fields of blocks that the model reads into tensors; those of tokens are None with stored features."""
    tensors: dict[str, Any] = dict.fromkeys(_FIELDS)
    for name in {*_FIELDS, "hidden"} & arrays.keys():
        tensors[name] = to_device(arrays[name], device)
    if "hidden" in tensors and tensors["hidden"].dtype == torch.int16:
        tensors["hidden"] = tensors["hidden"].view(torch.bfloat16)  # the bits of which NumPy holds as int16
    return tensors


class LearnedSums:
    """Sums over the tokens of every document of what is known of them at constant τ and at the model's own.

    Documents are numbered in the order of their names over all ranks, all of which must create this object together.
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

    def add(self, at: int, targets: Tensor, output: Any) -> None:
        """Add the tokens of the micro-batch that starts at block `at`."""
        is_valid = targets != IGNORE_INDEX
        documents = torch.from_numpy(self._numbers[at : at + len(targets)])[is_valid.cpu()]
        values, target, *_ = output["profiles"]
        self.of_constants.add_profiles(Profiles(values.cpu(), target.cpu()), documents)
        tau, loss = (output[name][is_valid].double().cpu() for name in ("tau", "cross_entropy_tau"))
        self.learned.index_add_(1, documents, torch.stack([loss, tau * loss, tau]))

    def add_up(self, device: torch.device) -> None:
        sums = self.of_constants
        for values in (self.learned, sums.counts, sums.profiles.values, sums.profiles.target):
            total = values.to(device)
            dist.all_reduce(total)
            values.copy_(total)


def validate(
    forward: Callable[..., Sequence[CausalLMOutput]],
    arrays: Batch,
    losses: Sequence[TemperatureLossConfig],
    *,
    vocab_size: int,
    micro_batch_size: int,
    num_oracle_tokens: int,
    with_details: bool,
    device: torch.device,
) -> list[Tally]:
    """Run every model over this rank's part of the validation blocks (:func:`read_part`).

    All ranks must call this, in eval mode and without gradients, and then :meth:`Tally.scores` of the same models. `forward`
    returns the outputs of all models for a micro-batch; its arguments are those of `TemperatureCausalLM`, with one number of
    nodes for each model. The optimal temperature is computed for `num_oracle_tokens` of the tokens of all ranks.
    """
    oracle_rows = _spread_evenly(arrays["targets"] != IGNORE_INDEX, num_oracle_tokens, device)
    tallies = [Tally(loss, vocab_size, arrays, device, with_details=with_details) for loss in losses]
    num_nodes = [tally.num_nodes if with_details else 0 for tally in tallies]
    for at in range(0, len(arrays["targets"]), micro_batch_size):
        rows = slice(at, at + micro_batch_size)
        batch = to_tensors({name: value[rows] for name, value in arrays.items()}, device)
        options = {"with_statistics": True, "oracle_rows": oracle_rows[rows], "num_profile_nodes": num_nodes}
        for tally, output in zip(tallies, forward(**batch, num_targets=1.0, **options), strict=True):
            tally.add(at, batch["targets"], output)
    return tallies


class Tally:
    """What the validation has found of a model so far; the arguments are those of :func:`validate`."""

    def __init__(
        self, loss: TemperatureLossConfig, vocab_size: int, arrays: Batch, device: torch.device, *, with_details: bool
    ) -> None:
        self.loss, self.vocab_size, self.is_robust = loss, vocab_size, loss.kind.objective == "robust"
        self.num_nodes = num_nodes_down_to(loss.tau_min) if self.is_robust else NUM_NODES
        self.statistics = TemperatureStatistics.zeros(loss.tau_min, loss.tau_max, device)
        self.sums = LearnedSums(arrays, self.num_nodes) if with_details else None
        self.pairs: list[Tensor] = []
        self.passage: dict[str, list[Any]] | None = None

    def add(self, at: int, targets: Tensor, output: CausalLMOutput) -> None:
        tau, entropy = output["tau"], output["entropy"]
        assert entropy is not None
        assert output["statistics"] is not None
        self.statistics.sums += output["statistics"]
        self.pairs.append(torch.stack([tau.float(), entropy.float(), (targets != IGNORE_INDEX).float()]))
        if self.sums is not None:
            self.sums.add(at, targets, output)
            self.passage = self.passage or _passage(targets, output)

    def scores(self) -> tuple[dict[str, float], dict[str, Any] | None]:
        """Return the scores over the tokens of all ranks and, on rank 0 if they were requested, details for the report.

        These are the histogram of τ, a passage, the comparison with :func:`rivals`, and the objective that judges a TempNet,
        a prefix of the rivals' keys. All ranks must call this.
        """
        dist.all_reduce(self.statistics.sums)
        tau, entropy = _gather(torch.cat(self.pairs, dim=1))
        summary = self.statistics.summary() | {"tau_entropy_spearman": float(spearman(tau, entropy))}
        if self.sums is None:
            return summary, None
        self.sums.add_up(tau.device)
        if dist.get_rank() > 0:
            return summary, None
        figures = rivals(self.sums, tau, self.loss, self.vocab_size)
        if self.is_robust:
            figures["robust/oracle_loss"] = figures["robust/loss"] - summary["regret"]
            figures["oracle_tau_mean"] = summary["tau_oracle_mean"]
        objective = "robust" if self.is_robust else "cross_entropy"
        return summary, {
            "histogram": self.statistics.histogram.tolist(),
            "passage": self.passage,
            "rivals": figures,
            "judged_by": objective if self.loss.kind.temperature == "tempnet" else None,
        }


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
    """Return τ and entropy of the valid tokens of all ranks, (N,) each, from the parts (3, blocks, T) of equal size with τ,
    the entropy and whether the target is valid.
    """
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    tau, entropy, is_valid = torch.cat(parts, dim=1).flatten(1)
    return tau[is_valid > 0], entropy[is_valid > 0]


def rivals(sums: LearnedSums, tau: Tensor, config: TemperatureLossConfig, vocab_size: int) -> dict[str, float]:
    """Compare the model's τ with its rivals on the same tokens.

    The best constant of the cross-entropy is that of the headroom test, in the range of `tempnet.headroom.profile`; that of
    the robust loss lies within the bounds of its τ.

    Returns:
        The figures of :func:`tempnet.baselines.compare_sums` for the cross-entropy of logits/τ in nats per token
        (`cross_entropy/…`) and the training loss, if it is robust (`robust/…`); `cross_entropy/tau_one_loss`, `num_tokens`
        and `num_documents`.
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


def _passage(targets: Tensor, output: Any) -> dict[str, list[Any]]:
    """Return the first predicted tokens, each with the τ of its prediction, its entropies at τ = 1 and at τ, in nats, and the
    ids and probabilities at τ of the likeliest three tokens.
    """
    is_valid = targets != IGNORE_INDEX
    tau, entropy = (output[name][is_valid][:_NUM_PASSAGE_TOKENS] for name in ("tau", "entropy"))
    values, target, top, ids = (part[: len(tau)] for part in output["profiles"])
    partition, mean, _ = Profiles(values, target).partition(-tau.log())  # see `tempnet.headroom.profile`
    columns = {
        "token": targets[is_valid][: len(tau)],
        "tau": tau,
        "entropy": entropy,
        "entropy_tau": partition - mean,  # H = log Z − E[s]
        "likeliest": ids,
        "probability": (top / tau[:, None] - partition[:, None]).exp(),
    }
    return {name: found.tolist() for name, found in columns.items()}
