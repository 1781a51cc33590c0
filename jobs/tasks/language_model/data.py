"""The data of a language model: blocks of text, the frozen base and its stored hidden states, the text it was trained on.

A document t1 … tn is read as `[start] t1 … tn`, everywhere in this project: in training, calibration, the headroom test,
prediction, evaluation, generation and rewards. The start is `pipelines.text.tokenization.document_start_id`. Its targets are
t1 … tn. The document's end, the end-of-text token after tn, is a target where the model knows it: see
`jobs.tasks.language_model.config.EndOfDocument`.

A temperature that is fitted to text which the model has learned answers for its memory, not for new text. So an export
records the archives that its base was trained on, by name and size: their content may be too large to read for a warning.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace
from pathlib import Path

from transformers import PreTrainedModel

from jobs.tasks.base import check_continues, load_stored, naming_field
from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.language_model.models import base_config
from pipelines.archives import Archive, list_archives
from pipelines.features import Features, features_directory
from pipelines.local_copy import local_copy
from pipelines.text.growing import GrowingManifest
from pipelines.text.manifest import Manifest
from pipelines.text.packing import PackingConfig
from pipelines.text.tokenization import load_tokenizer
from pipelines.text.windows import WindowConfig, default_stride
from tempnet.base_model import BaseReference, base_digest, read_reference
from tempnet.devices import linear_weights, loading_options

TRAINING_TEXT_FILE = "training_text.json"
_NUM_NAMES_SHOWN = 3

logger = logging.getLogger(__name__)


def check_is_not_empty(num_blocks: int) -> None:
    """Refuse a text without validation blocks by a ValueError that names the field."""
    if not num_blocks:
        raise ValueError(
            "data.validation holds no document, or, where it is empty, no document of data.train is held out: give more text"
        )


def blocks_layout(config: LanguageModelConfig, split: str) -> PackingConfig:
    """Return the layout of a prepared text, train or validation: blocks of `data.context_length` tokens.

    In the blocks of validation, documents are cut as the headroom test cuts them. A model that cannot separate the
    documents in a block gets each window in a block of its own.
    """
    length = config.data.context_length
    layout = PackingConfig.for_tokenizer(load_tokenizer(config.tokenizer), length)
    if not config.data.validation:
        layout = replace(layout, documents="others" if split == "train" else "held_out")
    if split == "train":
        return layout
    num_windows = 1 if config.data.attend_across_documents else 0
    return WindowConfig(**asdict(layout), stride=default_stride(length), num_windows=num_windows)


def refer_to_base(config: LanguageModelConfig) -> BaseReference:
    """Return the reference to the frozen base model of a run, whose paths are absolute.

    If model.path is an export that itself refers to a base, it is that base. The digest of a model at a URI is computed
    by a Ray task, because the driver may have no room for its weights, unless it trains itself.
    """
    reference = read_reference(local_copy(config.model.path, with_weights=False))
    place = reference.path if reference else config.model.path
    if "://" in place and not config.workers.local:
        import ray

        from jobs.engine.cluster import start_ray

        start_ray()
        digest: str = ray.get(ray.remote(_digest_of_copy).options(num_cpus=0).remote(place))
    else:
        digest = _digest_of_copy(place)
    if reference:
        reference.check(digest)
    return check_continues(config, config.model.path, BaseReference(path=place, digest=digest))


def _digest_of_copy(uri: str) -> str:
    return base_digest(local_copy(uri))


def check_eight_bits(config: LanguageModelConfig, base: PreTrainedModel) -> None:
    """Check that torchao is there, and that the base has linear layers, which alone are held in eight bits."""
    with naming_field("model."):
        loading_options(config.base_precision)
    if not linear_weights(base):
        raise ValueError(
            f"model.precision = {config.model.precision}: {config.model.path} is a {type(base).__name__}, which has no "
            "linear layers that could be held in eight bits: leave it out"
        )


def features_of(config: LanguageModelConfig, text: Manifest, base: BaseReference) -> Features:
    """Return where the hidden states of a frozen base for a prepared text are, or will be, in the precision of a run."""
    directory = features_directory(
        config.run.prepared_directory,
        text,
        base=base.digest,
        precision=config.base_precision,
        attend_across_documents=config.data.attend_across_documents,
    )
    hidden_size = base_config(config, load_tokenizer(config.tokenizer)).get_text_config().hidden_size
    return Features(directory=directory, text=text, hidden_size=hidden_size)


def features_to_read(
    config: LanguageModelConfig,
    base: BaseReference | None,
    train: Manifest | GrowingManifest,
    validation: Manifest,
) -> tuple[Features, Features] | None:
    """Return the stored hidden states of both data sets; None if the base is to compute them."""
    if not config.model.features:
        if config.model.device_map:
            raise ValueError(
                f"model.device_map = {config.model.device_map} spreads a base for jobs.prepare_features only: store its "
                "hidden states by that job and train with model.features, or divide the base by workers.zero_stage = 3"
            )
        return None
    assert base is not None
    assert isinstance(train, Manifest)
    return find_features(config, train, base, "train"), find_features(config, validation, base, "validation")


def find_features(config: LanguageModelConfig, text: Manifest, base: BaseReference, split: str) -> Features:
    """Return the stored hidden states of a prepared text, train or validation."""
    what = f"the hidden states of data.{split} for this base, text and precision are not stored"
    return load_stored(features_of(config, text, base), text, what=what, job="jobs.train_lm")


def write_training_text(directory: Path, text: str, base: str, *, loss: str) -> None:
    """Write the record of an exported model into its directory; nothing is written if no text is known.

    `text` is the run's training text; `base` the model that it began with, empty for random weights; `loss` trained the base,
    empty if only its TempNet was trained.
    """
    archives, base_loss = read_training_text(base) if base else (set(), "")
    if loss:
        archives = archives | _name_and_size(list_archives(text))
    if archives:
        found = [{"name": name, "num_bytes": size} for name, size in sorted(archives)]
        record = {"archives": found, "loss": loss or base_loss}
        (directory / TRAINING_TEXT_FILE).write_text(json.dumps(record, indent=1) + "\n")


def read_training_text(model: str) -> tuple[set[tuple[str, int]], str]:
    """Return name and size in bytes of the archives that a model was trained on, and its last loss; empty: not recorded."""
    path = Path(local_copy(model, with_weights=False)) / TRAINING_TEXT_FILE
    if not path.is_file():
        return set(), ""
    record = json.loads(path.read_text())
    return {(str(item["name"]), int(item["num_bytes"])) for item in record["archives"]}, str(record.get("loss", ""))


def warn_of_known_text(model: str, text: str, archives: list[Archive], *, field: str) -> list[str]:
    """Log a warning if a model was trained on some of the archives of the text in a field, and return their names."""
    known, _ = read_training_text(model)
    names = sorted(name for name, _ in known & _name_and_size(archives))
    if names:
        more = len(names) - _NUM_NAMES_SHOWN
        shown = ", ".join(names[:_NUM_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
        logger.warning(
            "%s = %s holds text that %s was trained on (%s): there it is surer than on new text, so what is found of its "
            "temperatures does not hold for new text. Give text that was held out",
            field,
            text,
            model,
            shown,
        )
    return names


def _name_and_size(archives: list[Archive]) -> set[tuple[str, int]]:
    return {(Path(archive.path).name, archive.num_bytes) for archive in archives}
