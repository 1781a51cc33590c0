"""Time and memory of the contrastive losses, forward and backward from embeddings, beside dense implementations.

    .venv/bin/python -m benchmarks.contrastive_loss [--batch-size 512 8192] [--loss tempnet clip] [--num-rounds 5]

The `dense` forms hold matrices of B × B and let autograd differentiate, as the public implementations do; they mask
only the diagonal. The form `ours` is `tempnet.contrastive.losses`, masks and state included. Every round times each
form once, in turn; ratios are medians over rounds. Memory is the growth of the peak resident size over that at the
start of the step, with each form in its own process. Finally, it prints the size of the global losses' state on every
rank.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

from benchmarks.memory import measure_peak_growth
from tempnet import TempNet, TempNetConfig
from tempnet.contrastive.losses import ContrastiveLoss, ContrastiveLossConfig
from tempnet.contrastive.state import SampleState
from tempnet.contrastive.world import World

NAMES = ("clip", "cyclip", "sogclr", "isogclr", "tempnet", "temperature_free")
GAMMA = 0.8


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
    time: bool = True
    """Whether to measure time; off: memory only."""
    memory_of: tuple[str, str] | None = None
    """Internal: measure the memory of one loss and form in this process."""


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
    if form == "dense":
        dense = DenseLoss(config, networks, 2 * batch_size)
        leaves.append(dense.log_tau)

        def loss() -> Tensor:
            return dense(image, text, ids)
    else:
        state = SampleState(2 * batch_size, config.state_columns) if config.state_columns else None
        image_tempnet, text_tempnet = networks or (None, None)
        ours = ContrastiveLoss(config, image_tempnet=image_tempnet, text_tempnet=text_tempnet, state=state)

        def loss() -> Tensor:
            return ours(image, text, ids, ids, gamma=GAMMA)["loss"]

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        loss().backward()

    return run


def measure_memory(name: str, form: str, arguments: Arguments, batch_size: int) -> float:
    """Return the memory of one form in MiB, measured in its own process."""
    command = [sys.executable, "-m", "benchmarks.contrastive_loss", "--memory-of", name, form]
    command += ["--batch-size", str(batch_size)]
    for field in ("embedding_size", "tile_size", "num_threads"):
        command += [f"--{field.replace('_', '-')}", str(getattr(arguments, field))]
    # This measures tensors only, not freed memory that malloc keeps: with a fixed threshold, it is returned to the
    # system at once.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout) / 1024


def print_table(arguments: Arguments, batch_size: int) -> None:
    """Measure one batch size and print its table."""
    print(
        f"\nB = {batch_size}\n{'':<18}{'dense s':>9}{'ours s':>9}{'ratio':>7}{'dense MiB':>11}{'ours MiB':>10}{'ratio':>7}"
    )
    for name in arguments.loss:
        seconds: dict[str, list[float]] = {"dense": [], "ours": []}
        if arguments.time:
            steps = {form: make_step(name, form, arguments, batch_size) for form in seconds}
            for number in range(arguments.num_rounds + 1):
                for form, step in steps.items():
                    started = time.perf_counter()
                    step()
                    if number:  # the first round warms up
                        seconds[form].append(time.perf_counter() - started)
            del steps, step
        memory = {form: measure_memory(name, form, arguments, batch_size) for form in seconds}
        times = f"{'':>25}"
        if arguments.time:
            ratio = statistics.median(a / b for a, b in zip(seconds["ours"], seconds["dense"], strict=True))
            times = (
                f"{statistics.median(seconds['dense']):>9.3f}{statistics.median(seconds['ours']):>9.3f}{ratio:>7.2f}"
            )
        print(
            f"{name:<18}{times}{memory['dense']:>11.0f}{memory['ours']:>10.0f}{memory['ours'] / memory['dense']:>7.3f}",
            flush=True,
        )


def print_state() -> None:
    """Print the size of the per-sample state on every rank, for the losses that have one."""
    print(f"\nState per rank, MB\n{'':<18}{'samples':>12}{'W = 1':>9}{'W = 8':>9}")
    for name in ("sogclr", "tempnet", "isogclr", "sogclr_given"):
        columns = ContrastiveLossConfig.for_name(name).state_columns
        for num_samples in (2_900_000, 12_000_000):
            worlds = World(0, 1), World(0, 8)
            sizes = [SampleState(num_samples, columns, world=world).bytes_per_rank / 1e6 for world in worlds]
            print(f"{name:<18}{num_samples:>12,}{sizes[0]:>9.1f}{sizes[1]:>9.1f}")


def main(arguments: Arguments) -> None:
    """Run the benchmark and print the results."""
    torch.set_num_threads(arguments.num_threads)
    if arguments.memory_of:
        # A small step runs first, so that the one-time initialisation of torch and its libraries is not measured.
        make_step(*arguments.memory_of, arguments, 64)()
        print(json.dumps(measure_peak_growth(make_step(*arguments.memory_of, arguments, arguments.batch_size[0]))))
        return
    print(
        f"d {arguments.embedding_size}, tiles of {arguments.tile_size}², float32, {arguments.num_threads} threads, "
        f"{arguments.num_rounds} rounds, torch {torch.__version__}"
    )
    for batch_size in arguments.batch_size:
        print_table(arguments, batch_size)
    print_state()


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
