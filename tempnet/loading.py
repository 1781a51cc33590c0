"""Load a causal language model and the TempNet that belongs to it.

A TempNet is read from its own directory, from the directory of an exported model (`<model>/tempnet`), or from the
files of the published LLaMA-2-Chat networks (`LLM-Opt/TempNet-LLaMA2-Chat-{7B,13B,70B}-v0.1`), which have the
`released` configuration of the head. The LLaMA-1 and GPT-2 networks of the same authors differ in the range of τ and in
the input.

AutoDeco's checkpoints (arXiv 2510.26697, github.com/Zacks917/AutoDeco) hold a temperature head
τ = 2·sigmoid(w2ᵀ relu(W1 h + b1) + b2) of the hidden state h, alone or beside the weights of the whole model. It is read
as a TempNet of the kind hidden, up to 1e-6 of τ. Their top-p head is not used.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from tempnet.base_model import load_base
from tempnet.devices import DeviceMap, input_device, loading_options
from tempnet.models.output_head import StoredBase
from tempnet.network import CONFIG_FILE, HUB_NAME, PAIRED_DIRECTORY, WEIGHTS_FILE, TempNet, download
from tempnet.network_config import PublishedHead, TempNetConfig, read_json
from tempnet.weights import check_weights

_log = logging.getLogger(__name__)

# Files that may hold a published network: a separate file, or the weights of the whole model.
_RELEASED_FILES = ("tempnet.safetensors", "tempnet.bin")
_WHOLE_MODELS = ("model.safetensors", "pytorch_model.bin")
_WHOLE_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_RELEASED_PREFIX = "tempnet."
# Mapping from the names in published files to our parameters. `last` is w3 and −b of the pooling; `scaler` is log φ.
_RELEASED_KEYS = {
    "proj.0.weight": "transform.0.weight",
    "proj.0.bias": "transform.0.bias",
    "proj.3.weight": "projection",
    "proj.3.bias": "projection_bias",
    "scaler": "log_phi",
    "last.weight": "pool_weight",
    "last.bias": "pool_bias",
}
_AUTODECO_FILES = ("autodeco_heads.safetensors", "autodeco_heads.bin")
_AUTODECO_PREFIX = "temp_head."
_AUTODECO_KEYS = ("mlp.0.weight", "mlp.0.bias", "mlp.2.weight", "mlp.2.bias")
_LLAMA_VOCABULARY = 32_000
_GPT2_VOCABULARIES = (50_257, 50_304)  # The second one includes padding, as in the paper's Table 13.


def load_tempnet(source: str | Path, *, head: PublishedHead | None = None) -> TempNet:
    """Load a TempNet; it is returned in eval mode.

    The source is a directory that `TempNet.save_pretrained` wrote, the directory or hub name of an exported model that
    contains `tempnet/`, a published file or a directory with such files, the hub name of a published network, or the
    directory or hub name of an AutoDeco checkpoint. `head` says which of the authors' heads published files contain
    (:func:`released_tempnet`); by default it is inferred.

    A source that does not exist or contains no TempNet raises FileNotFoundError; ValueError is raised if the files hold
    something else, or it cannot be inferred which head they contain.
    """
    path = Path(source)
    if (directory := find_tempnet(source)) is not None:
        return TempNet.from_pretrained(directory)
    if path.is_file():
        return released_tempnet(_read(path, _RELEASED_PREFIX) or _read(path), head=head)
    if path.is_dir():
        find = functools.partial(_find_file, path)
    elif not HUB_NAME.fullmatch(str(source)):
        raise FileNotFoundError(
            f"{source} is missing: it is neither a directory, nor a file, nor the hub name of a model (owner/name)"
        )
    else:
        for prefix in (f"{PAIRED_DIRECTORY}/", ""):
            config, weights = (download(str(source), prefix + name) for name in (CONFIG_FILE, WEIGHTS_FILE))
            if config is not None and weights is not None and _is_ours(config):
                return TempNet.from_pretrained(weights.parent)
        find = functools.partial(download, str(source))
    if (config := find(CONFIG_FILE)) and (values := read_json(config)).get("model_type") == "autodeco":
        return _autodeco_tempnet(source, values, find)
    state = _released_state(find)
    if not state:
        hub = "" if path.is_dir() else ". It is no local directory, and on the hub it may need a login: hf auth login"
        raise FileNotFoundError(
            f"{source} holds no TempNet: neither {CONFIG_FILE} with {WEIGHTS_FILE}, nor {PAIRED_DIRECTORY}/, "
            f"nor a published one{hub}"
        )
    return released_tempnet(state, head=head)


def find_tempnet(source: str | Path) -> Path | None:
    """Return the local directory that `TempNet.save_pretrained` wrote (the source, or `tempnet/` in it), or None.

    A configuration without its weights raises FileNotFoundError.
    """
    for directory in (Path(source), Path(source) / PAIRED_DIRECTORY):
        if _is_ours(directory / CONFIG_FILE):
            if not (directory / WEIGHTS_FILE).is_file():
                raise FileNotFoundError(f"{directory} holds {CONFIG_FILE} of a TempNet, but not its {WEIGHTS_FILE}")
            return directory
    return None


def released_tempnet(state: Mapping[str, Tensor], *, head: PublishedHead | None = None) -> TempNet:
    """Create a network of the `released` configuration from the tensors of a published file, whose shapes give the sizes.

    The names of the tensors may have the prefix `tempnet.`. The head is "llama2", "llama1" or "gpt2"
    (`TempNetConfig.released`). By default it is inferred: GPT-2 from its vocabulary size, and LLaMA-2 from a vocabulary of
    32 000 and a `scaler` with one dimension, which only the export of the LLaMA-2 networks writes. ValueError is raised if a
    key is missing or unknown, the shapes do not fit together, the tensors contain NaN, or the head cannot be inferred.
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
    except RuntimeError as error:  # PyTorch raises this if the sizes do not fit together.
        raise ValueError(f"no published TempNet: {error}") from error
    check_weights(network, "the published TempNet")
    return network.eval()


