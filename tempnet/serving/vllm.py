"""Logits processor for vLLM, found by the entry point group `vllm.logits_processors`.

vLLM has two interfaces: that of its V1 engine, which tells a processor how the rows of its batch change, and that of its
newer model runner, which gives every request a slot and tells which slot each row of a step belongs to. Each requires its
own base class. `TempNetLogitsProcessor` is derived from both, as far as the installed version has them, and recognises the
interface by the arguments of its constructor. Without vLLM it can be imported too.

It needs raw logits. In V1 it declares that it may change the largest logit, although it does not, because only such
processors run before penalties and the request's temperature. A request that asks for predicted temperatures and
also for something that changes the logits before is refused; if the default applies them (`tempnet.serving.settings`), it is
served without them.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from tempnet.loading import find_tempnet
from tempnet.serving import derive
from tempnet.serving.batch import BatchTemperatures
from tempnet.serving.settings import AT_ARGUMENT, OFF, PATH_VARIABLE, RequestTemperature, is_on_by_default, network_path

# A request without temperatures, as a row of the slots: now, then, after, at of `_Row`.
_NEVER = math.inf
_NOTHING = (OFF, OFF, _NEVER, -1.0)

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
    """Raise ValueError for sampling parameters of a vLLM request under which τ is not that of raw logits.

    The message names the parameter, its value and the legal value.
    """
    for name, neutral in _NEUTRAL.items():
        value = getattr(parameters, name, neutral[0])
        if value not in neutral:
            raise ValueError(
                f"{name} = {value!r} changes the logits besides the TempNet, which predicts the temperature of the model's "
                f"own: set {name} = {neutral[0]!r}, or tempnet = false for this request"
            )


@dataclass(slots=True, kw_only=True)
class _Row:
    """What one request asks for: the setting of `tempnet.serving.batch` now, and the one that follows."""

    now: float
    then: float
    after: float
    """Number of generated tokens after which `then` applies; `_NEVER` for none."""
    at: int
    """Id of the token after which `then` applies; −1 for none."""
    tokens: Sequence[int] = ()
    """V1: the generated tokens, a list that vLLM extends."""
    num_read: int = 0

    @property
    def switches(self) -> bool:
        return self.after != _NEVER or self.at >= 0

    def follow(self) -> bool:
        """V1: switch if the generated tokens say so; return whether it did. A placeholder of −1 is read again later."""
        if not self.switches:
            return False
        new = list(self.tokens[self.num_read :])
        self.num_read += new.index(-1) if -1 in new else len(new)
        if len(self.tokens) < self.after and (self.at < 0 or self.at not in new):
            return False
        self.now, self.after, self.at = self.then, _NEVER, -1
        return True


class _Processor:
    """Logits processor for both interfaces of vLLM; see the docstring of this module."""

    def __init__(self, vllm_config: Any, second: Any, is_pin_memory: bool | None = None) -> None:
        """Load the TempNet, if the server has one.

        `second` is the device in V1, where `is_pin_memory` is given; the state of requests in the newer model runner.
        """
        device = second if is_pin_memory is not None else second.device
        self.temperatures = _load(vllm_config, device)
        if self.temperatures is None:
            return
        self.is_on_by_default = is_on_by_default()
        self.tokenizer = getattr(vllm_config.model_config, "tokenizer", None)
        self.rows: dict[int, _Row] = {}  # V1: of the rows with temperatures, now or later
        self.settings: Tensor | None = None
        if is_pin_memory is None:
            self.temperatures.check_logits(second.vocab_size)
            self.state = second
            # slot → now, then, after, at of `_Row`; float32 holds numbers of tokens and their ids exactly
            self.slots = np.tile(np.array(_NOTHING, dtype=np.float32), (second.max_num_reqs, 1))
            self.slots_on_device = torch.zeros(self.slots.shape, device=device)
            self.slots_changed = False

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Reject, by ValueError, a wrong value, and a request for temperatures with something that excludes them."""
        if RequestTemperature.parse(getattr(sampling_params, "extra_args", None)).is_ever_on:
            check_sampling(sampling_params)

    def is_argmax_invariant(self) -> bool:
        """Return False, so that V1 applies the processor to raw logits."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """V1: follow the changes of the batch in the order that vLLM documents: removed, added, moved.

        Generated tokens are read in :meth:`apply` only, because here some may still be placeholders of −1.
        """
        if batch_update is None or self.temperatures is None:
            return
        rows: dict[int, _Row | None] = {**self.rows, **dict.fromkeys(batch_update.removed)}
        for index, parameters, _, tokens in batch_update.added:
            rows[index] = self._row(parameters, tokens)
        for source, target, _ in batch_update.moved:  # a row that is not swapped moves to one that is free
            rows[source], rows[target] = rows.get(target), rows.get(source)
        self.rows = {index: row for index, row in rows.items() if row is not None}
        self.settings = None

    def _row(self, parameters: Any, tokens: Sequence[int] = ()) -> _Row | None:
        """Return what a request asks for, or None for a request without temperatures.

        An exception here would end the server, so what `validate_params` should have refused is served without them.
        """
        assert self.temperatures is not None
        try:
            asked = RequestTemperature.parse(getattr(parameters, "extra_args", None))
            now, then = asked.settings(self.temperatures.tau_max, is_on_by_default=self.is_on_by_default)
            if now == then == OFF:
                return None
            check_sampling(parameters)
            at = -1 if asked.at is None else self._token_id(asked.at)
        except ValueError as error:
            _log.warning("a request is sampled without a TempNet: %s", error)
            return None
        return _Row(now=now, then=then, after=_NEVER if asked.after is None else asked.after, at=at, tokens=tokens)

    @functools.lru_cache(maxsize=64)  # noqa: B019 - there is one object for a server, as long as it runs
    def _token_id(self, token: int | str) -> int:
        if isinstance(token, int):
            return token
        try:
            number = AutoTokenizer.from_pretrained(self.tokenizer, trust_remote_code=False).get_vocab()[token]
        except Exception as error:  # a tokenizer's own code may raise any exception
            raise ValueError(
                f"{AT_ARGUMENT} = {token!r}: {self.tokenizer} has no such token: {error!r:.100}"
            ) from error
        return int(number)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Newer model runner: note what the request in a slot asks for; returns whether its logits are changed."""
        if self.temperatures is None:
            return False
        row = self._row(sampling_params)
        self.slots[req_idx] = _NOTHING if row is None else (row.now, row.then, row.after, row.at)
        self.slots_changed = True
        return row is not None

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
        for row in self.rows.values():
            if row.follow():
                self.settings = None
        if not self.rows:
            return logits
        if self.settings is None or len(self.settings) != len(logits):
            self.temperatures.check_logits(logits.shape[-1])
            now = [self.rows[index].now if index in self.rows else OFF for index in range(len(logits))]
            self.settings = self.temperatures.to_device(now)
        return self.temperatures.divide(logits, self.settings)

    def _apply_to_slots(self, logits: Tensor, ctx: Any) -> Tensor:
        assert self.temperatures is not None
        asked = self.slots[ctx.idx_mapping_np]
        if not asked[:, :2].any():
            return logits
        # Only the device knows which rows belong to which request, and after which tokens they switch.
        table = self.slots_on_device[ctx.expanded_idx_mapping]
        settings = table[:, 0]
        if (asked[:, 2:] != _NOTHING[2:]).any():
            settings = torch.where(self._has_switched(table, ctx, asked), table[:, 1], settings)
        return self.temperatures.divide(logits, settings)

    def _has_switched(self, table: Tensor, ctx: Any, asked: np.ndarray) -> Tensor:
        """Return (rows,) whether what follows applies to each row, from the tokens that the device holds."""
        slots, position = ctx.expanded_idx_mapping.long(), torch.arange(len(table), device=table.device)
        start = self.state.prompt_len.gpu[slots]
        switched = ctx.pos + 1 - start >= table[:, 2]
        if (asked[:, 3] >= 0).any():
            longest = int(ctx.seq_lens_upper_bound_np.max())
            tokens, column = self.state.all_token_ids.gpu[:, :longest][slots], position.new_tensor(range(longest))
            is_new = (column >= start.unsqueeze(-1)) & (column < self.state.total_len.gpu[slots].unsqueeze(-1))
            switched |= ((tokens == table[:, 3:]) & is_new).any(-1)
            # Draft tokens before the row: those of its own request begin after its first row, which has a token of the text.
            drafts = ((ctx.input_ids == table[:, 3]) & (ctx.expanded_local_pos > 0)).cumsum(0)
            switched |= drafts > drafts[position - ctx.expanded_local_pos]
        return switched


def _load(vllm_config: Any, device: torch.device | str) -> BatchTemperatures | None:
    """Load the TempNet of TEMPNET_PATH, or the one in the directory of the served model; None if there is neither."""
    source, config = network_path(), vllm_config.model_config
    model = str(config.model)
    if source is None:
        if not model or find_tempnet(model) is None:
            _log.info("no TempNet: %s is not set, and the model %r has none in its directory", PATH_VARIABLE, model)
            return None
        source = model
    dtype = getattr(config, "head_dtype", getattr(config, "dtype", None))
    return BatchTemperatures.load(source, device, model, revision=getattr(config, "revision", None), dtype=dtype)


TempNetLogitsProcessor = derive(
    "TempNetLogitsProcessor",
    _Processor,
    ("vllm.v1.sample.logits_processor", "LogitsProcessor"),
    ("vllm.v1.worker.gpu.sample.logits_processor", "LogitsProcessor"),
)
