"""Tests the arithmetic of a worker's memory: the parts of ZeRO, a forward pass that is counted, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.activations import NewGELUActivation

from jobs.engine.memory import check_fits, training_memory
from jobs.engine.worker_settings import WorkersSection
from jobs.tasks.language_model.memory import _saved_bytes, activation_bytes, estimate_memory
from jobs.tasks.presets.language_models import PRESETS
from tempnet.models.packing import document_mask

SIZES = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}


def test_zero_divides_optimizer_gradients_and_weights_in_turn() -> None:
    found = []
    for stage in (0, 1, 2, 3):
        workers = WorkersSection(num_workers=4, zero_stage=stage, precision="fp32")  # type: ignore[arg-type]
        memory = training_memory(workers, num_trained=1000, num_frozen=400, activations=0, loss=0)
        found.append((memory.weights, memory.gradients, memory.optimizer))
    # Of gradients, ZeRO 1 and 2 hold a bucket with all of them and the worker's quarter, ZeRO 3 two copies and a quarter.
    assert found == [(5600, 4000, 8000), (5600, 5000, 3000), (5600, 5000, 3000), (7000, 9000, 3000)]


def test_gradients_of_a_gpu_are_in_buckets_of_a_fixed_size_and_use_what_activations_leave() -> None:
    """A bucket has 500 million numbers, ZeRO 2 has two; gradients of 800 million take 3.2 GB, a quarter .8 GB."""

    def gradients(stage: int, num_trained: int, activations: float = 0.0, *, accumulates: bool = False) -> float:
        workers = WorkersSection(num_workers=4, use_gpu=True, zero_stage=stage, precision="fp32")  # type: ignore[arg-type]
        sizes = {"num_trained": num_trained, "num_frozen": 0, "loss": 0.0}
        return training_memory(workers, activations=activations, accumulates=accumulates, **sizes).gradients / 1e9  # type: ignore[arg-type]

    assert [gradients(stage, 800_000_000) for stage in (0, 1, 2, 3)] == pytest.approx([3.2, 2.8, 4.8, 4.8])
    # Beside 10 GB of activations there are only buckets, and of ZeRO 3 the part, until the activations are gone.
    assert [gradients(stage, 800_000_000, 1e10) for stage in (1, 2, 3)] == pytest.approx([2.0, 4.0, 2.8])
    assert [gradients(stage, 1000, 1e10) for stage in (1, 2, 3)] == pytest.approx([2.0, 4.0, 2.0], abs=1e-5)
    waiting = [gradients(stage, 800_000_000, 1e10, accumulates=True) for stage in (1, 2, 3)]
    assert waiting == pytest.approx([5.2, 4.8, 2.8])
    # Ten thousand million, in four parts of 10 GB each, which the step copies, at most a thousand million numbers at a time.
    assert gradients(3, 10_000_000_000) == pytest.approx(2 + 10 + 4)
    assert gradients(1, 10_000_000_000) == pytest.approx(10 + 10)


@given(activations=st.floats(0, 1e12), loss=st.floats(0, 1e12), validation=st.floats(0, 1e12))
def test_validation_takes_what_a_step_has_freed_on_a_gpu_and_new_memory_on_cpus(
    activations: float, loss: float, validation: float
) -> None:
    """On CPUs the heap's holes grow with what is in use, and validation's tensors do not fit into them."""
    for use_gpu in (True, False):
        memory = training_memory(
            WorkersSection(num_workers=1, use_gpu=use_gpu, zero_stage=0),
            num_trained=0,
            num_frozen=0,
            activations=activations,
            loss=loss,
            validation=validation,
        )
        step = activations + loss
        peak = max(step, validation) if use_gpu else max(1.3 * step, step + validation)
        assert memory.total == pytest.approx(memory.process + peak)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "frozen bf16"])
def test_activations_are_what_autograd_saves(architecture: str, attention: str, precision: str) -> None:
    """The count without data is that of a real forward pass, with the copies of weights that autocast makes."""
    extra = {"intermediate_size": 48} if architecture == "llama" else {}
    config = AutoConfig.for_model(architecture, max_position_embeddings=16, **SIZES, **extra)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    is_half, is_frozen = precision != "fp32", precision == "frozen bf16"
    if is_frozen:
        model.bfloat16()
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
            input_ids=torch.zeros(2, 16, dtype=torch.long),
            position_ids=positions,
            attention_mask=document_mask(positions, attention),
            use_cache=False,
        )
    total = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    assert kept is not None
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    assert _saved_bytes(shapes, 2, 16, is_half=is_half, is_frozen=is_frozen) == total


def test_validation_takes_the_place_of_buckets_on_a_gpu() -> None:
    """The buckets of ZeRO 2 take 4 GB, and are gone when the validation needs 1, 5 or 7 GB."""
    workers = WorkersSection(num_workers=1, use_gpu=True, zero_stage=2)
    sizes = {"num_trained": 1000, "num_frozen": 0, "activations": 1e9, "loss": 0.0}
    found = [training_memory(workers, validation=value, **sizes) for value in (1e9, 5e9, 7e9)]  # type: ignore[arg-type]
    assert [memory.overhead / 1e9 for memory in found] == pytest.approx([0.0, 0.0, 2.0], abs=1e-4)


def test_a_gpu_s_autocast_computes_a_power_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2's activation function, with its power in float32, makes a real forward pass save what is counted for a GPU."""
    config = AutoConfig.for_model("gpt2", max_position_embeddings=16, **SIZES)
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    on_gpu = _saved_bytes(shapes, 2, 16, is_half=True, use_gpu=True)
    on_cpu = _saved_bytes(shapes, 2, 16, is_half=True)

    def activate(self: nn.Module, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x.float(), 3.0))))

    monkeypatch.setattr(NewGELUActivation, "forward", activate)
    assert on_gpu == _saved_bytes(shapes, 2, 16, is_half=True) > on_cpu
    assert _saved_bytes(shapes, 2, 16, use_gpu=True) == _saved_bytes(shapes, 2, 16)  # float32 is float32


