"""Tests that runs on the same frozen towers, trained side by side, are the runs that they would be alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from frozen_towers_support import (
    NUM_STEPS,
    batches_of,
    from_features,
    make_data,
    make_frozen_config,
    prepare_pairs,
    store,
    train_alone,
)

from jobs.engine.checkpoint import SafeCheckpointEngine
from jobs.tasks.base import can_share_base
from jobs.tasks.dual_encoder.config import ClipConfig
from jobs.tasks.dual_encoder.task import ClipTask, SideBySideTask
from jobs.tasks.dual_encoder.validation import score
from tempnet.models.dual_encoder import load_pair_tempnets

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture
def configs(tmp_path: Path) -> list[ClipConfig]:
    """Return runs that differ in ρ, rate, γ, τ_max, sizes, loss, decay, clipping and the steering of ρ."""
    base = make_frozen_config(tmp_path)
    temperatures: list[dict[str, Any]] = [
        {}, {"rho": 2.0, "tau_max": 0.04, "gamma": 0.5}, {"hidden_size": 4, "num_prototypes": 3},
        {"loss": "tempnet_in_batch"}, {"loss": "tempnet_neuclip", "target_tau": 0.02},
    ]  # fmt: skip
    optimizers: list[dict[str, Any]] = [
        {}, {"learning_rate_tempnet": 0.03, "max_grad_norm": 1e-3}, {"weight_decay": 0.0, "beta2": 0.9},
        {"decay": "linear"}, {"warmup_share": 0.5},
    ]  # fmt: skip
    return [
        replace(
            base,
            run=replace(base.run, name=f"run-{number}"),
            temperature=replace(base.temperature, **temperature),
            optimizer=replace(base.optimizer, **optimizer),
        )
        for number, (temperature, optimizer) in enumerate(zip(temperatures, optimizers, strict=True))
    ]


def reset(task: SideBySideTask, engine: Any) -> None:
    """Overwrite everything that a checkpoint of the task must restore."""
    for module in task.modules:
        for parameter in module.loss.parameters():
            parameter.data.zero_()
        if module.loss.state is not None:
            for column in module.loss.state.columns.values():
                column.zero_()


def train_together(task: SideBySideTask, directory: Path) -> list[list[float]]:
    """Train all members, with a checkpoint in the middle that is read again; return their losses in every step."""
    engine = task.start_engine()
    losses = []
    for step, batch in enumerate(batches_of(task)):
        if step == 4:
            engine.checkpoint_engine = SafeCheckpointEngine()
            engine.save_checkpoint(str(directory), tag="kept")
            task.save(directory)
            reset(task, engine)
            engine.load_checkpoint(str(directory), tag="kept")
            task.load(directory, 1)
        result = task.train_step(engine, batch, step=step, num_units=8, with_statistics=step == 0)
        losses.append(result.loss.tolist())
        statistics = task.take_statistics()
        assert (statistics is not None) == (step == 0)
        assert statistics is None or all(found.summary()["tau_mean"] > 0 for found in statistics)
    engine.eval()
    return losses


@pytest.mark.parametrize("with_features", [False, True], ids=["on towers", "on embeddings"])
def test_each_run_is_as_if_it_were_alone(configs: list[ClipConfig], with_features: bool, tmp_path: Path) -> None:
    assert can_share_base(configs)
    pairs = prepare_pairs(configs[0])
    on_towers = make_data(configs[0], pairs, None)
    data, members = on_towers, configs
    if with_features:
        stored = store(configs[0], pairs, "train"), store(configs[0], pairs, "validation")
        data = make_data(configs[0], pairs, stored)
        members = [replace(from_features(config), run=config.run) for config in configs]
    task = SideBySideTask(members[0], data, 0, 1, names=[config.run.name for config in configs], configs=members)
    task.build(is_fresh=True)
    (tmp_path / "checkpoint").mkdir()
    losses = train_together(task, tmp_path / "checkpoint")
    assert len(losses) == NUM_STEPS
    for number, config in enumerate(configs):
        alone = ClipTask(config, on_towers, 0, 1)
        alone.build(is_fresh=True)
        expected, _ = train_alone(alone)
        assert [row[number] for row in losses] == pytest.approx(expected, abs=1e-5, rel=0)
        module, other = task.modules[number], alone.module
        for name, value in other.loss.state_dict().items():
            torch.testing.assert_close(module.loss.state_dict()[name], value, rtol=1e-4, atol=1e-5)
        if other.loss.state is not None:
            assert module.loss.state is not None
            ours, theirs = (loss.state.columns["log_u"] for loss in (module.loss, other.loss))
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)
        alone.module.eval()
        with torch.no_grad():
            scores, details = task.validate_member(number, with_details=True)
            wanted, _ = score(other, alone.held_out(other, CPU), CPU, with_details=False)
        assert scores == pytest.approx(wanted | alone.steering.scores(), rel=1e-4, abs=1e-5)
        assert ("rho" in scores) == (config.temperature.target_tau is not None)
        assert details is not None
        task.export_member(number)
        exported = load_pair_tempnets(config.run.export_directory)[1].state_dict()
        assert module.loss.text_tempnet is not None
        assert all(torch.equal(exported[name], value) for name, value in module.loss.text_tempnet.state_dict().items())
