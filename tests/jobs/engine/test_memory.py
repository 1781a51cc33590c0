"""Tests the arithmetic of a run: memory, FLOPs and threads of a worker, and what does not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from jobs.engine.config import WorkersSection
from jobs.engine.fields import with_fields
from jobs.engine.hardware import GIB, check_fits, describe_memory, num_threads_per_worker, training_memory
from jobs.tasks.base import count_parameters
from jobs.tasks.language_model.models import estimate_memory, flops_per_token, saved_bytes
from jobs.tasks.language_model.task import with_fitting_micro_batch
from jobs.tasks.presets.language_models import PRESETS
from tempnet import TempNet, TempNetConfig
from tempnet.models.causal_lm import TemperatureCausalLM
from tempnet.models.packing import document_mask
from tempnet.softmax.config import TemperatureLossConfig

SIZES = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}


def shapes(architecture: str, attention: str = "sdpa", **sizes: int) -> PreTrainedModel:
    with torch.device("meta"):
        config = AutoConfig.for_model(architecture, **{**SIZES, **sizes})
        base: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return base


def test_zero_divides_optimizer_gradients_and_weights_in_turn() -> None:
    found = []
    for stage in (0, 1, 2, 3):
        workers = WorkersSection(num_workers=4, zero_stage=stage, precision="fp32")  # type: ignore[arg-type]
        memory = training_memory(workers, num_trained=1000, num_frozen=400)
        found.append((memory["weights"], memory["gradients"], memory["optimizer"]))
    # Of gradients, ZeRO 1 and 2 hold a bucket with all of them and the worker's quarter, ZeRO 3 two copies and a quarter.
    assert found == [(5600, 4000, 8000), (5600, 5000, 3000), (5600, 5000, 3000), (7000, 9000, 3000)]
    workers = WorkersSection(num_workers=4, zero_stage=3, precision="bf16", offload_optimizer=True)
    assert training_memory(workers, num_trained=0, num_frozen=400)["weights"] == 2 * 400 * 1.25
    assert training_memory(workers, num_trained=1000)["optimizer"] == 0
    # While gradients accumulate, ZeRO 1 holds all of them.
    workers = WorkersSection(num_workers=4, zero_stage=1)
    assert training_memory(workers, num_trained=1000, accumulates=True)["gradients"] == 8000
    # On a GPU the two buckets of ZeRO 2 have their size of 500 million numbers however small the model is.
    workers = WorkersSection(num_workers=4, use_gpu=True, zero_stage=2)
    assert training_memory(workers, num_trained=1000)["gradients"] == pytest.approx(4e9, rel=1e-5)


@pytest.mark.parametrize(("architecture", "attention", "is_half"), [("gpt2", "eager", False), ("llama", "sdpa", True)])
def test_activations_are_what_autograd_saves(architecture: str, attention: str, is_half: bool) -> None:
    """The count without data is that of a real forward pass, with the copies of weights that autocast makes."""
    extra = {"intermediate_size": 48} if architecture == "llama" else {}
    base = shapes(architecture, attention, max_position_embeddings=16, **extra)
    model = AutoModelForCausalLM.from_config(base.config, attn_implementation=attention)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if (address := tensor.untyped_storage().data_ptr()) not in parameters:
            saved[address] = tensor
        return tensor

    positions = torch.arange(16).expand(2, -1)
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_half),
    ):
        kept = model.base_model(
            input_ids=positions,
            position_ids=positions,
            attention_mask=document_mask(positions, attention),
            use_cache=False,
        )
    assert kept is not None
    total = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    assert saved_bytes(base, 2, 16, is_half=is_half) == pytest.approx(total, rel=0.02)


@pytest.mark.parametrize("num_workers", [1, 8])
@pytest.mark.parametrize("size", ["7B", "13B", "70B"])
def test_the_table_of_docs_memory_md_is_this_arithmetic(num_workers: int, size: str) -> None:
    width, num_layers, num_heads, inner = {
        "7B": (4096, 32, 32, 11_008), "13B": (5120, 40, 40, 13_824), "70B": (8192, 80, 64, 28_672)
    }[size]  # fmt: skip
    base = shapes(
        "llama", vocab_size=32_000, hidden_size=width, num_hidden_layers=num_layers, num_attention_heads=num_heads,
        intermediate_size=inner, num_key_value_heads=8 if size == "70B" else num_heads,
    )  # fmt: skip
    whole, output_layer = count_parameters(base), 32_000 * width
    common = {
        "workers.num_workers": num_workers, "workers.zero_stage": 0 if num_workers == 1 else 3,
        "optimizer.batch_size": 8, "optimizer.micro_batch_size": 1, "data.context_length": 1024,
    }  # fmt: skip

    def memory(preset: str, num_base: int, **changes: Any) -> dict[str, float]:
        config = with_fields(PRESETS[preset](), common | {name.replace("__", "."): changes[name] for name in changes})
        return estimate_memory(config, base, num_base=num_base, num_tempnet=8_257_536, vocab_size=32_000)

    columns = [
        memory("gpt2-scratch", whole, workers__activation_checkpointing=True),
        memory("llama2-7b-frozen", whole),
        memory("llama2-7b-frozen", output_layer, model__features=True),
    ]
    page = (Path(__file__).parents[3] / "docs" / "memory.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith(f"| {num_workers} GPU"))
    at = ["7B", "13B", "70B"].index(size)
    cells = [int(cell.split(",")[at]) for cell in row.strip("| ").split("|")[1:]]
    assert cells == [round(sum(items.values()) / GIB) for items in columns]
    if num_workers == 1:  # weights, gradients and two moments of base and TempNet
        counted = sum(columns[0][name] for name in ("weights", "gradients", "optimizer"))
        assert counted == 16 * (whole + 8_257_536)


def test_eight_bits_save_a_byte_of_every_weight() -> None:
    base = shapes("llama", num_key_value_heads=2, intermediate_size=64)

    def weights(precision: str | None) -> float:
        changes = {"workers.precision": "bf16", "workers.zero_stage": 0, "model.precision": precision}
        config = with_fields(PRESETS["frozen-small"](), changes)
        return estimate_memory(config, base, num_base=10**6, num_tempnet=0, vocab_size=50)["weights"]

    # A layer has two weights of 32 × 32, two of 16 × 32 and three of 64 × 32; every row has a scale of four bytes.
    layer = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32 - 4 * (2 * 32 + 2 * 16 + 2 * 64 + 32)
    assert weights(None) - weights("int8") == weights(None) - weights("fp8") == 3 * layer


def test_what_does_not_fit_is_refused_with_a_remedy() -> None:
    workers = WorkersSection(num_workers=2, zero_stage=0, memory_gib=1.0)
    memory = training_memory(workers, num_trained=10**8)
    assert describe_memory(memory).startswith("2.66 GiB a worker: weights 0.37, gradients 0.37, optimizer 0.75")
    with pytest.raises(ValueError, match=r"more than workers\.memory_gib = 1.*workers\.offload_optimizer"):
        check_fits(memory, workers)
    check_fits(memory, replace(workers, memory_gib=None))
    check_fits(memory, replace(workers, memory_gib=3.0))


@pytest.mark.parametrize(("memory_gib", "size"), [(None, 12), (2e-6, 3), (1e-9, 1)])
def test_a_worker_takes_the_largest_micro_batch_that_fits(memory_gib: float | None, size: int) -> None:
    changes = {
        "workers.micro_batch": "auto", "workers.memory_gib": memory_gib, "workers.num_workers": 1, "optimizer.batch_size": 12
    }  # fmt: skip
    config = with_fields(PRESETS["gpt2-scratch-small"](), changes)
    memory = {1: 1000.0, 2: 1500.0, 3: 2000.0, 4: 2500.0, 12: 9000.0}  # bytes; 2e-6 GiB are 2147
    assert with_fitting_micro_batch(config, memory, is_first=True).micro_batch_size == size


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