def _published_head(state: Mapping[str, Tensor], vocab_size: int) -> PublishedHead:
    """Infer which head published tensors belong to; where they do not determine it, raise ValueError."""
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
    dtype: torch.dtype | str = torch.float32,
    trust_remote_code: bool = False,
    device_map: DeviceMap = None,
    fetch: Callable[[str], str] = str,
    **options: Any,
) -> tuple[PreTrainedModel, TempNet]:
    """Load a base model and its TempNet, both in eval mode, and check that they fit together.

    The TempNet is moved to the device of the model's input embeddings, where its logits arrive (`tempnet.devices`).

    Args:
        model: local directory or hub name of a Transformers causal LM, or of an export (`tempnet.base_model`).
        tempnet: source of the TempNet (see :func:`load_tempnet`). By default it is looked for in the model's directory.
        dtype: dtype of the base model; "int8" or "fp8" hold its weights in eight bits (`tempnet.devices`). The TempNet
            is always float32.
        trust_remote_code: whether to run code that comes with the model.
        device_map: how to spread the base over the GPUs and the memory of this machine, by accelerate: "auto", another name
            that Transformers knows, or name of a part → device. None: the base is on the CPU.
        fetch: returns a local path for a base model that an export refers to by a URI; by default URIs are refused.
        options: further options of `AutoModelForCausalLM.from_pretrained`.

    Raises:
        FileNotFoundError: if there is no TempNet, or no base model where the export says it is.
        ValueError: if another base model is there, the vocabularies do not fit together, or weights are truncated or
            contain NaN.
    """
    network = load_tempnet(model if tempnet is None else tempnet)
    options |= loading_options(dtype) | {"trust_remote_code": trust_remote_code, "device_map": device_map}
    base = load_base(model, fetch=fetch, **options)
    check_vocabulary(base, network)
    return base.eval(), network.to(input_device(base))


