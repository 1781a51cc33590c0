"""Logits processor for vLLM, found by the entry point group `vllm.logits_processors`.

vLLM has two interfaces: that of its V1 engine, which tells a processor how the rows of its batch change, and that of
its newer model runner, which gives every request a slot and tells which slot each row of a step belongs to. Both
look for processors under the same entry point, and each requires its own base class. `TempNetLogitsProcessor` is
therefore derived from the classes of both, as far as the installed version has them, and recognises the interface by
the arguments of its constructor. Without vLLM it can be imported too.

It needs raw logits. In V1 it declares that it may change the largest logit, although it does not, because only such
processors run before penalties and the request's temperature. A request that asks for predicted temperatures and
also for something that changes the logits before is refused. If the default applies them (`tempnet.serving.settings`), such a
request is served without them.
"""

from __future__ import annotations

import importlib
import logging
import types
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tempnet.loading import find_tempnet, load_tempnet
from tempnet.serving.batch import BatchTemperatures
from tempnet.serving.hidden_from_logits import load_output_layer
from tempnet.serving.settings import PATH_VARIABLE, RequestTemperature, is_on_by_default, network_path

_log = logging.getLogger("vllm.tempnet")  # vLLM shows what its own loggers say

# Sampling parameters that change the logits before or after the TempNet, and the values at which they do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "temperature": (1.0, None),
    "repetition_penalty": (1.0, None),
    "frequency_penalty": (0.0, None),
    "presence_penalty": (0.0, None),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None, []),
    "bad_words": (None, []),
    "min_tokens": (0, None),
    "structured_outputs": (None,),
}


def check_sampling(parameters: Any) -> None:
    """Reject sampling parameters of a vLLM request under which τ would be another one than predicted from raw logits.

    Raises:
        ValueError: if the request would get no temperatures, or wrong ones; the message names the parameter, its
            value and the legal value.
    """
    for name, neutral in _NEUTRAL.items():
        value = getattr(parameters, name, neutral[0])
        if value not in neutral:
            raise ValueError(
                f"{name} = {value!r} changes the logits besides the TempNet, which predicts the temperature of the model's "
                f"own: set {name} = {neutral[0]!r}, or tempnet = false for this request"
            )


class _Requests:
    """Decides which requests of a server are sampled at predicted temperatures, and with which τ_max."""

    def __init__(self, own_tau_max: float) -> None:
        self.own_tau_max = own_tau_max
        self.is_on_by_default = is_on_by_default()

    def tau_max(self, parameters: Any) -> float | None:
        """Return τ_max of a request, or None for a request without predicted temperatures.

        An exception here would end the server, so what `validate_params` should have refused is served without them.
        """
        try:
            asked = RequestTemperature.parse(getattr(parameters, "extra_args", None))
            if not (self.is_on_by_default if asked.is_on is None else asked.is_on):
                return None
            check_sampling(parameters)
        except ValueError as error:
            _log.warning("a request is sampled without a TempNet: %s", error)
            return None
        return self.own_tau_max if asked.tau_max is None else asked.tau_max


