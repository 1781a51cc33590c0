"""Test TempNets on a frozen base in eight bits: trained on it, or on its stored hidden states, as on its rounded weights.

torchao is not in the environment, because Transformers imports it wherever it is installed: `make test-quantised` runs this.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import ROOT
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tempnet.devices import linear_weights, loading_options
from tempnet.loading import load_causal_lm

pytestmark = pytest.mark.cluster

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


def test_a_tempnet_learns_what_it_learns_on_the_rounded_weights(corpus: Path, tmp_path: Path) -> None:
    """Products differ in the last digits of bfloat16, because the scale of a row is applied after the product."""
    pytest.importorskip("torchao", reason="torchao, the extra `quantised`, is not installed")
    write_bases(tmp_path, corpus / "tokenizer")
    shared = [
        *OPTIONS, f"--run.storage={tmp_path}", f"--data.train={corpus / 'train'}",
        f"--data.validation={corpus / 'validation'}", f"--tracking.uri=sqlite:///{tmp_path}/mlflow.db",
    ]  # fmt: skip
    eight_bits = [*shared, f"--model.path={tmp_path / 'base'}", "--model.precision=int8"]
    two, one = (["--workers.num-workers=2", "--workers.zero-stage=2"], ["--workers.num-workers=1"])
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    for words in (
        ["train_lm", *eight_bits, *two, "--run.name=base"],
        ["prepare_features", *eight_bits, *one],
        ["train_lm", *eight_bits, *one, "--model.features", "--workers.zero-stage=3", "--run.name=features"],
        ["train_lm", *shared, *one, f"--model.path={tmp_path / 'rounded'}", "--run.name=rounded"],
    ):
        command = [sys.executable, "-m", f"jobs.{words[0]}", *words[1:]]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    names = ("base", "features", "rounded")
    base, features, rounded = (json.loads((tmp_path / name / "outcome.json").read_text()) for name in names)
    for found in (base, features):
        for key in ("cross_entropy", "cross_entropy_tau", "tau_mean", "robust_loss"):
            assert found["validation"][key] == pytest.approx(rounded["validation"][key], rel=5e-3), key
    assert base["validation"]["tau_mean"] != pytest.approx(1, abs=0.01)

    # The export names the base and can hold it in any precision.
    assert "quantization_config" not in json.loads(Path(base["export"], "config.json").read_text())
    whole, network = load_causal_lm(base["export"])
    assert {weight.dtype for weight in whole.parameters()} == {torch.float32}
    held, again = load_causal_lm(base["export"], dtype="int8")
    assert all(type(weight) is not torch.nn.Parameter for weight in linear_weights(held))
    for ours, theirs in zip(network.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)
