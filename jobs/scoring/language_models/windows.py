"""Turning texts into windows of tokens to score: rolling windows of a document, or a context with its last word.

A window holds the tokens that the model reads, and the targets of its last positions. The document-start token (the one
that begins every document in training) is placed before every document and, unless this is turned off, before every
context.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer
from lm_eval.utils import get_rolling_token_windows
from transformers import PreTrainedTokenizerFast

from pipelines.lines import decode, lines_of
from pipelines.local_copy import local_copy
from pipelines.text.tokenization import document_start_id, encode_prompt

# Maximum number of tokens in one unit of work. It is fixed, so that no figure depends on the number of workers.
NUM_TOKENS_PER_SLICE = 1 << 15


@dataclass(frozen=True, slots=True)
class ScoredWindow:
    """Tokens that the model reads, and the targets of the last `len(targets)` of them."""

    inputs: tuple[int, ...]
    targets: tuple[int, ...]


def read_text(path: str) -> str:
    """Returns the content of a UTF-8 file at a path or URI.

    Raises:
        ValueError: if the file is not UTF-8, or is empty, or there is none at the URI.
    """
    try:
        text = decode(Path(local_copy(path)).read_bytes())
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error
    if not text.strip():
        raise ValueError(f"{path} holds no text")
    return text


def wikitext_pages(text: str) -> list[str]:
    """Returns the documents of a WikiText file; each begins at a heading `= Title =`.

    A text without headings is one document. These are the pages of the data set that lm-evaluation-harness scores (62
    in the test split, 60 in the validation split).
    """
    pages: list[list[str]] = [[]]
    for line in text.split("\n"):
        if re.fullmatch(r"=\s(?!=).*(?<!=)\s=", line.strip()):
            pages.append([])
        pages[-1].append(line)
    joined = ["\n".join(page) for page in pages]
    return [page for page in joined if page.strip()]


def num_words(page: str) -> int:
    """Returns the number of words as lm-evaluation-harness counts them.

    These are the pieces between runs of whitespace, including empty ones at the ends.
    """
    return len(re.split(r"\s+", page))


def document_windows(
    tokenizer: PreTrainedTokenizerFast, page: str, *, max_length: int, detokenize: bool
) -> list[ScoredWindow]:
    """Returns the rolling windows of a document, in which every token is a target exactly once.

    The document-start token precedes the first token. The windows do not overlap, except that the last one is filled up
    with context, as in lm-evaluation-harness.
    """
    text = wikitext_detokenizer({"page": page}) if detokenize else page
    ids = tokenizer.encode(text, add_special_tokens=False)
    windows = get_rolling_token_windows(
        ids, prefix_token=document_start_id(tokenizer), max_seq_len=max_length, context_len=1
    )
    return [ScoredWindow(tuple(inputs), tuple(targets)) for inputs, targets in windows]


def read_lambada(path: str, limit: int) -> list[tuple[str, str]]:
    """Returns (context, last word) for every line of a JSONL file with a field `text`, at most `limit` (0: all).

    Raises:
        ValueError: naming the line that cannot be read.
    """
    pairs: list[tuple[str, str]] = []
    for number, line in enumerate(lines_of(read_text(path)), start=1):
        if not line.strip():
            continue
        if limit and len(pairs) == limit:
            break
        try:
            text = json.loads(line)["text"].strip()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}, line {number}: no JSON object with a string `text`") from error
        if not text:
            raise ValueError(f"{path}, line {number}: `text` is empty")
        *context, word = text.rsplit(maxsplit=1)
        pairs.append((context[0] if context else "", word))
    return pairs


def encode_context(tokenizer: PreTrainedTokenizerFast, text: str, *, document_start: bool) -> list[int]:
    """Returns the tokens of a context: with the document-start token in front, or as the tokenizer encodes it."""
    return encode_prompt(tokenizer, text) if document_start else tokenizer.encode(text)


def pair_window(
    tokenizer: PreTrainedTokenizerFast, context: str, continuation: str, *, max_length: int, document_start: bool
) -> ScoredWindow:
    """Returns the window of a context and the continuation to score; one that is too long is truncated on the left.

    As in lm-evaluation-harness, the two are tokenised together and split where the context alone would end.
    """
    if context:
        whole = encode_context(tokenizer, context + continuation, document_start=document_start)
        num_context = len(encode_context(tokenizer, context, document_start=document_start))
    else:
        whole = [document_start_id(tokenizer), *tokenizer.encode(continuation, add_special_tokens=False)]
        num_context = 1
    targets = whole[num_context:]
    return ScoredWindow(tuple(whole[:-1][-max_length:]), tuple(targets[-max_length:]))


def slices(windows: Sequence[ScoredWindow]) -> Iterator[list[ScoredWindow]]:
    """Yields groups of consecutive windows with at most NUM_TOKENS_PER_SLICE tokens each, or a single longer window."""
    part: list[ScoredWindow] = []
    num_tokens = 0
    for window in windows:
        if part and num_tokens + len(window.inputs) > NUM_TOKENS_PER_SLICE:
            yield part
            part, num_tokens = [], 0
        part.append(window)
        num_tokens += len(window.inputs)
    if part:
        yield part


def windows_digest(windows: Sequence[ScoredWindow]) -> str:
    """Returns a hash of the windows' tokens, as 32 hex digits."""
    digest = hashlib.blake2b(digest_size=16)
    for window in windows:
        for part in (window.inputs, window.targets):
            digest.update(np.array([len(part), *part], dtype=np.int64).tobytes())
    return digest.hexdigest()
