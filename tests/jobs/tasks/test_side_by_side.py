"""Runs whose networks train side by side on one frozen base are those that they would be alone, but for rounding."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from frozen_towers_support import make_frozen_config
from support import tiny_config
from transformers import GPT2Config, GPT2LMHeadModel

from jobs.engine.task import create_members
from jobs.engine.worker import WorkerJob, train_here
from tempnet.loading import load_tempnet
from tempnet.models.dual_encoder import load_pair_tempnets
from tests.local_training import Asking, Call, recording

NUM_STEPS, STOP = 50, 20
RUN = {"num_steps": NUM_STEPS, "log_every": 5, "checkpoint_every": 100}
# With a smaller epsilon, Adam would make full-sized steps of gradients that are only rounding errors.
OPTIMIZERS: list[dict[str, Any]] = [
    {"learning_rate_tempnet": 0.01}, {"learning_rate_tempnet": 0.03, "max_grad_norm": 1e-3},
    {"weight_decay": 0.0, "beta2": 0.9}, {"decay": "linear", "warmup_share": 0.5}, {"learning_rate_tempnet": 1e38},
]  # fmt: skip


def on_a_language_model(home: Path, corpus: Path, seed: int) -> tuple[Callable[..., Any], list[Any]]:
    """Return the plan and the configurations of runs that differ in ρ, rate, τ_max, width, loss and clipping."""
    from jobs.tasks.language_model.plan import make_plan

    torch.manual_seed(0)
    shape = GPT2Config(vocab_size=600, n_positions=64, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(shape).save_pretrained(home / "model")
    config = tiny_config(
        corpus, home, "lm", model={"path": str(home / "model"), "freeze": True}, workers={"num_workers": 1, "zero_stage": 1},
        temperature={"rho": 1.0, "target_entropy": None, "hidden_size": 8, "num_prototypes": 4},
        optimizer={"micro_batch_size": 4, "epsilon": 1e-4}, validation={"every": 25, "num_blocks": 8},
    )  # fmt: skip
    temperatures: list[dict[str, Any]] = [{}, {"rho": 2.0, "tau_max": 1.5}, {"hidden_size": 6}, {"loss": "ts_ce"}, {}]
    return make_plan, differing(config, temperatures, seed)


def on_towers(home: Path, corpus: Path, seed: int) -> tuple[Callable[..., Any], list[Any]]:
    """Return the plan and the configurations of runs that differ in ρ, rate, γ, τ_max, sizes, loss, clipping, steered ρ."""
    from jobs.tasks.dual_encoder.plan import make_plan

    config = make_frozen_config(home)
    config = replace(
        config, validation=replace(config.validation, every=25), data=replace(config.data, max_bad_share=0.1)
    )
    temperatures: list[dict[str, Any]] = [
        {}, {"rho": 2.0, "tau_max": 0.04, "gamma": 0.5}, {"hidden_size": 4, "num_prototypes": 3},
        {"loss": "tempnet_neuclip", "target_tau": 0.02}, {"loss": "tempnet_in_batch"},
    ]  # fmt: skip
    return make_plan, differing(config, temperatures, seed)


def differing(config: Any, temperatures: list[dict[str, Any]], seed: int) -> list[Any]:
    return [
        replace(
            config,
            run=replace(config.run, **RUN, name=f"run-{number}", seed=seed),
            temperature=replace(config.temperature, **temperature),
            optimizer=replace(config.optimizer, **optimizer),
            tracking=replace(config.tracking, enabled=False),
        )
        for number, (temperature, optimizer) in enumerate(zip(temperatures, OPTIMIZERS, strict=True))
    ]


def train(
    rank: int, world_size: int, make_plan: Callable[..., Any], configs: list[Any], file: Path, **settings: Any
) -> Any:
    """Train runs together, or one alone, in this process; write the losses of every step into a file."""
    prepared = [make_plan(config).prepare() for config in configs]
    create, config = partial(recording, prepared[0].create_task, str(file)), prepared[0].config
    if len(configs) > 1:
        config = replace(config, run=replace(config.run, name="group"))
        create = partial(create_members, create, [one.config for one in prepared], config)
    Path(config.run.directory).mkdir(parents=True, exist_ok=True)
    return train_here(WorkerJob(create_task=create, **settings), config)


def losses_of(file: Path) -> torch.Tensor:
    lines = Path(f"{file}-0").read_text().splitlines()
    return torch.tensor([loss for _, loss, _ in map(json.loads, lines)], dtype=torch.float64)


def networks_of(export: str) -> list[dict[str, torch.Tensor]]:
    try:
        return [load_tempnet(export).state_dict()]
    except (FileNotFoundError, ValueError):
        return [network.state_dict() for network in load_pair_tempnets(export)]


@pytest.mark.parametrize(("case", "seed"), [(on_a_language_model, 1), (on_towers, 0)])
def test_each_run_is_as_if_it_were_alone(
    case: Callable[..., Any], seed: int, tmp_path: Path, corpus: Path, alone: Call
) -> None:
    make_plan, configs = case(tmp_path, corpus, seed)
    *good, bad = configs
    asking = partial(train, mailbox=Asking(after_step=STOP, must_stop=True))
    (stopped,) = alone(asking, make_plan, configs, tmp_path / "losses-of-group")
    assert STOP <= stopped["interrupted"] < NUM_STEPS
    (result,) = alone(train, make_plan, configs, tmp_path / "losses-of-group")
    losses = losses_of(tmp_path / "losses-of-group")
    assert losses.shape == (NUM_STEPS, len(configs))
    assert set(result["failed"]) == {bad.run.name}
    assert "lower optimizer.learning_rate_tempnet" in result["failed"][bad.run.name]
    assert not losses[-1, -1].isfinite()
    for number, config in enumerate(good):
        exported = networks_of(config.run.export_directory)
        single = replace(config, run=replace(config.run, name=f"alone-{number}"))
        (expected,), outcome = (
            alone(train, make_plan, [single], tmp_path / "losses-alone"),
            result["members"][config.run.name],
        )
        torch.testing.assert_close(losses[:, number], losses_of(tmp_path / "losses-alone"), rtol=0, atol=1e-5)
        Path(tmp_path / "losses-alone-0").unlink()
        assert [one["step"] for one in outcome["validations"]] == [25, NUM_STEPS]
        for found, wanted in zip(outcome["validations"], expected["validations"], strict=True):
            for scores in (found["scores"], wanted["scores"]):
                scores.pop("tau_entropy_spearman", None)  # ranks of entropies that nearly are the same
            assert found["scores"] == pytest.approx(wanted["scores"], rel=1e-4, abs=1e-5, nan_ok=True)
        assert ("rho" in outcome["validation"]) == (config.temperature.target_tau is not None)
        if "rivals" in expected:
            assert outcome["rivals"] == pytest.approx(expected["rivals"], rel=1e-4, abs=1e-4)
        for own, other in zip(exported, networks_of(single.run.export_directory), strict=True):
            for name, value in other.items():
                torch.testing.assert_close(own[name], value, rtol=1e-4, atol=1e-5)
