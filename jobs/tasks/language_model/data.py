"""Prepares the text on which a language model is trained."""

from __future__ import annotations

import time

from jobs.tasks.language_model.config import LanguageModelConfig
from pipelines.text.manifest import Manifest
from pipelines.text.packing import PackingConfig
from pipelines.text.prepare import PrepareConfig, describe, prepare_text
from pipelines.text.tokenization import load_tokenizer


def prepare_split(config: LanguageModelConfig, split: str) -> Manifest:
    """Return the manifest of the packed blocks of `train` or `validation`, preparing them unless this was done before.

    Ray must be running. The prepared blocks are kept in the directory of prepared data, which runs share.
    """
    started = time.monotonic()
    data = config.data
    manifest = prepare_text(
        PrepareConfig(
            source=getattr(data, split),
            tokenizer=config.tokenizer,
            text_field=data.text_field,
            max_bad_share=data.max_bad_share,
        ),
        PackingConfig.for_tokenizer(load_tokenizer(config.tokenizer), data.context_length),
        config.run.prepared_directory,
        max_bad_share_field="data.max_bad_share",
    )
    print(f"{split:<12} {describe(manifest, time.monotonic() - started)}", flush=True)
    return manifest
