"""Tests of the SGLang processor: rows get the τ of Transformers, each with the arguments of its own request."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tempnet import TempNet, TempNetConfig
from tempnet.inference import TemperatureLogitsProcessor
from tests.tempnet.serving.stand_ins import SGLANG, put_in_place


@pytest.fixture
def network() -> TempNet:
    torch.manual_seed(1)
    network = TempNet(TempNetConfig.for_logits(61, rho=1.5, hidden_size=16, num_prototypes=8))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter))
    return network.eval()


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, network: TempNet, tmp_path: Path) -> Callable[[str], Any]:
    network.save_pretrained(tmp_path)
    monkeypatch.setenv("TEMPNET_PATH", str(tmp_path))
    return put_in_place(monkeypatch)


@pytest.mark.parametrize("whole", [True, False])
def test_rows_get_the_temperatures_of_transformers(fresh: Callable[[str], Any], network: TempNet, whole: bool) -> None:
    processor = fresh("sglang").TempNetLogitProcessor
    assert issubclass(processor, importlib.import_module(SGLANG).CustomLogitProcessor)
    arguments: list[Any] = [None, {"tempnet_tau_max": 0.7, "__req__": object()}, {"tempnet": True}]
    tau_max: list[float | None] = [2.0, 0.7, 2.0]
    if not whole:
        arguments += [{"tempnet": False}, {"tempnet_tau_max": "wide"}]
        tau_max += [None, None]
    logits = torch.randn(len(arguments), 64) * 3
    made = processor()(logits.clone(), arguments)
    assert made.shape == logits.shape
    for row, high in enumerate(tau_max):
        expected = logits[row : row + 1]
        if high is not None:
            network.set_tau_max_eval(high)
            expected = TemperatureLogitsProcessor(network)(torch.zeros(1, 1), expected)
        torch.testing.assert_close(made[row : row + 1], expected, rtol=1e-5, atol=1e-5)
    network.set_tau_max_eval(None)
    everything = processor()(logits.clone())
    torch.testing.assert_close(
        everything, TemperatureLogitsProcessor(network)(torch.zeros(1, 1), logits), rtol=1e-5, atol=1e-5
    )


def test_a_server_without_a_tempnet_says_so(fresh: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEMPNET_PATH")
    with pytest.raises(RuntimeError, match="TEMPNET_PATH is not set"):
        fresh("sglang").TempNetLogitProcessor()(torch.zeros(1, 64), [None])


def test_a_model_with_fewer_logits_is_refused(fresh: Callable[[str], Any]) -> None:
    with pytest.raises(ValueError, match="vocabulary of 61, the served model has 60 logits"):
        fresh("sglang").TempNetLogitProcessor()(torch.zeros(1, 60), [None])


def test_without_a_server_the_modules_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vllm", "vllm.v1.sample.logits_processor", "vllm.v1.worker.gpu.sample.logits_processor", SGLANG):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("vllm", "sglang"):
        monkeypatch.delitem(sys.modules, f"tempnet.serving.{name}", raising=False)
        assert importlib.import_module(f"tempnet.serving.{name}")
