"""Does the headroom test say in advance what a trained head gains? On the worlds of `benchmarks.miscalibrated`.

    .venv/bin/python -m benchmarks.headroom --worlds worlds

In every world the headroom test runs as `jobs.calibrate headroom` does, without Ray. Then heads are trained on every second
document and judged on the others, and the other way round:

    logits    a TempNet that reads the logits as in the papers, by the proper score
    hidden    a TempNet that reads the hidden state, without the L2 norm and with the linear pooling, by the proper score
    both      a TempNet with the linear pooling that reads logits and hidden state, both normalised, by the proper score
    dro       the first TempNet by the robust loss, for the mean entropy of the training tokens
    mlp       a network of one hidden layer on the features of the test (scalars and hidden state), by cross-entropy

Figures are gains over the best constant temperature of the training half in thousandths of a nat per token, with 95 %
intervals over documents, and the expected calibration error in per cent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from torch import Tensor, nn

from benchmarks.measure import print_table
from benchmarks.miscalibrated import WORLDS
from jobs.scoring.headroom.config import Headroom
from jobs.scoring.headroom.job import milli
from jobs.scoring.headroom.texts import Measurer, resolve_settings
from jobs.scoring.text_parts import token_arrays, tokenise
from pipelines.archives import list_archives
from pipelines.text.reading import readable_documents
from pipelines.text.tokenization import load_tokenizer
from tempnet import TempNet, TempNetConfig
from tempnet.headroom.features import FEATURE_SETS, Moments, Tokens
from tempnet.headroom.gains import DocumentSums
from tempnet.headroom.profile import Profiles, clamp_log_beta
from tempnet.headroom.run import CONSTANT, HeadroomTest, run_headroom_test
from tempnet.models.output_head import output_weight
from tempnet.softmax.config import TemperatureLossConfig
from tempnet.softmax.linear import linear_language_model_loss

HEADS = ("logits", "hidden", "both", "dro", "mlp")
_BATCH_SIZE = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Worlds and sizes."""

    worlds: tuple[str, ...]
    """Directories that `benchmarks.miscalibrated` has written, one per seed."""
    kinds: tuple[str, ...] = WORLDS
    """Kinds of worlds to measure."""
    heads: tuple[str, ...] = HEADS
    """Heads to train."""
    num_tokens: int = 60_000
    """Largest number of tokens of a world."""
    tokens_per_document: int = 256
    """Number of tokens of a document that are used, from its beginning."""
    num_steps: int = 250
    """Number of steps of training a head."""
    rate: float = 3e-3
    """Learning rate of a head at the first step; it falls to 0 linearly."""


@dataclass(frozen=True, slots=True)
class World:
    """A world's tokens, measured with its model."""

    tokens: Tokens
    targets: Tensor
    documents: Tensor
    weight: Tensor

    def part(self, rows: Tensor) -> Tokens:
        """Return some of the tokens."""
        profiles = Profiles(self.tokens.profiles.values[rows].double(), self.tokens.profiles.target[rows].double())
        return Tokens(profiles, self.tokens.margin[rows], self.tokens.maximum[rows], self.tokens.hidden[rows])


def measure(directory: Path, job: Arguments) -> World:
    """Measure the tokens of a world."""
    text, model = str(directory / "text.jsonl"), str(directory / "model")
    settings, _ = resolve_settings(Headroom(model=model, text=text))
    (archive,) = list_archives(text)
    documents = list(readable_documents(text, archive, "text", Counter(), []))
    ids = [
        values[: job.tokens_per_document]
        for values in token_arrays(tokenise(documents, load_tokenizer(model))["token_ids"])
    ]
    ids = ids[: 1 + int(np.searchsorted(np.cumsum([len(values) for values in ids]), job.num_tokens))]
    measurer = Measurer(settings)
    tokens = measurer.measure(ids)
    places = np.repeat(np.arange(len(ids)), [len(values) for values in ids])
    targets = torch.from_numpy(np.concatenate(ids).astype(np.int64))
    weight, _ = output_weight(measurer._base)
    return World(tokens, targets, torch.from_numpy(places), weight.detach().float())


def run_test(world: World, num_documents: int) -> HeadroomTest:
    """Run the headroom test on a world."""
    rows = torch.arange(len(world.targets)).split(4096)
    return run_headroom_test(
        lambda: ((world.part(part), world.documents[part]) for part in rows), num_documents, num_folds=5
    )


