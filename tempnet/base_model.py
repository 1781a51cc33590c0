"""The base model of a TempNet: loaded from its own files, or from where an export that holds only the TempNet says it is.

An export of a frozen run need not repeat the base, which may be a thousand times as large as the TempNet. It then has,
instead of weights, a file `base_model.json` with the path, URI or hub name of the base and a digest of its weights, so that
another model at the same place is recognised.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES
from transformers.quantizers import AutoHfQuantizer

from tempnet.devices import check_precision
from tempnet.fingerprints import files_digest
from tempnet.weights import check_weight_files, check_weights, first_line, load_fitting

BASE_FILE = "base_model.json"
"""Name of the file in an export, or in a run's directory, that says which base model belongs to it."""

_ADAPTER_FILE = "adapter_config.json"
_WEIGHT_SUFFIXES = (".safetensors", ".bin")
_COMMIT = "commit "


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseReference:
    """Where a base model is, and how to recognise it."""

    path: str
    """Absolute path, URI or hub name."""
    digest: str
    """Digest of the files of its weights and of their configuration; of a model on the hub "commit " and its commit."""

    def save(self, directory: Path) -> None:
        """Write the reference as `base_model.json` into a local directory."""
        (directory / BASE_FILE).write_text(json.dumps(asdict(self), indent=1) + "\n")

    def check(self, digest: str) -> None:
        """Raise ValueError, naming the path and both digests, if the model that is now at the path has another one."""
        if digest != self.digest:
            raise ValueError(
                f"the base model {self.path} is not the one that its TempNet was trained on: its digest is {digest!r}, that "
                f"of the TempNet's base is {self.digest!r}. Put that model back, or train a new TempNet for this one"
            )


def read_reference(model: str | Path) -> BaseReference | None:
    """Return the reference that an export at a local path holds, or None; a damaged file raises ValueError."""
    file = Path(model) / BASE_FILE
    if not file.is_file():
        return None
    try:
        return BaseReference(**json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is damaged: it must hold path and digest of a base model: {error}") from error


def base_digest(place: str, *, parts: Sequence[str] = ("",), configurations: Collection[str] = ("config.json",)) -> str:
    """Return the digest of a base model for :class:`BaseReference`: of a local directory or, by its commit, of a hub name.

    That of a directory is the digest (`tempnet.fingerprints.files_digest`) of the files of weights, and of configurations
    with these names, in its `parts`, as far as they exist.
    """
    if Path(place).is_dir():
        files = [
            file
            for part in parts
            if (Path(place) / part).is_dir()
            for file in sorted((Path(place) / part).iterdir())
            if file.suffix in _WEIGHT_SUFFIXES or file.name in configurations
        ]
        return files_digest(files)
    config = AutoConfig.from_pretrained(place, trust_remote_code=False)
    return f"{_COMMIT}{getattr(config, '_commit_hash', None)}"


def read_config(place: str | Path, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Return the configuration of a causal language model at a local path or hub name, without looking at its weights.

    A composite model (text and images, as Gemma 3) is accepted. ValueError is raised, in one line, if there is no model, an
    adapter without its model, a model of another kind, or one whose weights are quantised by a library that is missing here.
    """
    directory = Path(place)
    if (directory / _ADAPTER_FILE).is_file() and not (directory / "config.json").is_file():
        raise ValueError(
            f"{place} holds an adapter and no model: merge it into its base by peft, `merge_and_unload()`, and save it by "
            "save_pretrained"
        )
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code)
    except Exception as error:  # a configuration of a stranger may raise any exception
        raise ValueError(f"{place} is no Transformers model directory or hub name: {first_line(error):.300}") from error
    has_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    is_encoder = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False)
    is_known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or has_code
    if config.is_encoder_decoder or is_encoder or not is_known:
        kind = "an encoder with a decoder" if config.is_encoder_decoder else "no causal language model"
        raise ValueError(
            f"{place} is {kind} ({config.model_type}): a model that predicts the next token of one text is needed, such as "
            "gpt2, llama or qwen"
        )
    _check_quantisation(place, config)
    return config


def _check_quantisation(place: str | Path, config: PretrainedConfig) -> None:
    values = getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(), "quantization_config", None
    )
    if values is None:
        return
    method = values.get("quant_method") if isinstance(values, dict) else values.quant_method
    remedy = "install what it needs, or give the model with weights that are not quantised"
    try:
        AutoHfQuantizer.from_config(values, pre_quantized=True).validate_environment()
    except (ImportError, KeyError, ValueError, TypeError) as error:
        raise ValueError(f"{place} holds weights quantised by {method}: {remedy}. {first_line(error):.200}") from error
    except RuntimeError:
        pass  # there is no GPU here, but perhaps where the model is to run


def find_base(model: str | Path, *, fetch: Callable[[str], str] = str) -> tuple[str, str | None]:
    """Return where the weights of a model or export are, a local path or a hub name, and the commit if it is fixed.

    `fetch` returns a local path for the URI of a base model; by default URIs are refused. A base model that an export refers
    to and that is missing raises FileNotFoundError, another one in its place ValueError.
    """
    reference = read_reference(model)
    if reference is None:
        return str(model), None
    if reference.digest.startswith(_COMMIT):
        return reference.path, reference.digest.removeprefix(_COMMIT)
    place = fetch(reference.path)
    if not Path(place).is_dir():
        raise FileNotFoundError(
            f"{model} holds only a TempNet, and its base model {reference.path} is missing here: put it there, or write its "
            f"new place into {Path(model) / BASE_FILE}"
        )
    reference.check(base_digest(place))
    return place, None


def load_base(model: str | Path, *, fetch: Callable[[str], str] = str, **options: Any) -> PreTrainedModel:
    """Load a base model, or that of an export (:func:`find_base`), and check its weights.

    `options` are those of `AutoModelForCausalLM.from_pretrained`. The errors are those of :func:`find_base`; also ValueError
    if weights are truncated, missing, of other shapes, or contain NaN.
    """
    place, revision = find_base(model, fetch=fetch)
    check_weight_files(place)
    config = read_config(place, trust_remote_code=options.get("trust_remote_code", False))
    if options.get("quantization_config") and getattr(config, "quantization_config", None):
        raise ValueError(f"{place} holds weights that are quantised already: leave out the precision of eight bits")
    if revision is not None:
        options["revision"] = revision
    base: PreTrainedModel = load_fitting(AutoModelForCausalLM, place, **options)
    check_precision(base, place)
    check_weights(base, place)
    return base