class _Processor:
    """Logits processor for both interfaces of vLLM; see the docstring of this module."""

    def __init__(self, vllm_config: Any, second: Any, is_pin_memory: bool | None = None) -> None:
        """Load the TempNet, if the server has one.

        Args:
            vllm_config: configuration of the server.
            second: the device in V1; the state of requests in the newer model runner.
            is_pin_memory: given in V1 only.
        """
        device = second if is_pin_memory is not None else second.device
        self.temperatures = _load(vllm_config, device)
        if self.temperatures is None:
            return
        self.requests = _Requests(self.temperatures.tau_max)
        self.rows: dict[int, float] = {}  # V1: row → τ_max, of the rows with predicted temperatures
        self.row_tensors: tuple[Tensor, Tensor] | None = None
        if is_pin_memory is None:
            self.temperatures.check_logits(second.vocab_size)
            self.slots = np.zeros(second.max_num_reqs, dtype=np.float32)  # slot → τ_max, 0 for none
            self.slots_on_device = torch.zeros(second.max_num_reqs, device=device)
            self.slots_changed = False

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Reject a request that asks for predicted temperatures and for something that excludes them.

        Raises:
            ValueError: if an argument has a wrong value, or parameters exclude each other (:func:`check_sampling`).
        """
        if RequestTemperature.parse(getattr(sampling_params, "extra_args", None)).is_on:
            check_sampling(sampling_params)

    def is_argmax_invariant(self) -> bool:
        """Return False, so that V1 applies the processor to raw logits."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """V1: follow the changes of the batch in the order that vLLM documents: removed, added, moved.

        Tokens are not read, so that placeholder tokens of −1 and outputs that lag behind do not matter.
        """
        if batch_update is None or self.temperatures is None:
            return
        for index in batch_update.removed:
            self.rows.pop(index, None)
        for index, parameters, *_ in batch_update.added:
            self._set_row(index, self.requests.tau_max(parameters))
        for source, target, direction in batch_update.moved:
            moved, replaced = self.rows.pop(source, None), self.rows.pop(target, None)
            self._set_row(target, moved)
            if direction.name == "SWAP":
                self._set_row(source, replaced)
        self.row_tensors = None

    def _set_row(self, index: int, tau_max: float | None) -> None:
        if tau_max is None:
            self.rows.pop(index, None)
        else:
            self.rows[index] = tau_max

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Newer model runner: note what the request in a slot asks for; returns whether its logits are changed."""
        if self.temperatures is None:
            return False
        tau_max = self.requests.tau_max(sampling_params)
        self.slots[req_idx] = tau_max or 0.0
        self.slots_changed = True
        return tau_max is not None

    def apply_staged_writes(self) -> None:
        """Newer model runner: bring what was noted to the device, once before each step."""
        if self.temperatures is not None and self.slots_changed:
            self.slots_on_device = self.temperatures.to_device(self.slots.tolist())
            self.slots_changed = False

    def apply(self, logits: Tensor, ctx: Any = None) -> Tensor:
        """Divide the logits (rows, vocabulary) of the requests that asked for it by their τ, in place."""
        if self.temperatures is None:
            return logits
        if ctx is not None:
            return self._apply_to_slots(logits, ctx)
        if not self.rows:
            return logits
        if self.row_tensors is None:
            self.temperatures.check_logits(logits.shape[-1])
            on, to_device = sorted(self.rows), self.temperatures.to_device
            self.row_tensors = to_device(on, torch.int64), to_device([self.rows[row] for row in on])
        rows, tau_max = self.row_tensors
        return self.temperatures.divide(logits, tau_max, rows=None if len(rows) == len(logits) else rows)

    def _apply_to_slots(self, logits: Tensor, ctx: Any) -> Tensor:
        assert self.temperatures is not None
        slots = ctx.idx_mapping_np
        on = np.flatnonzero(self.slots[slots])
        if len(on) == 0:
            return logits
        tau_max = self.slots_on_device[ctx.expanded_idx_mapping]
        if len(on) == len(slots):
            return self.temperatures.divide(logits, tau_max)
        if len(logits) == len(slots):
            rows = self.temperatures.to_device(on.tolist(), torch.int64)
            return self.temperatures.divide(logits, tau_max[rows], rows=rows)
        # With draft tokens only the device knows which rows belong to which request. To wait for it would cost more than
        # to divide all rows.
        divided = self.temperatures.divide(logits.clone(), tau_max)
        return logits.copy_(torch.where((tau_max > 0.0).unsqueeze(-1), divided, logits))


def _load(vllm_config: Any, device: torch.device | str) -> BatchTemperatures | None:
    """Load the TempNet of TEMPNET_PATH, or the one in the directory of the served model; None if there is neither."""
    source, config = network_path(), vllm_config.model_config
    model = str(config.model)
    if source is None:
        if not model or find_tempnet(model) is None:
            _log.info("no TempNet: %s is not set, and the model %r has none in its directory", PATH_VARIABLE, model)
            return None
        source = model
    tempnet, layer = load_tempnet(source), None
    if tempnet.config.reads_state:
        layer = load_output_layer(model, revision=config.revision, dtype=getattr(config, "head_dtype", config.dtype))
    temperatures = BatchTemperatures(tempnet, device, layer)
    figures = "" if temperatures.hidden is None else f"; hidden states from logits: {temperatures.hidden.figures}"
    _log.info("TempNet of kind %s from %s%s", tempnet.config.kind, source, figures)
    return temperatures


def _interfaces() -> tuple[type, ...]:
    """Return the base classes of the interfaces that the installed vLLM has; none without vLLM."""
    found = []
    for module in ("vllm.v1.sample.logits_processor", "vllm.v1.worker.gpu.sample.logits_processor"):
        try:
            found.append(importlib.import_module(module).LogitsProcessor)
        except (ImportError, AttributeError) as error:
            _log.debug("vLLM's interface %s is not here: %s", module, error)
    return tuple(found)


TempNetLogitsProcessor = types.new_class(
    "TempNetLogitsProcessor",
    (_Processor, *_interfaces()),
    exec_body=lambda namespace: namespace.update(__module__=__name__, __doc__=_Processor.__doc__),
)
