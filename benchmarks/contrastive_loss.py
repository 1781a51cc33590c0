"""Time and memory of the contrastive losses, forward and backward from embeddings, beside dense implementations.

    .venv/bin/python -m benchmarks.contrastive_loss [--batch-size 512 8192] [--loss tempnet clip] [--num-rounds 5]

The `dense` forms hold matrices of B × B and let autograd differentiate, as the public implementations do; they mask
only the diagonal. The form `ours` is `tempnet.contrastive.losses`, masks and state included. NT-Xent, the loss of
sentences (`tempnet.contrastive.unimodal`), stands beside pytorch-metric-learning. Memory is the growth of the peak
resident size over that at the start of the step, with each form in its own process.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

from benchmarks.measure import (
    RETURN_FREED_MEMORY,
    in_new_process,
    measure_peak_growth,
    print_setting,
    print_table,
    ratios,
    spread,
)
from jobs.studies.reproduction.direct import time_in_turn
from tempnet import TempNet, TempNetConfig
from tempnet.contrastive.config import ContrastiveLossConfig
from tempnet.contrastive.losses import ContrastiveLoss
from tempnet.contrastive.state import SampleState
from tempnet.contrastive.unimodal import UnimodalLoss

NAMES = ("clip", "cyclip", "sogclr", "isogclr", "tempnet", "temperature_free")
GAMMA = 0.8
NT_XENT_TAU, NUM_SENTENCE_FEATURES = 0.05, 768


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The sizes, and what to measure."""

    batch_size: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    """Batch sizes B; one table is printed for each."""
    embedding_size: int = 256
    loss: tuple[str, ...] = NAMES
    tile_size: int = 512
    num_threads: int = 2
    num_rounds: int = 5
    library_pairs: tuple[int, ...] = (64, 128)
    """Numbers of pairs of NT-Xent; pytorch-metric-learning holds a row for every pair, and takes many GB at 512."""


