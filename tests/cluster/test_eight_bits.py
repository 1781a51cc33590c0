"""Test TempNets on a frozen base in eight bits: trained on it, or on its stored hidden states, as on its rounded weights.

torchao is not in the environment, because Transformers imports it wherever it is installed: `make test-quantised` runs this.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ROOT
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tempnet.devices import linear_weights, loading_options
from tempnet.loading import load_causal_lm

pytestmark = pytest.mark.cluster

# All jobs share the Ray that the first of them starts.
SCRIPT = """
import json, sys
from jobs import prepare_features, train_lm
for job, words in json.loads(sys.argv[1]):
    assert {"train": train_lm, "prepare": prepare_features}[job].main(words) == 0, words
"""
OPTIONS = [
    "frozen-small", "--run.num-steps=12", "--run.log-every=4", "--run.checkpoint-every=4", "--data.context-length=32",
    "--temperature.rho=1.5", "--temperature.hidden-size=32", "--temperature.num-prototypes=16", "--optimizer.batch-size=8",
    "--optimizer.micro-batch-size=2", "--optimizer.learning-rate-tempnet=0.01", "--workers.num-threads=1",
    "--workers.precision=bf16", "--validation.every=6", "--validation.num-blocks=16", "--validation.num-oracle-tokens=256",
]  # fmt: skip


def write_bases(directory: Path, tokenizer: Path) -> None:
    """Write a random model, and one whose weights are those of the first one, rounded to eight bits."""
    words = AutoTokenizer.from_pretrained(tokenizer)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=len(words), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(directory / "base")
    rounded = AutoModelForCausalLM.from_pretrained(directory / "base", **loading_options("int8"))
    with torch.no_grad():
        for weight, eight_bits in zip(linear_weights(model), linear_weights(rounded), strict=True):
            weight.copy_(eight_bits.dequantize())
    model.save_pretrained(directory / "rounded")
    for name in ("base", "rounded"):
        words.save_pretrained(directory / name)


@pytest.fixture(scope="module")
def outcomes(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Train on the base in eight bits with two workers, on its stored hidden states, and on the rounded base."""
    pytest.importorskip("torchao", reason="torchao, the extra `quantised`, is not installed")
    home = tmp_path_factory.mktemp("eight-bits")
    write_bases(home, corpus / "tokenizer")
    shared = [
        *OPTIONS, f"--run.storage={home}", f"--data.train={corpus / 'train'}",
        f"--data.validation={corpus / 'validation'}", f"--tracking.uri=sqlite:///{home}/mlflow.db",
    ]  # fmt: skip
    eight_bits = [*shared, f"--model.path={home / 'base'}", "--model.precision=int8"]
    two, one = (["--workers.num-workers=2", "--workers.zero-stage=2"], ["--workers.num-workers=1"])
    jobs = [
        ("train", [*eight_bits, *two, "--run.name=base"]),
        ("prepare", [*eight_bits, *one]),
        ("train", [*eight_bits, *one, "--model.features", "--workers.zero-stage=3", "--run.name=features"]),
        ("train", [*shared, *one, f"--model.path={home / 'rounded'}", "--run.name=rounded"]),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(jobs)],
        cwd=ROOT, env=environment | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    names = ("base", "features", "rounded")
    return {name: json.loads((home / name / "outcome.json").read_text()) for name in names}


@pytest.mark.parametrize("name", ["base", "features"])
def test_a_tempnet_learns_what_it_learns_on_the_rounded_weights(outcomes: dict[str, dict[str, Any]], name: str) -> None:
    """Products differ in the last digits of bfloat16, because the scale of a row is applied after the product."""
    found, expected = outcomes[name]["validation"], outcomes["rounded"]["validation"]
    for key in ("cross_entropy", "cross_entropy_tau", "tau_mean", "robust_loss"):
        assert found[key] == pytest.approx(expected[key], rel=5e-3), key
    assert found["tau_mean"] != pytest.approx(1, abs=0.01)


def test_the_export_names_the_base_and_can_hold_it_in_any_precision(outcomes: dict[str, dict[str, Any]]) -> None:
    export = Path(outcomes["base"]["export"])
    assert "quantization_config" not in json.loads((export / "config.json").read_text())
    whole, network = load_causal_lm(export)
    assert {weight.dtype for weight in whole.parameters()} == {torch.float32}
    held, again = load_causal_lm(export, dtype="int8")
    assert all(type(weight) is not torch.nn.Parameter for weight in linear_weights(held))
    for ours, theirs in zip(network.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)
