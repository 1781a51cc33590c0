"""Tests of the Triton kernels: their results (kernel_cases.py, interpreted or on a GPU) and their machine code."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tempnet.softmax import kernels
from tempnet.softmax.kernels import Tile, is_available

CASES = Path(__file__).with_name("kernel_cases.py")


def run_cases(interpreted: bool) -> str:
    """Run kernel_cases.py in its own process, and return what pytest printed."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if interpreted:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", str(CASES)]
    done = subprocess.run(command, cwd=CASES.parents[2], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    summary = run_cases(interpreted=True)
    assert re.search(r"^\d{2,} passed, 1 skipped", summary, re.MULTILINE), summary


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    assert "skipped" not in run_cases(interpreted=False)


def test_without_triton_or_on_a_cpu_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_available(torch.zeros(1))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setitem(sys.modules, "triton", None)
    assert not runpy.run_path(kernels.__file__)["is_available"](torch.zeros(1))


@pytest.mark.parametrize(("capability", "is_plain", "num_vocab", "product", "shared_kib", "stack_bytes"), [
    ((8, 0), False, 128, "mma.sync", 99, 0),  # the shared memory of capability 8.6 and 8.9
    ((9, 0), True, 256, "wgmma", 227, 16),
    ((9, 0), False, 128, "wgmma", 227, 0),
])  # fmt: skip
@pytest.mark.parametrize("name", ["statistics_kernel", "logits_gradient_kernel"])
def test_they_compile_for_a_gpu(
    name: str, capability: tuple[int, int], is_plain: bool, num_vocab: int, product: str, shared_kib: int, stack_bytes: int,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """In bfloat16 they use tensor cores, spill hardly any registers, and fit into shared memory.

    Triton compiles without a GPU; only the launch needs one.
    """
    triton = pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tempnet.softmax import triton_kernels

    kernel = getattr(triton_kernels, name)
    tile = Tile.choose(torch.bfloat16, capability, is_plain=is_plain)
    assert tile.num_vocab == num_vocab
    constants = {
        "GROUP": 8, "BLOCK_TOKENS": tile.num_tokens, "BLOCK_VOCAB": tile.num_vocab, "BLOCK_HIDDEN": tile.num_hidden,
        "PRECISION": "ieee", "WIDEN": False,
    }  # fmt: skip
    if name == "statistics_kernel":
        constants["WITH_UNIT"] = True
    if is_plain:
        constants |= {"bias": None, "soft_cap": None}
    types = dict.fromkeys(["hidden", "weight", "bias", "gradient"], "*bf16")
    types |= dict.fromkeys(["tau", "partials", "maximum", "log_sum", "row_scale"], "*fp32")
    types |= {"targets": "*i64", "soft_cap": "fp32"}
    types |= dict.fromkeys(constants, "constexpr")
    signature = {argument: types.get(argument, "i32") for argument in kernel.arg_names}
    # The same as at a launch: PyTorch's allocations are aligned, and the hidden size is a multiple of 16.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, (argument, type_name) in enumerate(signature.items())
        if type_name.startswith("*") or argument in ("num_hidden", "gradient_stride")
    }
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, aligned),
        target=GPUTarget("cuda", 10 * capability[0] + capability[1], 32),
        options={"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": True},
    )
    assert product in compiled.asm["ptx"]
    assert "cp.async" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= shared_kib << 10
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    usage = subprocess.run(
        [triton.knobs.nvidia.cuobjdump.path, "-res-usage", binary], capture_output=True, text=True, check=True
    )
    assert int(usage.stdout.partition("STACK:")[2].split()[0]) <= stack_bytes, usage.stdout
