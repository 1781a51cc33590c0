"""Tests that runs on one frozen base, trained side by side, are the runs that they would be alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from jobs.engine.config import OptimizerSection, RunSection, WorkersSection
from jobs.engine.deepspeed_engine import make_optimizer
from jobs.tasks.base import DataReference, can_share_base
from jobs.tasks.language_model.config import (
    BlockValidationSection,
    DataSection,
    LanguageModelConfig,
    ModelSection,
    TemperatureSection,
)
from jobs.tasks.language_model.data import refer_to_base
from jobs.tasks.language_model.models import build_model
from jobs.tasks.language_model.task import SideBySideTask
from jobs.tasks.language_model.validation import ValidationPart, to_tensors, validate
from pipelines.stream import Batch
from pipelines.text.manifest import ArchiveEntry, Manifest, ShardEntry
from pipelines.text.packing import IGNORE_INDEX, PackingConfig
from pipelines.text.tokenization import load_tokenizer, train_bpe
from tempnet.loading import load_tempnet

LENGTH, NUM_STEPS, BATCH = 8, 6, 4


pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture
def configs(tmp_path: Path) -> list[LanguageModelConfig]:
    """Return runs that differ in ρ, rate, τ_max, shift, width, loss, decay and clipping."""
    tokenizer = train_bpe(["some words to make a vocabulary of"] * 20, 280)
    torch.manual_seed(0)
    model = GPT2Config(vocab_size=300, n_positions=32, n_embd=8, n_layer=2, n_head=2, eos_token_id=0)
    GPT2LMHeadModel(model).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    temperatures: list[dict[str, Any]] = [
        {}, {"rho": 2.0, "tau_max": 1.5}, {"input_shift": "mean", "hidden_size": 6}, {"loss": "ts_ce"},
    ]  # fmt: skip
    optimizers: list[dict[str, Any]] = [
        {}, {"learning_rate_tempnet": 0.03, "max_grad_norm": 1e-3}, {"weight_decay": 0.0, "beta2": 0.9}, {"decay": "linear"},
    ]  # fmt: skip
    return [
        LanguageModelConfig(
            run=RunSection(name=f"run-{number}", storage=str(tmp_path), num_steps=NUM_STEPS),
            data=DataSection(train="unused", validation="unused", context_length=LENGTH),
            model=ModelSection(path=str(tmp_path / "model")),
            temperature=TemperatureSection(**{"rho": 1.0, "hidden_size": 4, "num_prototypes": 3, **temperature}),
            optimizer=OptimizerSection(
                **{"batch_size": BATCH, "micro_batch_size": 2, "learning_rate_tempnet": 0.01, **optimizer}
            ),
            workers=WorkersSection(precision="fp32", zero_stage=0),
            validation=BlockValidationSection(every=100),
        )
        for number, (temperature, optimizer) in enumerate(zip(temperatures, optimizers, strict=True))
    ]


def make_batch(step: int) -> Batch:
    generator = np.random.default_rng(step)
    batch = {
        "input_ids": generator.integers(1, 250, (BATCH, LENGTH)),
        "position_ids": np.tile(np.arange(LENGTH), (BATCH, 1)),
        "targets": generator.integers(1, 250, (BATCH, LENGTH)),
        "documents": np.repeat(np.arange(BATCH), LENGTH).reshape(BATCH, LENGTH),
    }
    batch["targets"][:, step % LENGTH] = IGNORE_INDEX
    return batch


class EmptyText(Manifest):
    """A text with a shard that no test reads."""


def make_task(configs: list[LanguageModelConfig], monkeypatch: pytest.MonkeyPatch) -> SideBySideTask:
    tokenizer = load_tokenizer(configs[0].tokenizer)
    shard = ShardEntry(file="", archive="", num_rows=8, num_tokens=0, digest="")
    archive = ArchiveEntry(path="", num_bytes=0, num_documents=0, problems={}, examples=[], shards=[shard])
    layout = PackingConfig.for_tokenizer(tokenizer, LENGTH)
    text = EmptyText(directory="/", tokenizer_digest="", layout=layout, archives=[archive])
    monkeypatch.setattr(
        ValidationPart, "read", lambda *_, **__: ValidationPart(arrays=make_batch(100), num_blocks=BATCH)
    )
    names = [config.run.name for config in configs]
    data = DataReference(train=text, validation=text, base=refer_to_base(configs[0]))
    task = SideBySideTask(configs[0], data, 0, 1, names=names, configs=configs)
    task.build(is_fresh=True)
    return task


def count(batch: Batch) -> int:
    return int((batch["targets"] != IGNORE_INDEX).sum())


def train_alone(config: LanguageModelConfig) -> tuple[Any, list[float]]:
    """Train one run by autograd and PyTorch's own optimizer; return its module and its losses."""
    module = build_model(config, load_tokenizer(config.tokenizer))
    assert module.tempnet is not None
    parameters = list(module.tempnet.parameters())
    group = {"name": "tempnet", "parameters": parameters, "learning_rate": config.optimizer.learning_rate_tempnet}
    optimizer, scheduler = make_optimizer([group], config)
    losses = []
    for step in range(NUM_STEPS):
        batch = make_batch(step)
        loss = module(**to_tensors(batch, torch.device("cpu")), num_targets=count(batch))["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, config.optimizer.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return module, losses


def test_each_run_is_as_if_it_were_alone(
    configs: list[LanguageModelConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    task = make_task(configs, monkeypatch)
    engine = task.start_engine()
    losses = []
    for step in range(NUM_STEPS):
        batch = make_batch(step)
        if step == 3:  # a checkpoint in between changes nothing
            engine.save_checkpoint(str(tmp_path), tag="kept")
            for network in engine.networks:
                for parameter in network.parameters():
                    parameter.data.zero_()
            engine.load_checkpoint(str(tmp_path), tag="kept")
        result = task.train_step(engine, batch, step=step, num_units=count(batch), with_statistics=step == 0)
        losses.append(result.loss.tolist())
        statistics = task.take_statistics()
        assert (statistics is not None) == (step == 0)
    for number, config in enumerate(configs):
        module, alone = train_alone(config)
        assert [row[number] for row in losses] == pytest.approx(alone, rel=1e-5)
        for name, value in module.tempnet.state_dict().items():
            torch.testing.assert_close(engine.networks[number].state_dict()[name], value, rtol=1e-4, atol=1e-5)
        engine.eval()
        module.eval()
        with torch.no_grad():
            ours, details = task.validate_member(number, with_details=True)
            (tally,) = validate(
                lambda num_profile_nodes, module=module, **batch: [
                    module(**batch, num_profile_nodes=num_profile_nodes[0])
                ],
                ValidationPart(arrays=make_batch(100), num_blocks=BATCH),
                [module.loss_config],
                vocab_size=module.vocab_size,
                micro_batch_size=2,
                num_oracle_tokens=config.validation.num_oracle_tokens,
                with_details=True,
                device=torch.device("cpu"),
            )
            theirs, of_theirs = tally.scores()
        assert ours == pytest.approx(theirs, rel=1e-4, nan_ok=True)
        assert details is not None
        assert of_theirs is not None
        assert details["rivals"] == pytest.approx(of_theirs["rivals"], rel=1e-4, abs=1e-6)
        task.export_member(number)
        engine.train()
        exported = load_tempnet(config.run.export_directory).state_dict()
        assert all(torch.equal(exported[name], value) for name, value in engine.networks[number].state_dict().items())


def test_runs_with_other_data_or_batches_do_not_share_a_base(configs: list[LanguageModelConfig]) -> None:
    assert can_share_base(configs)
    first = configs[0]
    for other in (
        replace(first, run=replace(first.run, seed=1)),
        replace(first, run=replace(first.run, num_steps=7)),
        replace(first, optimizer=replace(first.optimizer, batch_size=8)),
        replace(first, data=replace(first.data, context_length=4)),
        replace(first, temperature=replace(first.temperature, transform=False)),
        replace(first, workers=replace(first.workers, precision="bf16")),
    ):
        assert not can_share_base([first, other])
