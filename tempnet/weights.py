"""Reject unusable weights before anything is built or started, instead of where the damage first has an effect."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tempnet.devices import offloaded_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_SINGLE_FILE = "model.safetensors"
_WRAPPERS = ("_orig_mod.", "module.")
"""What `torch.compile` and `DistributedDataParallel` put before the names of all weights of the model that they wrap."""


def check_weight_files(source: str | Path) -> None:
    """Raise ValueError for truncated, corrupt or missing files of weights, which it names; only headers and sizes are read.

    The source is a directory, of which every `*.safetensors` file is checked, and what an index names, or one such file;
    anything else, such as a hub name, is ignored.
    """
    path = Path(source)
    for index in sorted(path.glob("*.safetensors.index.json")) if path.is_dir() else []:
        named = {path / file for file in _read_index(index).values()}
        missing = sorted(file.name for file in named if not file.is_file())
        if missing and len(missing) < len(named):  # a copy of the configuration alone has none of them
            raise ValueError(f"{path} lacks {', '.join(missing[:3])}, which {index.name} names: copy the model again")
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        if file.suffix != ".safetensors" or not file.is_file():
            continue
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError as error:
            raise ValueError(
                f"{file} ({file.stat().st_size} bytes) is cut or corrupt: {error}; copy or export it again"
            ) from error


def load_with_report(model_class: Any, source: str | Path, **options: Any) -> tuple[Any, list[str], list[str]]:
    """Load a Transformers model; return it with the names of weights that have random values, and of those not used.

    A weight has random values if it is missing or has another shape. If all names begin with what a wrapper has put there
    (`_orig_mod.`, `module.`), it is taken off, and said. Pickled objects other than tensors raise ValueError.
    """
    if wrapper := _wrapper_of(source):
        logger.warning("%s: the names of all weights begin with %r, which is taken off", source, wrapper)
        options["key_mapping"] = {f"^{re.escape(wrapper)}": ""}
    options.setdefault(
        "trust_remote_code", False
    )  # else Transformers asks, and reads the answer from the standard input
    # Transformers' own error about other shapes names no weight.
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        model, info = model_class.from_pretrained(source, **options)
    except UnpicklingError as error:  # its text would advise to run what is in the file
        raise ValueError(
            f"{source}: its pytorch_model*.bin holds more than tensors and is not read, because that could run code: "
            "get the weights as safetensors"
        ) from error
    random = info["missing_keys"] | {name for name, *_ in info["mismatched_keys"]}
    return model, sorted(random), sorted(info["unexpected_keys"])


def load_fitting(model_class: Any, source: str | Path, *, may_replace_head: bool = False, **options: Any) -> Any:
    """Load a Transformers model, and reject weights that do not fit it, in whose place it would have random ones.

    With `may_replace_head`, what lies beside the model's body may be new, as where a task begins with a body. Missing
    weights, or some of other shapes, raise ValueError, which names some of them.
    """
    model, random, unknown = load_with_report(model_class, source, **options)
    body = f"{model.base_model_prefix}."
    if may_replace_head:
        new = [name for name in random if not name.startswith(body) or ".pooler." in name]
        random = [name for name in random if name not in new]
        if new:
            logger.warning("%s: %s of a %s are new, with random values", source, _name_some(new), type(model).__name__)
    if random:
        instead = f" (it has {_name_some(unknown)})" if unknown else ""
        raise ValueError(
            f"{source} does not hold the weights of a {type(model).__name__}: {_name_some(random)} are missing or have other "
            f"shapes{instead}. Was it saved under other names, in parts, or with another configuration? Save the whole model "
            "by save_pretrained"
        )
    if unknown:
        logger.warning("%s: a %s does not use %s", source, type(model).__name__, _name_some(unknown))
    return model


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or the name of its type if it has none."""
    return (str(error).strip() or type(error).__name__).partition("\n")[0]


def _name_some(names: Iterable[str]) -> str:
    some = list(names)
    return f"{', '.join(some[:3])}{f' and {len(some) - 3} more' if len(some) > 3 else ''}"


