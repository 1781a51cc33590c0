"""How text becomes the blocks on which a language model is trained and judged: which tokens are read, which are targets.

A document t1 … tn is read as `[start] t1 … tn`, everywhere in this project: in training, calibration, the headroom test,
prediction, evaluation, generation and rewards. The start is `pipelines.text.tokenization.document_start_id`. Its targets are
t1 … tn. The document's end, the end-of-text token after tn, is a target where the model knows it: see
`jobs.tasks.language_model.config.EndOfDocument`.
"""

from __future__ import annotations

from dataclasses import asdict, replace

from jobs.tasks.language_model.config import LanguageModelConfig
from pipelines.text.packing import PackingConfig
from pipelines.text.tokenization import load_tokenizer
from pipelines.text.windows import WindowConfig, default_stride


def check_is_not_empty(num_blocks: int) -> None:
    """Refuse a text without validation blocks.

    Raises:
        ValueError: naming the field.
    """
    if not num_blocks:
        raise ValueError(
            "data.validation holds no document, or, where it is empty, no document of data.train is held out: give more text"
        )


def blocks_layout(config: LanguageModelConfig, split: str) -> PackingConfig:
    """Return the layout of a prepared text: blocks of `data.context_length` tokens.

    In the blocks of validation, documents are cut as the headroom test cuts them. A model that cannot separate the
    documents in a block gets each window in a block of its own.

    Args:
        config: configuration of the run.
        split: train or validation.
    """
    length = config.data.context_length
    layout = PackingConfig.for_tokenizer(load_tokenizer(config.tokenizer), length)
    if not config.data.validation:
        layout = replace(layout, documents="others" if split == "train" else "held_out")
    if split == "train":
        return layout
    num_windows = 1 if config.data.attend_across_documents else 0
    return WindowConfig(**asdict(layout), stride=default_stride(length), num_windows=num_windows)
