"""How text becomes the blocks on which a language model is trained."""

from __future__ import annotations

from jobs.tasks.language_model.config import LanguageModelConfig
from pipelines.text.packing import PackingConfig
from pipelines.text.tokenization import load_tokenizer


def blocks_layout(config: LanguageModelConfig) -> PackingConfig:
    """Return the layout of prepared text: blocks of `data.context_length` tokens."""
    return PackingConfig.for_tokenizer(load_tokenizer(config.tokenizer), config.data.context_length)