def _wrapper_of(source: str | Path) -> str:
    """Return what a wrapper has put before the names of all weights of a local model; empty if nothing."""
    files = WeightFiles.find(source)
    names = files.files if files else {}
    return next((wrapper for wrapper in _WRAPPERS if names and all(name.startswith(wrapper) for name in names)), "")


def _read_index(index: Path) -> dict[str, str]:
    try:
        return dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} is damaged: it must map names of weights to files: {error}") from error


def check_weights(module: nn.Module, source: str | Path) -> None:
    """Raise ValueError for a model whose weights contain NaN, since every logit and temperature would then be NaN as well.

    It names the source, the first parameter with NaN, and the number of its NaN. Parameters without data are not checked.
    """
    for name, parameter in module.named_parameters():
        check_weight(name, parameter, source)
    for name, weight in offloaded_weights(module):
        check_weight(name, weight, source)


def check_weight(name: str, weight: Tensor, source: str | Path) -> None:
    """Reject a weight that contains NaN, as :func:`check_weights` does."""
    if is_traceable_wrapper_subclass(weight):  # one of torchao, which is held in fewer bits
        weight = weight.dequantize()
    elif weight.is_floating_point() and weight.itemsize == 1:  # float8, of which PyTorch computes no sums
        weight = weight.to(torch.bfloat16)
    # A sum is cheaper than a mask as large as the weight. It is NaN if a term is NaN or infinities cancel, so the values
    # are counted only then.
    if not weight.is_meta and bool(weight.detach().sum().isnan()) and (count := int(weight.isnan().sum())):
        raise ValueError(
            f"the weights of {source} hold NaN: {count} of the {weight.numel()} numbers of {name}. Did the training "
            "that made them diverge, or is the file damaged?"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """The safetensors files of a model, from which single weights are read without keeping their file in memory."""

    directory: Path
    files: Mapping[str, str]
    """Name of a weight → name of its file."""

    @classmethod
    def find(cls, source: str | Path) -> WeightFiles | None:
        """Return the files of a model in a local directory, or None if it has none; a damaged index raises ValueError."""
        directory = Path(source)
        index, single = directory / f"{_SINGLE_FILE}.index.json", directory / _SINGLE_FILE
        if index.is_file():
            return cls(directory=directory, files=_read_index(index))
        if not single.is_file():
            return None
        with safe_open(single, framework="pt") as file:
            return cls(directory=directory, files=dict.fromkeys(file.keys(), single.name))

    def read(self, name: str) -> Tensor:
        """Return a weight; its file is closed again, so that memory holds nothing else of it."""
        with safe_open(self.directory / self.files[name], framework="pt") as file:
            weight: Tensor = file.get_tensor(name).clone()
        return weight

    def read_into(self, name: str, target: Tensor) -> None:
        """Copy a weight to a tensor of its shape, which may have another dtype; NaN raises ValueError."""
        with safe_open(self.directory / self.files[name], framework="pt") as file:
            target.copy_(file.get_tensor(name))
        check_weight(name, target, self.directory)

    def match(self, model: PreTrainedModel) -> dict[str, str] | None:
        """Return name of each parameter → name of the weight for it, or None if a parameter has none of its shape.

        Weights may be stored without the prefix of the model's body, as GPT-2's are. A parameter that the model uses in
        several places has one weight under any of its names.
        """
        prefix = f"{model.base_model_prefix}."
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        matches = {}
        for name, parameter in model.named_parameters():
            aliases = names[id(parameter)]
            stored = [alias for alias in (*aliases, *(a.removeprefix(prefix) for a in aliases)) if alias in self.files]
            if not stored or self._shape(stored[0]) != tuple(parameter.shape):
                return None
            matches[name] = stored[0]
        return matches

    def _shape(self, name: str) -> tuple[int, ...]:
        with safe_open(self.directory / self.files[name], framework="pt") as file:
            return tuple(file.get_slice(name).get_shape())
