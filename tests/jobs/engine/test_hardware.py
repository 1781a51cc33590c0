"""Tests the FLOPs per token against a count by hand, and the threads of a worker."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from jobs.engine.config import WorkersSection
from jobs.engine.hardware import num_threads_per_worker
from jobs.tasks.language_model.flops import flops_per_token
from jobs.tasks.presets.language_models import PRESETS
from tempnet import TempNet, TempNetConfig
from tempnet.models.causal_lm import TemperatureCausalLM
from tempnet.softmax.config import TemperatureLossConfig


@pytest.mark.parametrize("freeze", [False, True])
def test_flops_equal_a_count_by_hand(freeze: bool) -> None:
    base = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gpt2", vocab_size=1000, n_embd=64, n_layer=3, n_head=4, n_positions=128)
    )
    network = TempNet(TempNetConfig.for_logits(1000, rho=2.0))
    module = TemperatureCausalLM(
        base, network, TemperatureLossConfig(name="dro", rho=2.0), vocab_size=1000, freeze_base=freeze
    )
    config = PRESETS["gpt2-scratch-small"]()
    config = replace(config, data=replace(config.data, context_length=128))
    matrices = 3 * 12 * 64 * 64 + 1000 * 64
    forward = 2 * matrices + 3 * 2 * 2 * 128 * 64
    expected = (forward if freeze else 3 * forward) + 4 * (1000 * 256 + 256 * 256)
    # Only our count includes biases, norms and the pooling, which are less than 2 % of the whole.
    whole = flops_per_token(module, config)
    assert whole == pytest.approx(expected, rel=0.02)
    for parameter in base.parameters():  # as ZeRO 3 leaves them
        parameter.ds_shape, parameter.data = parameter.shape, torch.empty(0)
    assert flops_per_token(module, config) == whole


def test_runs_side_by_side_do_not_take_each_others_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 16)

    def threads(num_local_workers: int, shares_cores: bool, num_kept: int = 0, **values: Any) -> int:
        return num_threads_per_worker(
            WorkersSection(**values), num_local_workers=num_local_workers, shares_cores=shares_cores, num_kept=num_kept
        )

    assert [threads(number, False, cpus_per_worker=1.0) for number in (1, 2, 3, 32)] == [16, 8, 5, 1]
    # Runs together reserve no more cores than the machine has, so each worker may use as many threads as it reserves.
    assert [threads(1, True, cpus_per_worker=cpus) for cpus in (0.5, 1.0, 2.5, 8.0)] == [1, 1, 2, 8]
    assert threads(2, True, num_threads=3) == threads(2, False, num_threads=3) == 3
    # A continued run keeps the number of threads that it began with, wherever its workers are now.
    assert [threads(number, shared, num_kept=5) for number in (1, 4) for shared in (True, False)] == [5] * 4
