"""Loading what temperatures are used with: a causal language model, and the TempNet that goes with it.

A TempNet is found in a directory of its own, beside an exported model (`<model>/tempnet`), or in the files of the published
LLaMA-2-Chat networks (`LLM-Opt/TempNet-LLaMA2-Chat-{7B,13B,70B}-v0.1`), whose head is the `released` variant. The authors'
LLaMA-1 and GPT-2 networks have the same tensors under the same names, but another range of τ and another input.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tempnet.network import CONFIG_FILE, PAIRED_DIRECTORY, WEIGHTS_FILE, PublishedHead, TempNet, TempNetConfig
from tempnet.weights import check_weight_files, check_weights

# Where the published networks may lie: a file of their own, or among the weights of the whole model.
_RELEASED_FILES = ("tempnet.safetensors", "tempnet.bin")
_WHOLE_MODELS = ("model.safetensors", "pytorch_model.bin")
_WHOLE_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_RELEASED_PREFIX = "tempnet."
# Key of the published files → our parameter. `last` is w3 and −b of the pooling; `scaler` is log φ.
_RELEASED_KEYS = {
    "proj.0.weight": "transform.0.weight",
    "proj.0.bias": "transform.0.bias",
    "proj.3.weight": "projection",
    "proj.3.bias": "projection_bias",
    "scaler": "log_phi",
    "last.weight": "pool_weight",
    "last.bias": "pool_bias",
}
_LLAMA_VOCABULARY = 32_000
_GPT2_VOCABULARIES = (50_257, 50_304)  # the second one is padded, as in the paper's Table 13


def load_tempnet(source: str | Path, *, head: PublishedHead | None = None) -> TempNet:
    """The network in eval mode.

    Args:
        source: a directory that `TempNet.save_pretrained` wrote; an exported model with `tempnet/` in it; a published
            file, a directory with published files, or the hub name of a published network.
        head: which of the authors' heads published files hold (see :func:`released_tempnet`). Default: what they show.

    Raises:
        FileNotFoundError: if nothing of the kind is there.
        ValueError: if the files hold something else, or do not show which head they hold.
    """
    path = Path(source)
    if (directory := find_tempnet(source)) is not None:
        return TempNet.from_pretrained(directory)
    if path.is_file():
        return released_tempnet(_read(path, _RELEASED_PREFIX) or _read(path), head=head)
    if path.is_dir():
        state = _released_state(lambda name: path / name if (path / name).is_file() else None)
    elif not _HUB_NAME.fullmatch(str(source)):
        raise FileNotFoundError(
            f"{source} is missing: it is neither a directory, nor a file, nor the hub name of a model (owner/name)"
        )
    else:
        files = [_download(str(source), f"{PAIRED_DIRECTORY}/{name}") for name in (CONFIG_FILE, WEIGHTS_FILE)]
        if files[0] is not None and files[1] is not None:
            return TempNet.from_pretrained(files[1].parent)
        state = _released_state(lambda name: _download(str(source), name))
    if not state:
        raise FileNotFoundError(
            f"{source} holds no TempNet: neither {CONFIG_FILE} with {WEIGHTS_FILE}, nor {PAIRED_DIRECTORY}/, "
            "nor a published one"
        )
    return released_tempnet(state, head=head)


def find_tempnet(source: str | Path) -> Path | None:
    """The local directory that `TempNet.save_pretrained` wrote: the source itself or `tempnet/` in it; else None."""
    for directory in (Path(source), Path(source) / PAIRED_DIRECTORY):
        if (directory / WEIGHTS_FILE).is_file() and _is_ours(directory / CONFIG_FILE):
            return directory
    return None


def released_tempnet(state: Mapping[str, Tensor], *, head: PublishedHead | None = None) -> TempNet:
    """The `released` variant from the tensors of a published file; sizes are read off the shapes.

    Args:
        state: the tensors by name, with or without the prefix `tempnet.`.
        head: llama2, llama1 or gpt2: they differ in the range of τ and in what the network reads
            (`TempNetConfig.released`). Default: GPT-2 for its vocabulary; LLaMA-2 for a vocabulary of 32 000 whose `scaler`
            has one dimension, as only the export of the LLaMA-2 networks writes it.

    Raises:
        ValueError: if a key is missing or unknown, the tensors hold NaN, or they do not show which head they are of.
    """
    state = {name.removeprefix(_RELEASED_PREFIX): value for name, value in state.items()}
    if set(state) != set(_RELEASED_KEYS):
        missing, unknown = sorted(set(_RELEASED_KEYS) - set(state)), sorted(set(state) - set(_RELEASED_KEYS))
        raise ValueError(f"no published TempNet: missing keys {missing}, unknown keys {unknown[:8]}")
    hidden_size, vocab_size = state["proj.0.weight"].shape
    sizes = {"hidden_size": hidden_size, "num_prototypes": len(state["proj.3.weight"])}
    config = TempNetConfig.released(vocab_size, head=head or _published_head(state, vocab_size), **sizes)
    network = TempNet(config)
    ours = {ours: state[theirs].float() for theirs, ours in _RELEASED_KEYS.items()}
    ours["pool_weight"] = ours["pool_weight"].flatten()
    ours["pool_bias"] = -ours["pool_bias"].flatten()
    ours["log_phi"] = ours["log_phi"].flatten()
    try:
        network.load_state_dict(ours)
    except RuntimeError as error:  # what PyTorch raises for sizes that do not belong together
        raise ValueError(f"no published TempNet: {error}") from error
    check_weights(network, "the published TempNet")
    return network.eval()


def _published_head(state: Mapping[str, Tensor], vocab_size: int) -> PublishedHead:
    """Which head published tensors are of.

    Raises:
        ValueError: if they do not show it.
    """
    if vocab_size in _GPT2_VOCABULARIES:
        return "gpt2"
    if vocab_size == _LLAMA_VOCABULARY and state["scaler"].ndim == 1:
        return "llama2"
    raise ValueError(
        f"a published TempNet for a vocabulary of {vocab_size} whose files do not show which head it has: name it by "
        "head='llama2' (τ in (0.01, 1.2), reads logits less their maximum), 'llama1' (τ in (0.01, 2), raw logits) or 'gpt2' "
        "(τ in (0.5, 5), raw logits). For the commands, save it once: "
        "tempnet.loading.load_tempnet(source, head=…).save_pretrained(directory)"
    )


def load_causal_lm(
    model: str | Path,
    tempnet: str | Path | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    **options: Any,
) -> tuple[PreTrainedModel, TempNet]:
    """A base model and its TempNet, both in eval mode, that fit each other, on the device of the output weight.

    Args:
        model: local directory or hub name of a Transformers causal LM.
        tempnet: where the TempNet is (see :func:`load_tempnet`). Default: beside the model.
        dtype: of the base model; the TempNet is always float32.
        trust_remote_code: run code that comes with the model.
        options: passed to `AutoModelForCausalLM.from_pretrained`.

    Raises:
        ValueError: if the vocabularies disagree, or weights are cut or hold NaN.
    """
    network = load_tempnet(model if tempnet is None else tempnet)
    check_weight_files(model)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, trust_remote_code=trust_remote_code, **options)
    check_vocabulary(base, network)
    check_weights(base, model)
    return base.eval(), network.to(base.get_output_embeddings().weight.device)


def check_vocabulary(base: PreTrainedModel, tempnet: TempNet) -> None:
    """Refuse a base model that has fewer logits than the TempNet reads (more are padding), and a TempNet of embeddings.

    Raises:
        ValueError: naming both.
    """
    if tempnet.config.kind != "logits":
        raise ValueError(f"the TempNet reads {tempnet.config.kind}, not the logits of a language model")
    num_logits = base.get_output_embeddings().weight.shape[0]
    if num_logits < tempnet.config.input_size:
        raise ValueError(
            f"the TempNet was built for a vocabulary of {tempnet.config.input_size}, the base model has {num_logits} logits"
        )


def _is_ours(path: Path) -> bool:
    return path.is_file() and "input_size" in json.loads(path.read_text())


def _released_state(find: Callable[[str], Path | None]) -> dict[str, Tensor]:
    """The tensors of a published network among the files that `find(name)` gives a path for."""
    for name in _RELEASED_FILES:
        if (path := find(name)) is not None:
            return _read(path)
    for name in _WHOLE_MODELS:
        if (path := find(name)) is not None and (state := _read(path, prefix=_RELEASED_PREFIX)):
            return state
    for name in _WHOLE_INDEXES:
        if (path := find(name)) is not None:
            where: dict[str, str] = json.loads(path.read_text())["weight_map"]
            state = {}
            for shard in sorted({shard for key, shard in where.items() if key.startswith(_RELEASED_PREFIX)}):
                if (part := find(shard)) is None:
                    raise FileNotFoundError(f"{path} names {shard}, which is not there")
                state |= _read(part, prefix=_RELEASED_PREFIX)
            if state:
                return state
    return {}


def _read(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of a file whose names begin with the prefix.

    Raises:
        ValueError: if it is no file of tensors.
    """
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys() if name.startswith(prefix)}  # noqa: SIM118
        values = torch.load(path, map_location="cpu", weights_only=True)
        return {name: value for name, value in values.items() if name.startswith(prefix)}
    except Exception as error:  # a damaged file raises whatever its first bytes happen to mean to the reader
        raise ValueError(f"{path} holds no tensors by name: {error!r:.200}") from error


def _download(repository: str, name: str) -> Path | None:
    """A file of a hub repository, or None if it has none of this name."""
    try:
        return Path(hf_hub_download(repository, name))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError):
        return None
