"""docs/extend.md followed: what the page tells a reader to write is written here, and the rest of the program takes it."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from readme_support import write_task

from jobs.tasks.dual_encoder.config import PairTemperatureSection
from jobs.tasks.language_model.config import TemperatureSection
from pipelines.plan import StreamPlan
from pipelines.stream import Batch, RankStream
from tempnet.contrastive import config as contrastive
from tempnet.contrastive.config import ContrastiveLossConfig
from tempnet.contrastive.losses import ContrastiveLoss
from tempnet.contrastive.state import SampleState
from tempnet.oracle import optimal_temperature
from tempnet.softmax import config as softmax_config
from tempnet.softmax import reference
from tempnet.softmax.config import TemperatureLossConfig
from tempnet.softmax.linear import linear_language_model_loss
from tempnet.softmax.reference import language_model_loss

ROOT = Path(__file__).parents[1]


def test_a_language_model_loss_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cross-entropy at the oracle's temperature, which no loss of the table is."""
    monkeypatch.setitem(softmax_config.LOSS_KINDS, "oracle_ce", softmax_config.LossKind("oracle", "cross_entropy"))
    assert TemperatureSection(loss="oracle_ce", rho=1.0).has_free_tau
    config = TemperatureLossConfig(name="oracle_ce", rho=1.0)

    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, 5, generator=generator, dtype=torch.float64) for shape in ((14,), (11,)))
    targets = torch.randint(11, (14,), generator=generator)
    targets[3] = reference.IGNORE_INDEX
    inputs = hidden.requires_grad_(), weight.requires_grad_()

    tau = optimal_temperature((hidden @ weight.T).detach(), rho=1.0, tau_min=config.tau_min, tau_max=config.tau_max)
    plain = F.cross_entropy(hidden @ weight.T / tau[:, None], targets, ignore_index=reference.IGNORE_INDEX)
    of_reference, _ = language_model_loss(hidden @ weight.T, targets, config)
    chunked = linear_language_model_loss(hidden, weight, targets, config, chunk_size=4)
    torch.testing.assert_close(chunked.tau, tau)
    for loss in (of_reference, chunked.loss):
        torch.testing.assert_close(loss, plain)
        for gradient, expected in zip(
            torch.autograd.grad(loss, inputs, retain_graph=True),
            torch.autograd.grad(plain, inputs, retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(gradient, expected)


def test_a_contrastive_loss_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logarithm of the normaliser over all data at a fixed temperature, which no loss of the table is."""
    monkeypatch.setitem(contrastive.LOSS_KINDS, "log_u", contrastive.LossKind("fixed", "global", is_unscaled=True))
    assert not PairTemperatureSection(loss="log_u").has_free_tau
    config = ContrastiveLossConfig.for_name("log_u", tau=0.2, tile_size=4)
    ids = torch.tensor([5, 0, 7, 3, 9, 4])
    loss = ContrastiveLoss(config, state=SampleState(10, config.state_columns)).double()

    generator = torch.Generator().manual_seed(0)
    image, text = F.normalize(torch.randn(2, len(ids), 8, generator=generator, dtype=torch.float64), dim=-1)
    inputs = image.requires_grad_(), text.requires_grad_()
    # On the first visit of every sample u is the mean over the batch's negatives, so that plain autograd is right.
    similarity = image @ text.T
    is_positive = torch.eye(len(ids), dtype=torch.bool)
    expected = torch.zeros((), dtype=torch.float64)
    for side in (similarity, similarity.T):
        scaled = (side - side.diag()[:, None]) / config.tau
        log_u = scaled.masked_fill(is_positive, -torch.inf).logsumexp(1) - math.log(len(ids) - 1)
        expected = expected + log_u.mean() / 2

    found = loss(image, text, ids, ids, gamma=0.8)
    torch.testing.assert_close(found["loss"], expected)
    for gradient, wanted in zip(
        torch.autograd.grad(found["loss"], inputs), torch.autograd.grad(expected, inputs), strict=True
    ):
        torch.testing.assert_close(gradient, wanted)
    assert loss.state is not None
    assert loss.state.columns["log_u"].isfinite().sum() == 2 * len(ids)


@dataclass(frozen=True)
class NoisyNumbers:
    """A source of items that are numbers, with noise drawn anew in every epoch."""

    seed: int

    def read(self, shards: np.ndarray, rows: np.ndarray, epoch: int) -> Batch:
        keys = [(self.seed, epoch, shard, row) for shard, row in zip(shards.tolist(), rows.tolist(), strict=True)]
        values = np.array([100 * key[2] + key[3] + np.random.default_rng(key).random() for key in keys])
        hashes = [hashlib.blake2b(value.tobytes(), digest_size=6).digest() for value in values]
        return {"value": values, "digest": np.array([int.from_bytes(one, "little") for one in hashes])}

    def name(self, shard: int, row: int) -> str:
        return f"shard {shard}, row {row}"


def test_a_source_is_two_methods() -> None:
    plan = StreamPlan(shard_sizes=(5, 0, 9, 3), seed=1, window_size=6)

    streams = [
        RankStream(
            source=NoisyNumbers(seed=3), plan=plan, batch_size=4, rank=rank, world_size=world_size, num_readers=0
        )
        for rank, world_size in ((0, 1), (0, 2), (1, 2))
    ]
    alone, *ranks = (list(stream.batches(0, 68)) for stream in streams)
    values = np.concatenate([batch["value"] for batch in alone])
    every = sorted(100 * shard + row for shard, size in enumerate(plan.shard_sizes) for row in range(size))
    epochs = [np.sort(values[at : at + 17]) for at in range(0, 68, 17)]
    assert all(np.floor(epoch).tolist() == every for epoch in epochs)
    assert not np.isin(epochs[0], epochs[1]).any()
    for whole, *parts in zip(alone, *ranks, strict=True):
        np.testing.assert_array_equal(np.concatenate([part["digest"] for part in parts]), whole["digest"])
    shard, row = divmod(int(alone[0]["value"][0]), 100)
    assert streams[0].names([0]) == [f"shard {shard}, row {row}"]


def run_in(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a Python module, with its arguments, in the directory that holds the page's task."""
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(ROOT), "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


# Only the rooms of the house may not import jobs/; a package beside them may. mypy stores what it knows of the house where
# `make types` does, so that it need not find it out again.
@pytest.mark.parametrize(
    "checker",
    [
        f"ruff check --no-cache --config src=['{ROOT}','.'] --ignore TID251 .",
        "ruff format --no-cache --check .",
        pytest.param(f"mypy --cache-dir={ROOT}/.mypy_cache --package line_classifier", marks=pytest.mark.long),
    ],
)
def test_the_files_of_a_task_have_the_style_of_the_house_and_types(tmp_path: Path, checker: str) -> None:
    write_task(tmp_path)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    checked = run_in(tmp_path, *checker.split())
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_command_of_a_task_explains_itself_and_refuses_what_is_wrong(tmp_path: Path) -> None:
    write_task(tmp_path)
    command = "line_classifier.train"
    told = run_in(tmp_path, command, "--help")
    assert told.returncode == 0
    assert f"usage: python -m {command} PRESET" in told.stdout
    assert "lines-small  Two classes of lines, on CPUs." in told.stdout
    for option, value, message in (
        ("--workers.precision", "bf16", "workers.precision = bf16 must be fp32"),
        ("--optimizer.micro-batch-size", "8", "optimizer.micro_batch_size = 8 must be 0"),
        ("--model.hidden-size", "0", "model.hidden_size = 0 must be positive"),
        ("--data.file", "nowhere.tsv", "data.file: [Errno 2] No such file or directory: 'nowhere.tsv'"),
    ):
        refused = run_in(tmp_path, command, "lines-small", option, value)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert refused.stderr.startswith(f"error: {message}")
        assert refused.stderr.count("\n") == 1
