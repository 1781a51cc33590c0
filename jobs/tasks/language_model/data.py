"""Preparing the text of a language-model run."""

from __future__ import annotations

import time

from pipelines.text.manifest import Manifest
from pipelines.text.packing import PackingConfig
from pipelines.text.prepare import PrepareConfig, describe, prepare_text
from pipelines.text.tokenization import load_tokenizer

from jobs.tasks.language_model.config import LanguageModelConfig


def prepared(config: LanguageModelConfig, split: str) -> Manifest:
    """The packed blocks of `train` or `validation`, prepared beside the runs unless they are there already; needs Ray."""
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
    )
    print(f"{split:<12} {describe(manifest, time.monotonic() - started)}", flush=True)
    return manifest
