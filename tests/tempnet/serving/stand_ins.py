"""The parts of vLLM and SGLang that a processor meets, written from their published interfaces.

They are used where vLLM and SGLang are not installed. With them installed, the same tests run on their own classes."""

from __future__ import annotations

import enum
import importlib
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

V1 = "vllm.v1.sample.logits_processor"
V2 = "vllm.v1.worker.gpu.sample.logits_processor"
SGLANG = "sglang.srt.sampling.custom_logit_processor"


@dataclass(kw_only=True)
class SamplingParams:
    """Parameters of a vLLM request: those that a TempNet can meet."""

    temperature: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_tokens: int = 0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    structured_outputs: Any = None
    extra_args: dict[str, Any] | None = None


class MoveDirectionality(enum.Enum):
    """How one request moves within the batch of V1."""

    UNIDIRECTIONAL = enum.auto()
    SWAP = enum.auto()


@dataclass(frozen=True)
class BatchUpdate:
    """Changes of the batch of V1 since the last step."""

    batch_size: int
    removed: list[int]
    added: list[tuple[int, Any, list[int] | None, list[int]]]
    moved: list[tuple[int, int, Any]]


class ProcessorOfV1(ABC):
    """The abstract methods of V1."""

    @abstractmethod
    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None: ...

    @abstractmethod
    def apply(self, logits: Any) -> Any: ...

    @abstractmethod
    def is_argmax_invariant(self) -> bool: ...

    @abstractmethod
    def update_state(self, batch_update: Any) -> None: ...


class ProcessorOfV2(ABC):
    """The abstract method of the newer model runner."""

    @abstractmethod
    def apply(self, logits: Any, ctx: Any) -> Any: ...


class CustomLogitProcessor(ABC):
    """The abstract method of SGLang."""

    @abstractmethod
    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any: ...


def _module(patch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    """Put a module with some members in the place of `name`, with its packages."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        package = ".".join(parts[:end])
        if package not in sys.modules:
            made = types.ModuleType(package)
            made.__path__ = []
            patch.setitem(sys.modules, package, made)
    for member, value in members.items():
        setattr(sys.modules[name], member, value)


def put_in_place(patch: pytest.MonkeyPatch, *, without: str = "") -> Callable[[str], Any]:
    """Put stand-ins in the place of vLLM and SGLang if they are not installed, and import the processors with them.

    Args:
        patch: what undoes it.
        without: name of an interface that is to be missing.

    Returns:
        Function that imports a module of `tempnet.serving` anew.
    """
    try:
        importlib.import_module(V1)
    except ImportError:
        _module(patch, "vllm", SamplingParams=SamplingParams)
        _module(
            patch, V1, LogitsProcessor=ProcessorOfV1, BatchUpdate=BatchUpdate, MoveDirectionality=MoveDirectionality
        )
        _module(patch, V2, LogitsProcessor=ProcessorOfV2)
    try:
        importlib.import_module(SGLANG)
    except ImportError:
        _module(patch, SGLANG, CustomLogitProcessor=CustomLogitProcessor)
    if without:
        patch.setitem(sys.modules, without, None)

    def fresh(name: str) -> Any:
        patch.delitem(sys.modules, f"tempnet.serving.{name}", raising=False)
        return importlib.import_module(f"tempnet.serving.{name}")

    return fresh