def check_vocabulary(base: PreTrainedModel | StoredBase, tempnet: TempNet) -> None:
    """Check that a TempNet can read the logits of a base model, of which it may have more, as padding.

    A TempNet on embeddings or on other hidden states, and fewer logits than the TempNet reads, raise ValueError.
    """
    if tempnet.config.kind == "embeddings":
        raise ValueError("the TempNet reads embeddings, not the logits of a language model")
    num_logits, size = base.get_output_embeddings().weight.shape
    if tempnet.config.reads_state and tempnet.config.state_size != size:
        raise ValueError(
            f"the TempNet reads hidden states of {tempnet.config.state_size} numbers, those of the base model have {size}"
        )
    if num_logits < tempnet.config.input_size:
        raise ValueError(
            f"the TempNet was built for a vocabulary of {tempnet.config.input_size}, the base model has {num_logits} logits"
        )


def _autodeco_tempnet(source: str | Path, config: dict[str, Any], find: Callable[[str], Path | None]) -> TempNet:
    """Return the temperature head of an AutoDeco checkpoint as a TempNet; without one of this form raise ValueError."""
    if not config.get("enable_temperature_head", config.get("train_temp", True)):
        raise ValueError(f"{source}: AutoDeco trained no temperature head there, and its top-p head alone gives no τ")
    state = _released_state(find, _AUTODECO_FILES, _AUTODECO_PREFIX)
    state = {name.removeprefix(_AUTODECO_PREFIX): value.float() for name, value in state.items()}
    if sorted(state) != sorted(_AUTODECO_KEYS):
        raise ValueError(
            f"{source} holds no temperature head of AutoDeco: {sorted(state)} are not {sorted(_AUTODECO_KEYS)}"
        )
    weight, bias, last, last_bias = (state[name] for name in _AUTODECO_KEYS)
    form: dict[str, Any] = {"activation": "relu", "projection": False, "pooling": "linear", "normalize_input": False}
    form |= {"pool_by_rho": False, "tau_min": 1e-6, "tau_max": 2.0, "hidden_size": len(weight)}
    network = TempNet(TempNetConfig.for_hidden(config["vocab_size"], weight.shape[1], with_logits=False, **form))
    ours = {"transform.0.weight": weight, "transform.0.bias": bias, "final.bias": last_bias}
    # The linear pooling divides by the number of its inputs.
    network.load_state_dict(ours | {"final.weight": last * len(weight)})
    check_weights(network, source)
    _log.warning("%s: the temperature head of AutoDeco is used, its top-p head is not", source)
    return network.eval()


def _is_ours(path: Path) -> bool:
    return path.is_file() and "input_size" in read_json(path)


def _released_state(
    find: Callable[[str], Path | None], files: Sequence[str] = _RELEASED_FILES, prefix: str = _RELEASED_PREFIX
) -> dict[str, Tensor]:
    """Return the tensors of a published network, or an empty dictionary if there are none.

    `find` returns the local path of a file by its name, or None; `files` may hold the network alone. In the weights of a
    whole model, its names begin with `prefix`.
    """
    for name in files:
        if (path := find(name)) is not None:
            return _read(path, prefix) or _read(path)
    for name in _WHOLE_MODELS:
        if (path := find(name)) is not None and (state := _read(path, prefix=prefix)):
            return state
    for name in _WHOLE_INDEXES:
        if (path := find(name)) is not None:
            where: dict[str, str] = read_json(path)["weight_map"]
            state = {}
            for shard in sorted({shard for key, shard in where.items() if key.startswith(prefix)}):
                if (part := find(shard)) is None:
                    raise FileNotFoundError(f"{path} names {shard}, which is not there")
                state |= _read(part, prefix=prefix)
            if state:
                return state
    return {}


def _read(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """Read the tensors of a file whose names begin with the prefix; a file without named tensors raises ValueError."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys() if name.startswith(prefix)}  # noqa: SIM118
        values = torch.load(path, map_location="cpu", weights_only=True)
        return {name: value for name, value in values.items() if name.startswith(prefix)}
    except Exception as error:  # A damaged file can raise almost any exception, depending on its first bytes.
        raise ValueError(f"{path} holds no tensors by name: {error!r:.200}") from error


def _find_file(directory: Path, name: str) -> Path | None:
    """Return the path of a file in a local directory, or None if it is not there."""
    return directory / name if (directory / name).is_file() else None