class DenseLoss:
    """One loss computed on whole matrices. Only the diagonal is masked, since all ids are assumed to be different."""

    def __init__(self, config: ContrastiveLossConfig, networks: list[TempNet], num_samples: int) -> None:
        self.config, self.networks = config, networks
        self.log_tau = torch.tensor(math.log(config.tau), requires_grad=True)
        self.log_u = torch.full((2, num_samples), -math.inf)
        self.tau = torch.full((2, num_samples), config.tau)
        self.momentum = torch.zeros(2, num_samples)

    def __call__(self, image: Tensor, text: Tensor, ids: Tensor) -> Tensor:
        similarity = image @ text.T
        if self.config.kind.normaliser == "global":
            return (self.robust(0, similarity, image, ids) + self.robust(1, similarity.T, text, ids)) / 2
        if self.config.kind.temperature == "free":
            logits = 2 * similarity.clamp(-1 + 1e-6, 1 - 1e-6).atanh()
        else:
            logits = similarity / self.log_tau.exp()
        targets = torch.arange(len(ids))
        loss = (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2
        if self.config.kind.is_cyclic:
            in_modal = (image @ image.T - text @ text.T).square().sum()
            cross_modal = (similarity - similarity.T).square().sum()
            loss = loss + 0.25 * (in_modal + cross_modal) / len(ids)
        return loss

    def robust(self, modality: int, similarity: Tensor, anchors: Tensor, ids: Tensor) -> Tensor:
        """Return one side of the global losses: images against texts for modality 0, texts against images for 1."""
        name, num_negatives = self.config.name, len(ids) - 1
        rho = self.config.rho if self.config.kind.uses_rho else 0.0
        tau = self.networks[modality](anchors) if name == "tempnet" else self.tau[modality, ids]
        h = similarity - similarity.diagonal()[:, None]
        with torch.no_grad():
            scaled = (h / tau[:, None]).fill_diagonal_(-math.inf)
            log_g = scaled.logsumexp(1) - math.log(num_negatives)
            old = self.log_u[modality, ids]
            moved = torch.logaddexp(math.log1p(-GAMMA) + old, math.log(GAMMA) + log_g)
            log_u = torch.where(torch.isneginf(old), log_g, moved)
            weights = (scaled - log_u[:, None]).exp() / num_negatives
            self.log_u[modality, ids] = log_u
        loss = (weights * h).sum(1)
        dual = log_u + rho - loss.detach() / tau.detach()
        if name == "isogclr":
            momentum = 0.5 * self.momentum[modality, ids] + 0.5 * dual.clamp(-5, 5)
            self.momentum[modality, ids] = momentum
            self.tau[modality, ids] = (tau - self.config.tau_step * momentum).clamp(
                self.config.tau_min, self.config.tau_max
            )
        return (loss + tau * dual).mean() if name == "tempnet" else loss.mean()


def make_step(name: str, form: str, arguments: Arguments, batch_size: int) -> Callable[[], None]:
    """Return a function that does one forward and backward pass from unit rows."""
    torch.manual_seed(0)
    size = arguments.embedding_size
    image = F.normalize(torch.randn(batch_size, size), dim=-1)
    text = F.normalize(image + F.normalize(torch.randn(batch_size, size), dim=-1), dim=-1)
    leaves = [image.requires_grad_(), text.requires_grad_()]
    ids = torch.randperm(2 * batch_size)[:batch_size]
    config = ContrastiveLossConfig.for_name(name, rho=4.0, tile_size=arguments.tile_size)
    networks = []
    if config.kind.temperature == "tempnet":
        networks = [TempNet(TempNetConfig.for_embeddings(size, rho=4.0)) for _ in range(2)]
        leaves += [parameter for network in networks for parameter in network.parameters()]
    dense = DenseLoss(config, networks, 2 * batch_size)
    leaves.append(dense.log_tau)
    state = SampleState(2 * batch_size, config.state_columns) if config.state_columns else None
    image_tempnet, text_tempnet = networks or (None, None)
    ours = ContrastiveLoss(config, image_tempnet=image_tempnet, text_tempnet=text_tempnet, state=state)

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        loss = dense(image, text, ids) if form == "dense" else ours(image, text, ids, ids, gamma=GAMMA)["loss"]
        loss.backward()

    return run


def make_library_step(form: str, arguments: Arguments, num_pairs: int) -> Callable[[], None]:
    """Return a step of NT-Xent between anchors and positives: by `UnimodalLoss`, or by pytorch-metric-learning."""
    from pytorch_metric_learning.losses import NTXentLoss

    torch.manual_seed(0)
    draws = [torch.randn(num_pairs, NUM_SENTENCE_FEATURES) for _ in range(2)]
    anchors, positives = (F.normalize(rows, dim=-1).requires_grad_() for rows in draws)
    ids, library = torch.arange(num_pairs), NTXentLoss(temperature=NT_XENT_TAU)
    ours = UnimodalLoss(ContrastiveLossConfig.for_name("clip_fixed", tau=NT_XENT_TAU))

    def run() -> None:
        anchors.grad = positives.grad = None
        if form == "ours":
            ours(anchors, positives, ids, gamma=1.0)["loss"].backward()
        else:
            library(torch.cat([anchors, positives]), ids.repeat(2)).backward()

    return run


def memory_of(make: Callable[..., Callable[[], None]], form: tuple[str, ...], arguments: Arguments, size: int) -> float:
    """Return the memory of one form in MiB."""
    torch.set_num_threads(arguments.num_threads)
    make(*form, arguments, 64)()  # so that the one-time initialisation of torch and its libraries is not measured
    return measure_peak_growth(make(*form, arguments, size))


def compare(
    make: Callable[..., Callable[[], None]], forms: Sequence[tuple[str, ...]], arguments: Arguments, size: int
) -> list[str]:
    """Return time and memory of the last of two forms beside those of the first, as cells of a table."""
    memory = [in_new_process(memory_of, make, form, arguments, size, environment=RETURN_FREED_MEMORY) for form in forms]
    cells = [*(f"{mib:.0f}" for mib in memory), f"{memory[-1] / memory[0]:.3f}"]
    steps = {form[-1]: make(*form, arguments, size) for form in forms}
    base, own = time_in_turn(steps, arguments.num_rounds).values()
    return [*(f"{statistics.median(values):.4f}" for values in (base, own)), spread(ratios(own, base)), *cells]


def main(arguments: Arguments) -> None:
    """Run the benchmark and print the results."""
    torch.set_num_threads(arguments.num_threads)
    print_setting(arguments, "torch", "pytorch-metric-learning")
    columns = ["base, s", "ours, s", "ours / base", "base, MiB", "ours, MiB", "ours / base"]
    for size in arguments.batch_size:
        rows = [
            [name, *compare(make_step, [(name, "dense"), (name, "ours")], arguments, size)] for name in arguments.loss
        ]
        print_table([f"B = {size}, base: dense", *columns], rows)
    rows = [
        [f"{size} pairs", *compare(make_library_step, [("library",), ("ours",)], arguments, size)]
        for size in arguments.library_pairs
    ]
    print_table(["NT-Xent, base: pytorch-metric-learning", *columns], rows)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