def train_tempnet(world: World, rows: Tensor, job: Arguments, *, head: str, seed: int) -> Callable[[Tensor], Tensor]:
    """Train a TempNet on some tokens, and return the function from tokens to u = log β."""
    torch.manual_seed(seed)
    vocab_size, state_size = world.weight.shape
    log_partition, mean, _ = world.part(rows).profiles.partition(0.0)
    rho = math.log(vocab_size) - (log_partition - mean).mean().item() if head == "dro" else 0.0
    if head in ("logits", "dro"):
        network = TempNet(TempNetConfig.for_logits(vocab_size, rho=rho, input_shift="mean"))
    else:
        both = head == "both"  # logits without the L2 norm would saturate the first layer
        changes: dict[str, Any] = {"rho": rho, "normalize_input": both, "pooling": "linear"}
        network = TempNet(TempNetConfig.for_hidden(vocab_size, state_size, with_logits=both, **changes))
    config = TemperatureLossConfig(name="dro" if head == "dro" else "proper", rho=rho)

    def step(chosen: Tensor) -> Tensor:
        return linear_language_model_loss(
            world.tokens.hidden[chosen], world.weight, world.targets[chosen], config, network
        ).loss

    optimise(network, step, rows, num_steps=job.num_steps, rate=job.rate)

    @torch.no_grad()
    def predict(chosen: Tensor) -> Tensor:
        hidden = (world.tokens.hidden[part] for part in chosen.split(_BATCH_SIZE))
        return torch.cat([-network(state @ world.weight.T, state).double().log() for state in hidden])

    return predict


def train_mlp(world: World, rows: Tensor, job: Arguments, *, seed: int) -> Callable[[Tensor], Tensor]:
    """Train a small network on the test's features, by the exact derivative of the cross-entropy from the profiles."""
    torch.manual_seed(seed)
    level = world.part(rows).profiles.best_constant()
    moments = Moments(level)
    moments.add(world.part(rows))
    design = moments.design()
    size = len(design.columns("both"))
    last = nn.Linear(64, 1)
    nn.init.zeros_(last.weight)
    nn.init.constant_(last.bias, level)
    network = nn.Sequential(nn.Linear(size, 64), nn.GELU(), last).double()

    def step(chosen: Tensor) -> Tensor:
        tokens = world.part(chosen)
        u = clamp_log_beta(network(design.features(tokens)).squeeze(-1))
        g, _ = tokens.profiles.score(u.detach())
        return -(g * u).mean()  # Its gradient is that of the cross-entropy.

    optimise(network, step, rows, num_steps=job.num_steps, rate=job.rate)

    @torch.no_grad()
    def predict(chosen: Tensor) -> Tensor:
        return network(design.features(world.part(chosen))).squeeze(-1)

    return predict


def optimise(
    network: nn.Module, step: Callable[[Tensor], Tensor], rows: Tensor, *, num_steps: int, rate: float
) -> None:
    """Minimise a loss of batches of tokens with AdamW, whose rate falls to 0 linearly."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1 - number / num_steps)
    for _ in range(num_steps):
        loss = step(rows[torch.randint(len(rows), (_BATCH_SIZE,))])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def judge_heads(world: World, num_documents: int, job: Arguments) -> DocumentSums:
    """Train every head on one half of the documents, and judge it on the other, both ways."""
    sums = DocumentSums(num_documents)
    for half in range(2):
        train, test = ((world.documents % 2 == side).nonzero().squeeze(-1) for side in (half, 1 - half))
        tokens, documents = world.part(test), world.documents[test]
        sums.add_profiles(tokens.profiles, documents)
        constant = world.part(train).profiles.best_constant()
        sums.add(CONSTANT, tokens.profiles, documents, torch.full((len(test),), constant, dtype=torch.float64))
        for head in job.heads:
            predict = (
                train_mlp(world, train, job, seed=half)
                if head == "mlp"
                else train_tempnet(world, train, job, head=head, seed=half)
            )
            sums.add(head, tokens.profiles, documents, predict(test))
    for head in job.heads:
        sums.add_constant(f"{head}/mean", sums.mean_tau(head))
    return sums


def main(job: Arguments) -> None:
    """Print a row for every world and seed."""
    titles = [
        "world", *(f"test: {name}" for name in FEATURE_SETS), "score test: both", *job.heads,
        *(f"{head}, MeanShift" for head in job.heads), "ECE: constant", *(f"ECE: {head}" for head in job.heads),
    ]  # fmt: skip
    rows = []
    for directory in job.worlds:
        for name in job.kinds:
            world = measure(Path(directory) / name, job)
            num_documents = int(world.documents.max()) + 1
            test = run_test(world, num_documents)
            sums = judge_heads(world, num_documents, job)
            second = test.sums.second_order["both"].sum().item() / len(world.targets)
            # On a calibrated model the question is whether a very small interval holds 0.
            of_test = [test.sums.gain(features, CONSTANT) for features in FEATURE_SETS]
            row = [f"{name}, {Path(directory).name}"]
            row += [f"{1000 * gain.mean:.3f} ± {1000 * gain.half_width:.3f}" for gain in of_test]
            row += [f"{1000 * second:.1f}", *(milli(sums.gain(head, CONSTANT)) for head in job.heads)]
            row += [f"{1000 * sums.gain(f'{head}/mean', CONSTANT).mean:.1f}" for head in job.heads]
            row += [f"{100 * sums.calibration_error(head).mean:.2f}" for head in (CONSTANT, *job.heads)]
            print(" | ".join(row), flush=True)
            rows.append(row)
    print_table(titles, rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(tyro.cli(Arguments, description=__doc__))
