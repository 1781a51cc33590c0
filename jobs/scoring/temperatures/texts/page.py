"""An HTML page that shows the first documents of a text with tokens coloured by τ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jobs.scoring.temperatures.texts.parts import token_arrays, tokenise
from jobs.scoring.temperatures.texts.predictor import Predictor
from jobs.scoring.temperatures.texts.settings import PredictionSettings
from jobs.tasks.language_model.report import ColouredText, coloured_page
from pipelines.archives import Archive
from pipelines.storage import exists, write_bytes
from pipelines.text.reading import Document, readable_documents
from pipelines.text.tokenization import load_tokenizer, token_pieces


def first_documents(
    settings: PredictionSettings, archives: list[Archive], num_tokens: int, **devices: Any
) -> dict[str, ColouredText]:
    """Returns key → (tokens, τ, entropy) for the first documents.

    The last document is cut so that there are at most `num_tokens` tokens in all. `devices` are options of `Predictor`.

    Raises:
        ValueError: if there is no readable document, with the first problems.
    """
    tokenizer = load_tokenizer(settings.model)
    problems: Counter[str] = Counter()
    examples: list[str] = []

    def readable() -> Iterator[Document]:
        for archive in archives:
            yield from readable_documents(settings.source, archive, settings.text_field, problems, examples)

    keys: list[str] = []
    documents: list[np.ndarray] = []
    num_left = num_tokens
    for document in readable():
        (ids,) = token_arrays(tokenise([document], tokenizer)["token_ids"])
        if len(ids):
            keys.append(document.key)
            documents.append(ids[:num_left])
            num_left -= len(documents[-1])
        if num_left == 0:
            break
    if not documents:
        raise ValueError(f"{settings.source} holds no readable text: {'; '.join(examples)}")
    predictions = Predictor(replace(settings, with_entropy=True), **devices).predict(documents)
    return {
        key: (token_pieces(tokenizer, ids.tolist()), prediction.tau.tolist(), prediction.entropy.tolist())
        for key, ids, prediction in zip(keys, documents, predictions, strict=True)
        if prediction.entropy is not None
    }


def write_page(path: str, text: str, sections: dict[str, ColouredText]) -> None:
    """Write the page for a text (whose name is shown in the title) to a file at a path or URI."""
    write_bytes(path, coloured_page(title=f"Temperatures of {text}", sections=sections).encode())


def check_page(path: str) -> None:
    """Check that the page can be written, before any work starts, by making an empty one unless there is one.

    Raises:
        OSError: with the reason why it cannot be written.
    """
    if "://" not in path:
        with Path(path).open("a", encoding="utf-8"):
            pass
    elif not exists(path):
        write_bytes(path, b"")
