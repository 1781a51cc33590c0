"""Custom logit processor for SGLang (`--enable-custom-logit-processor`).

A request names the processor by `TempNetLogitProcessor.to_str()`, and its `custom_params` are the arguments that
`tempnet.serving.settings` describes; naming the processor switches it on. The server's TempNet is that of
TEMPNET_PATH. SGLang makes a new processor for every batch, so the network is loaded once per process and device.

SGLang applies custom processors first in its sampler, before the temperature, but penalties, biases and grammars
come earlier and are not visible here: do not combine them with it, and leave the request's temperature at 1.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tempnet.serving import derive
from tempnet.serving.batch import BatchTemperatures
from tempnet.serving.settings import OFF, PATH_VARIABLE, THEN_ARGUMENT, RequestTemperature, network_path

_log = logging.getLogger(__name__)


@functools.lru_cache(maxsize=8)
def _load(source: str, device: torch.device) -> BatchTemperatures:
    arguments = importlib.import_module("sglang.srt.runtime_context").get_server_args()
    dtype = None if arguments.dtype == "auto" else getattr(torch, arguments.dtype)
    return BatchTemperatures.load(source, device, arguments.model_path, revision=arguments.revision, dtype=dtype)


class _Processor:
    """Custom logit processor that divides logits by predicted temperatures; see the docstring of this module."""

    def __call__(self, logits: Tensor, custom_param_list: Sequence[Mapping[str, Any] | None] | None = None) -> Tensor:
        """Return logits/τ, changed in place, of the requests that named this processor.

        It takes raw logits (n, V or more), and the arguments of each request, or None. Without TEMPNET_PATH RuntimeError is
        raised, and if the model has fewer logits than the TempNet reads, ValueError.
        """
        if (source := network_path()) is None:
            raise RuntimeError(f"{PATH_VARIABLE} is not set: start the server with the path of a TempNet in it")
        temperatures = _load(source, logits.device)
        temperatures.check_logits(logits.shape[-1])
        settings = [_setting(one, temperatures.tau_max) for one in custom_param_list or [None] * len(logits)]
        return temperatures.divide(logits, temperatures.to_device(settings))


def _setting(arguments: Mapping[str, Any] | None, own_tau_max: float) -> float:
    """Return the setting of a request (`tempnet.serving.settings.OFF`).

    An exception here would end the server, and SGLang has no earlier place to refuse a request, so that one with
    wrong arguments is served without a TempNet.
    """
    try:
        asked = RequestTemperature.parse(arguments)
        if asked.then is not None:
            raise ValueError(f"{THEN_ARGUMENT} is for vLLM: here generated tokens are known too late")
    except ValueError as error:
        _warn_once(str(error))
        return OFF
    return asked.settings(own_tau_max, is_on_by_default=True)[0]


@functools.lru_cache(maxsize=256)
def _warn_once(message: str) -> None:
    _log.warning("a request is sampled without a TempNet: %s", message)


_INTERFACE = ("sglang.srt.sampling.custom_logit_processor", "CustomLogitProcessor")
TempNetLogitProcessor = derive("TempNetLogitProcessor", _Processor, _INTERFACE)