def test_checkpointing_and_a_frozen_base_save_activations() -> None:
    preset = PRESETS["gpt2-scratch-small"]()
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_positions=128, **SIZES))
    whole = activation_bytes(preset, base)
    checkpointed = activation_bytes(
        replace(preset, workers=replace(preset.workers, activation_checkpointing=True)), base
    )
    frozen = activation_bytes(PRESETS["frozen-small"](), base)
    assert frozen < checkpointed < whole


def test_eight_bits_save_a_byte_of_every_weight_but_those_of_the_largest_layer() -> None:
    preset = PRESETS["frozen-small"]()
    shape = {"num_key_value_heads": 2, "intermediate_size": 64, **SIZES}
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **shape))

    def weights(precision: str | None, zero_stage: int = 0) -> float:
        workers = replace(preset.workers, precision="bf16", zero_stage=zero_stage)  # type: ignore[arg-type]
        config = replace(preset, workers=workers, model=replace(preset.model, precision=precision))  # type: ignore[arg-type]
        return estimate_memory(config, base, num_base=10**6, num_tempnet=0, vocab_size=50).weights

    # A layer has two weights of 32 × 32, two of 16 × 32 and three of 64 × 32; every row has a scale of four bytes.
    layer = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32 - 4 * (2 * 32 + 2 * 16 + 2 * 64 + 32)
    assert weights(None) - weights("int8") == weights(None) - weights("fp8") == 3 * layer - 2 * 64 * 32


def test_what_does_not_fit_is_refused_with_a_remedy() -> None:
    workers = WorkersSection(num_workers=2, zero_stage=0, memory_gib=1.0)
    memory = training_memory(workers, num_trained=10**8, num_frozen=0, activations=0, loss=0)
    with pytest.raises(ValueError, match=r"more than workers\.memory_gib = 1.*workers\.offload_optimizer"):
        check_fits(memory, workers)
    check_fits(memory, replace(workers, memory_gib=None))
    check_fits(memory, replace(workers, memory_gib=3.0))
    with pytest.raises(ValueError, match=r"workers\.memory_gib = -1\.0 must be positive"):
        replace(workers, memory_gib=-1.0)
