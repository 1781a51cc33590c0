"""Speed of span sampling and of NT-Xent, the two parts of sentence training that can easily be slow.

    .venv/bin/python -m benchmarks.sentences [--num-pairs 512] [--library-pairs 64 128]

Spans are measured in documents per second on one core, with and without gathering their tokens in batches. NT-Xent is
measured forward and backward from embeddings, for `UnimodalLoss` and for pytorch-metric-learning. The library holds a
row for every (anchor, positive) pair, so it is run with smaller numbers of pairs by default: at 512 it takes many GB.
Memory is the growth of the peak resident size over that at the start of the step, with each form in its own process.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytorch_metric_learning
import torch
import torch.nn.functional as F
import tyro
from pytorch_metric_learning.losses import NTXentLoss

from benchmarks.memory import measure_peak_growth
from pipelines.sentences.spans import SpanConfig, gather_spans, sample_spans
from tempnet.contrastive.config import ContrastiveLossConfig
from tempnet.contrastive.unimodal import UnimodalLoss

TAU = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The sizes, and the number of rounds."""

    num_tokens: int = 4096
    """Number of tokens per document."""
    num_documents: int = 16_384
    batch_size: int = 16
    """Number of documents whose spans are gathered at a time."""
    num_pairs: int = 512
    """Number of pairs for our NT-Xent loss alone."""
    library_pairs: tuple[int, ...] = (64, 128)
    """Numbers of pairs with which both forms are compared."""
    embedding_size: int = 768
    num_threads: int = 1
    num_rounds: int = 5
    memory_of: tuple[str, int] | None = None
    """Internal: measure the memory of one form and number of pairs in this process."""


def measure_spans(arguments: Arguments) -> tuple[float, float]:
    """Return documents per second: for the spans alone, and with their tokens gathered."""
    config = SpanConfig()
    lengths = np.full(arguments.num_documents, arguments.num_tokens)
    keys = np.arange(arguments.num_documents)
    started = time.perf_counter()
    sample_spans(lengths, keys, seed=0, epoch=0, config=config)
    alone = arguments.num_documents / (time.perf_counter() - started)

    size = arguments.batch_size
    tokens = np.random.default_rng(0).integers(50_000, size=size * arguments.num_tokens, dtype=np.uint16)
    first = np.arange(size) * arguments.num_tokens
    started = time.perf_counter()
    for at in range(0, arguments.num_documents, size):
        spans = sample_spans(lengths[at : at + size], keys[at : at + size], seed=0, epoch=0, config=config)
        of_batch = first[: len(spans.anchor_start)]
        gather_spans(tokens, spans.anchor_start + of_batch[:, None], spans.anchor_length, pad_id=0)
        gather_spans(tokens, spans.positive_start + of_batch[:, None, None], spans.positive_length, pad_id=0)
    return alone, arguments.num_documents / (time.perf_counter() - started)


def make_step(form: str, num_pairs: int, arguments: Arguments) -> Callable[[], None]:
    """Return a function that does one forward and backward pass from unit rows."""
    torch.manual_seed(0)
    anchors = F.normalize(torch.randn(num_pairs, arguments.embedding_size), dim=-1).requires_grad_()
    positives = F.normalize(torch.randn(num_pairs, arguments.embedding_size), dim=-1).requires_grad_()
    ids = torch.arange(num_pairs)
    library = NTXentLoss(temperature=TAU)
    ours = UnimodalLoss(ContrastiveLossConfig.for_name("clip_fixed", tau=TAU))

    def step() -> None:
        anchors.grad = positives.grad = None
        if form == "ours":
            ours(anchors, positives, ids, gamma=1.0)["loss"].backward()
        else:
            library(torch.cat([anchors, positives]), ids.repeat(2)).backward()

    return step


def measure_memory(form: str, num_pairs: int, arguments: Arguments) -> float:
    """Return the memory of one form in MiB, measured in its own process."""
    command = [sys.executable, "-m", "benchmarks.sentences", "--memory-of", form, str(num_pairs)]
    command += ["--embedding-size", str(arguments.embedding_size), "--num-threads", str(arguments.num_threads)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1]) / 1024


def print_loss(num_pairs: int, forms: tuple[str, ...], arguments: Arguments) -> None:
    """Measure and print a row for every form; ratios are taken within a round."""
    seconds: dict[str, list[float]] = {form: [] for form in forms}
    steps = {form: make_step(form, num_pairs, arguments) for form in forms}
    for number in range(arguments.num_rounds + 1):
        for form, step in steps.items():
            started = time.perf_counter()
            step()
            if number:  # the first round warms up
                seconds[form].append(time.perf_counter() - started)
    for form, values in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(values, seconds["ours"], strict=True))
        memory = measure_memory(form, num_pairs, arguments)
        print(
            f"NT-Xent, {num_pairs:>4} pairs  {form:<26}{statistics.median(values):>9.4f} s{ratio:>9.1f} × ours"
            f"{memory:>9.0f} MiB",
            flush=True,
        )


def main(arguments: Arguments) -> None:
    """Run the benchmark and print the results."""
    torch.set_num_threads(arguments.num_threads)
    if arguments.memory_of:
        form, num_pairs = arguments.memory_of
        # so that the one-time initialisation of torch and its libraries is not measured
        make_step(form, 8, arguments)()
        print(json.dumps(measure_peak_growth(make_step(form, num_pairs, arguments))))
        return
    print(
        f"d {arguments.embedding_size}, float32, {arguments.num_threads} threads, {arguments.num_rounds} rounds, torch "
        f"{torch.__version__}, pytorch-metric-learning {pytorch_metric_learning.__version__}, numpy {np.__version__}"
    )
    alone, gathered = measure_spans(arguments)
    print(f"spans of documents of {arguments.num_tokens} tokens  {alone:,.0f} documents/s, with tokens {gathered:,.0f}")
    for num_pairs in arguments.library_pairs:
        print_loss(num_pairs, ("ours", "pytorch-metric-learning"), arguments)
    print_loss(arguments.num_pairs, ("ours",), arguments)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
