"""The processors of vLLM and SGLang: τ of every row is that of Transformers, however the requests of a batch come and go.

Where vLLM and SGLang are not installed, the parts of them that a processor meets are replaced by stand-ins, written from
their published interfaces. With them installed, the same tests run on their own classes.
"""

from __future__ import annotations

import copy
import enum
import importlib
import math
import random
import sys
import tomllib
import types
from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tempnet import TempNet
from tempnet.inference import TemperatureLogitsProcessor
from tempnet.serving import derive
from tempnet.serving.settings import RequestTemperature
from tests.tempnet.tiny_language_models import VOCABULARY, make_tempnet

V1 = "vllm.v1.sample.logits_processor"
V2 = "vllm.v1.worker.gpu.sample.logits_processor"
SGLANG = "sglang.srt.sampling.custom_logit_processor"
NUM_LOGITS = 64
MODEL = SimpleNamespace(model_config=SimpleNamespace(model=""))
CPU = torch.device("cpu")


def interface(*methods: str) -> type:
    """Return a class with these abstract methods."""
    members = {name: abstractmethod(lambda self: None) for name in methods}
    return ABCMeta("Interface", (), {"__module__": __name__, **members})


def sampling_params(**values: Any) -> SimpleNamespace:
    """Return parameters of a vLLM request: those that a TempNet can meet."""
    defaults = {"temperature": 1.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    names = ("logit_bias", "allowed_token_ids", "bad_words", "structured_outputs", "extra_args")
    return SimpleNamespace(**{**defaults, "min_tokens": 0, **dict.fromkeys(names), **values})


def put_in_place(patch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Put stand-ins in the place of what is not installed; return what imports a module of `tempnet.serving` anew."""

    def replace(name: str, **members: Any) -> None:
        try:
            importlib.import_module(name)
        except ImportError:
            parts = name.split(".")
            for package in (".".join(parts[:end]) for end in range(1, len(parts) + 1)):
                if package not in sys.modules:
                    patch.setitem(sys.modules, package, types.ModuleType(package))
                    sys.modules[package].__path__ = []
            for member, value in members.items():
                setattr(sys.modules[name], member, value)

    processor = interface("__init__", "apply", "is_argmax_invariant", "update_state")
    directions = enum.Enum("MoveDirectionality", ["UNIDIRECTIONAL", "SWAP"])
    replace(V1, LogitsProcessor=processor, BatchUpdate=SimpleNamespace, MoveDirectionality=directions)
    replace(V2, LogitsProcessor=interface("apply"))
    replace(SGLANG, CustomLogitProcessor=interface("__call__"))
    server = SimpleNamespace(dtype="auto", model_path="", revision=None)
    replace("sglang.srt.runtime_context", get_server_args=lambda: server)
    if not hasattr(sys.modules["vllm"], "SamplingParams"):
        sys.modules["vllm"].SamplingParams = sampling_params

    def fresh(name: str) -> Any:
        patch.delitem(sys.modules, f"tempnet.serving.{name}", raising=False)
        return importlib.import_module(f"tempnet.serving.{name}")

    return fresh


@pytest.fixture
def network() -> TempNet:
    network = make_tempnet()
    network.set_tau_max_eval(1.4)
    return network


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, network: TempNet, tmp_path: Path) -> Callable[[str], Any]:
    network.save_pretrained(tmp_path / "tempnet")
    monkeypatch.setenv("TEMPNET_PATH", str(tmp_path))
    return put_in_place(monkeypatch)


def parameters(arguments: dict[str, Any] | None = None, **others: Any) -> Any:
    return importlib.import_module("vllm").SamplingParams(extra_args=arguments, **others)


CHOICES: list[tuple[dict[str, Any] | None, float | None]] = [
    (None, None), ({"tempnet": True}, 1.4), ({"tempnet_tau_max": 0.7}, 0.7), ({"tempnet_tau_max": 3, "tempnet": 1}, 3.0),
    ({"tempnet": 0, "tempnet_tau_max": 0.7}, None), ({"other": 5}, None), ({"tempnet": "off"}, None),
]  # fmt: skip
"""Arguments of a request, and the τ_max at which it is sampled; None: without a TempNet."""


def as_in_transformers(network: TempNet, logits: Tensor, tau_max: list[float | None]) -> Tensor:
    """Return the logits as `TemperatureLogitsProcessor` makes them, each row with a network of its own τ_max.

    A negative τ_max stands for a constant τ.
    """
    rows = []
    for row, high in zip(logits, tau_max, strict=True):
        own = copy.deepcopy(network)
        if high is not None and high > 0:
            own.set_tau_max_eval(high)
        row = row.unsqueeze(0)
        constant = None if high is None or high > 0 else lambda tau=-high: torch.tensor([tau])
        rows.append(row if high is None else TemperatureLogitsProcessor(own, constant)(torch.zeros(1, 1), row))
    return torch.cat(rows)


class Batch:
    """A persistent batch that changes as vLLM's V1 documents it.

    In every step requests leave; new ones take the free rows, lowest first, and then rows at the end; requests at the
    end move into the rows that are still free; some swap places. The processor is told what was removed, added and
    moved, in this order.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.rows: list[float | None] = []

    def step(self) -> Any:
        """Change the batch and return the update, or None for no change."""
        interface = importlib.import_module(V1)
        draw = self.random
        removed = sorted(
            draw.sample(range(len(self.rows)), draw.randint(0, len(self.rows)) if draw.random() < 0.5 else 0)
        )
        free = list(removed)
        added, moved = [], []
        rows: list[Any] = ["free" if row in removed else tau_max for row, tau_max in enumerate(self.rows)]
        for _ in range(draw.randint(0, 4) if len(self.rows) < 12 else 0):
            row = free.pop(0) if free else len(rows)
            arguments, tau_max = draw.choice(CHOICES)
            prompt: list[int] | None = draw.choice([None, [], [5, -1, 7]])
            added.append((row, parameters(arguments), prompt, draw.choice([[], [-1], [3, -1, -1]])))
            rows[row : row + 1] = [tau_max]
        while free:
            while rows and rows[-1] == "free":
                rows.pop()
                free.pop()
            if free:
                moved.append((len(rows) - 1, free[0], interface.MoveDirectionality.UNIDIRECTIONAL))
                rows[free.pop(0)] = rows.pop()
        for _ in range(draw.randint(0, 2) if len(rows) > 1 else 0):
            first, second = draw.sample(range(len(rows)), 2)
            moved.append((first, second, interface.MoveDirectionality.SWAP))
            rows[first], rows[second] = rows[second], rows[first]
        self.rows = rows
        left = [row for row in removed if row not in [one[0] for one in added]]
        update = interface.BatchUpdate(batch_size=len(rows), removed=left[::-1], added=added, moved=moved)
        return update if left or added or moved else None


@pytest.mark.parametrize("seed", range(3))
def test_rows_keep_their_temperatures_while_requests_come_go_and_move(
    fresh: Callable[[str], Any], network: TempNet, seed: int
) -> None:
    processor = fresh("vllm").TempNetLogitsProcessor(MODEL, CPU, False)
    batch = Batch(seed)
    torch.manual_seed(seed)
    mixed = 0
    for _ in range(40):
        processor.update_state(batch.step())
        logits = torch.randn(len(batch.rows), NUM_LOGITS) * 3
        mixed += len(set(batch.rows)) > 2
        if batch.rows:
            expected = as_in_transformers(network, logits, batch.rows)
            torch.testing.assert_close(processor.apply(logits.clone()), expected, rtol=1e-5, atol=1e-5)
    assert mixed > 10
    assert int(processor.temperatures.num_masked) == 0


def slot_context(slots: list[int], num_rows_of_each: list[int]) -> Any:
    """Return what the newer model runner says of a step: which slot each request and each row belongs to."""
    rows = [slot for slot, number in zip(slots, num_rows_of_each, strict=True) for _ in range(number)]
    return SimpleNamespace(
        idx_mapping_np=np.array(slots, dtype=np.int32),
        idx_mapping=torch.tensor(slots, dtype=torch.int32),
        expanded_idx_mapping=torch.tensor(rows, dtype=torch.int32),
    )


PHASES: list[tuple[dict[str, Any], float | None, float | None, Callable[[list[int]], bool]]] = [
    ({"tempnet_then": 0.5, "tempnet_then_after": 2}, 1.4, -0.5, lambda new: len(new) >= 2),
    ({"tempnet_tau": 0.7, "tempnet_then": "on", "tempnet_then_at": 9, "tempnet_tau_max": 3}, -0.7, 3.0, lambda new: 9 in new),
    ({"tempnet": "off", "tempnet_then": True, "tempnet_then_at": 9, "tempnet_then_after": 6}, None, 1.4,
     lambda new: 9 in new or len(new) >= 6),
    ({"tempnet_then": 0, "tempnet_then_at": "nine"}, 1.4, None, lambda new: 9 in new),
    ({"tempnet_tau": 1.3}, -1.3, -1.3, lambda new: False),
    ({"tempnet": 0}, None, None, lambda new: False),
]  # fmt: skip
"""Arguments of a request, the τ_max before and after its switch (negative: a constant τ), and when it switches."""


@pytest.mark.parametrize("interface", ["V1", "slots"])
def test_requests_switch_after_their_own_tokens(
    fresh: Callable[[str], Any], network: TempNet, tmp_path: Path, interface: str
) -> None:
    """Prompts hold the token 9, too, which switches nothing; a request may come back with tokens, after a preemption."""
    words = Tokenizer(WordLevel({"nine": 9, "?": 0}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    served = SimpleNamespace(model_config=SimpleNamespace(model="", tokenizer=str(tmp_path)))
    draw, number, drafts = random.Random(interface), len(PHASES), 3 if interface == "slots" else 0
    lengths = [draw.randint(1, 5) for _ in PHASES]
    new = [[5] * draw.randint(0, 2) for _ in PHASES]
    state = SimpleNamespace(device=CPU, max_num_reqs=number, vocab_size=NUM_LOGITS)
    if interface == "V1":
        processor = fresh("vllm").TempNetLogitsProcessor(served, CPU, False)
        added = [(row, parameters(PHASES[row][0]), [9] * lengths[row], new[row]) for row in range(number)]
        processor.update_state(
            importlib.import_module(V1).BatchUpdate(batch_size=number, removed=[], added=added, moved=[])
        )
    else:
        processor = fresh("vllm").TempNetLogitsProcessor(served, state)
        for row, phase in enumerate(PHASES):
            processor.add_request(row, parameters(phase[0]))
        processor.apply_staged_writes()
    for _ in range(9):
        seen = [tokens + [draw.choice([3, 9]) for _ in range(draw.randint(0, drafts))] for tokens in new]
        rows = [(row, seen[row][:end]) for row in range(number) for end in range(len(new[row]), len(seen[row]) + 1)]
        logits = torch.randn(len(rows), NUM_LOGITS) * 3
        expected = [PHASES[row][2 if PHASES[row][3](tokens) else 1] for row, tokens in rows]
        context = None
        if interface != "V1":
            everything = [[9] * length + tokens for length, tokens in zip(lengths, new, strict=True)]
            padded = [tokens + [9] * (40 - len(tokens)) for tokens in everything]
            for name, values in (
                ("prompt_len", lengths),
                ("total_len", list(map(len, everything))),
                ("all_token_ids", padded),
            ):
                setattr(state, name, SimpleNamespace(gpu=torch.tensor(values, dtype=torch.int32)))
            context = slot_context(
                list(range(number)), [len(all_) - len(own) + 1 for all_, own in zip(seen, new, strict=True)]
            )
            context.pos = torch.tensor([lengths[row] + len(tokens) - 1 for row, tokens in rows])
            context.input_ids = torch.tensor([tokens[-1] if tokens else 9 for _, tokens in rows], dtype=torch.int32)
            context.expanded_local_pos = torch.tensor(
                [len(tokens) - len(new[row]) for row, tokens in rows], dtype=torch.int32
            )
            context.seq_lens_upper_bound_np = np.array([len(tokens) + drafts for tokens in everything])
        made = processor.apply(logits.clone(), *([] if context is None else [context]))
        torch.testing.assert_close(made, as_in_transformers(network, logits, expected), rtol=1e-5, atol=1e-5)
        for tokens in new:
            tokens.append(draw.choice([3, 4, 9]))


def test_it_is_of_both_interfaces_and_found_by_its_entry_point(fresh: Callable[[str], Any]) -> None:
    processor = fresh("vllm").TempNetLogitsProcessor
    assert all(issubclass(processor, importlib.import_module(name).LogitsProcessor) for name in (V1, V2))
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.logits_processors"]["tempnet"].partition(":")
    assert getattr(importlib.import_module(module), name) is processor
    assert not processor(MODEL, CPU, False).is_argmax_invariant()


def test_interfaces_that_are_not_installed_are_left_out() -> None:
    made = derive("Name", Batch, ("no.such.module", "Base"), ("abc", "NoSuchBase"), ("abc", "ABC"))
    assert made.__mro__[1:] == (Batch, ABC, object)
    assert (made.__name__, made.__module__, made.__doc__) == ("Name", __name__, Batch.__doc__)


def test_without_a_tempnet_it_does_nothing(
    fresh: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TEMPNET_PATH")
    processor = fresh("vllm").TempNetLogitsProcessor(MODEL, CPU, False)
    logits = torch.randn(3, NUM_LOGITS)
    processor.update_state(Batch(0).step())
    assert processor.apply(logits) is logits
    served = SimpleNamespace(model_config=SimpleNamespace(model=str(tmp_path)))
    assert fresh("vllm").TempNetLogitsProcessor(served, CPU, False).temperatures is not None


@pytest.mark.parametrize(
    ("arguments", "others", "message"),
    [
        ({"tempnet": True}, {"temperature": 0.7}, r"temperature = 0\.7 changes the logits"),
        ({"tempnet": True}, {"temperature": 0.0}, r"temperature = 0\.0 changes the logits"),
        ({"tempnet_tau_max": 1.0}, {"min_tokens": 3}, "min_tokens = 3"),
        ({"tempnet": 1}, {"presence_penalty": 0.5}, r"presence_penalty = 0\.5"),
        ({"tempnet": 1}, {"logit_bias": {3: 1.0}}, "logit_bias = "),
        ({"tempnet": "perhaps"}, {}, "tempnet = 'perhaps' is none of"),
        ({"tempnet_tau_max": -1}, {}, "tempnet_tau_max = -1 must be a finite number above 0"),
        ({"tempnet_tau_max": math.nan}, {}, "tempnet_tau_max = nan"),
    ],
    ids=str,
)
def test_a_request_that_cannot_have_it_is_refused(
    fresh: Callable[[str], Any], arguments: dict[str, Any], others: dict[str, Any], message: str
) -> None:
    processor = fresh("vllm").TempNetLogitsProcessor
    with pytest.raises(ValueError, match=message):
        processor.validate_params(parameters(arguments, **others))
    processor.validate_params(parameters({**arguments, "tempnet": False, "tempnet_tau_max": 1.0}, **others))
    processor.validate_params(parameters({"tempnet": True}, temperature=1.0))
    processor.validate_params(parameters(None, **others))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tempnet_taumax": 1.2}, "tempnet_taumax is none of tempnet, tempnet_tau_max, tempnet_tau, "),
        ({"tempnet_tau": 0}, "tempnet_tau = 0 must be a finite number above 0"),
        ({"tempnet_then": "on"}, "tempnet_then needs tempnet_then_after or tempnet_then_at"),
        ({"tempnet_then": 1, "tempnet_then_at": 3}, "tempnet_then = 1 may be a τ, or a true that became a number"),
        ({"tempnet_then": 0.5, "tempnet_then_after": 0}, "tempnet_then_after = 0 must be a whole number"),
        ({"tempnet_then": 0.5, "tempnet_then_at": -3}, "tempnet_then_at = -3 must be the id of a token"),
    ],
    ids=str,
)
def test_a_switch_that_says_nothing_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RequestTemperature.parse({**arguments, "tempnet": False})


def test_by_default_every_request_that_can_have_it_has_it(
    fresh: Callable[[str], Any], network: TempNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEMPNET_DEFAULT", "on")
    interface = importlib.import_module(V1)
    processor = fresh("vllm").TempNetLogitsProcessor(MODEL, CPU, False)
    asked = [parameters(), parameters({"tempnet": False}), parameters(temperature=0.5), parameters({"tempnet": "so"})]
    added = [(row, one, None, []) for row, one in enumerate(asked)]
    processor.update_state(interface.BatchUpdate(batch_size=4, removed=[], added=added, moved=[]))
    logits = torch.randn(4, NUM_LOGITS)
    made = processor.apply(logits.clone())
    torch.testing.assert_close(made, as_in_transformers(network, logits, [1.4, None, None, None]), rtol=1e-5, atol=1e-5)


def test_a_model_with_fewer_logits_or_no_tempnet_is_refused(
    fresh: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = SimpleNamespace(device=CPU, max_num_reqs=2, vocab_size=VOCABULARY - 1)
    with pytest.raises(ValueError, match="vocabulary of 61, the served model has 60 logits"):
        fresh("vllm").TempNetLogitsProcessor(MODEL, state)
    with pytest.raises(ValueError, match="vocabulary of 61, the served model has 60 logits"):
        fresh("sglang").TempNetLogitProcessor()(torch.zeros(1, 60), [None])
    monkeypatch.delenv("TEMPNET_PATH")
    with pytest.raises(RuntimeError, match="TEMPNET_PATH is not set"):
        fresh("sglang").TempNetLogitProcessor()(torch.zeros(1, 64), [None])


def test_rows_of_sglang_get_the_temperatures_of_transformers(fresh: Callable[[str], Any], network: TempNet) -> None:
    processor = fresh("sglang").TempNetLogitProcessor
    assert issubclass(processor, importlib.import_module(SGLANG).CustomLogitProcessor)
    arguments: list[Any] = [None, {"tempnet_tau_max": 0.7, "__req__": object()}, {"tempnet": True}]
    arguments += [{"tempnet": False}, {"tempnet_tau_max": "wide"}]
    tau_max: list[float | None] = [1.4, 0.7, 1.4, None, None]
    logits = torch.randn(5, NUM_LOGITS) * 3
    for number in (3, 5):  # all rows have a TempNet, or not all
        made = processor()(logits[:number].clone(), arguments[:number])
        expected = as_in_transformers(network, logits[:number], tau_max[:number])
        torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5)
    expected = as_in_transformers(network, logits, [1.4] * 5)
    torch.testing.assert_close(processor()(logits.clone()), expected, rtol=1e-5, atol=1e-5)
