"""A TempNet inside an inference server: vLLM (`tempnet.serving.vllm`) and SGLang (`tempnet.serving.sglang`)."""

from __future__ import annotations

import importlib
import types


def derive(name: str, processor: type, *interfaces: tuple[str, str]) -> type:
    """Return a class that is derived from a processor and from those interfaces (module, class) that are installed."""
    found = []
    for module, base in interfaces:
        try:
            found.append(getattr(importlib.import_module(module), base))
        except (ImportError, AttributeError):
            continue
    members = {"__module__": processor.__module__, "__doc__": processor.__doc__}
    return types.new_class(name, (processor, *found), exec_body=lambda namespace: namespace.update(members))
