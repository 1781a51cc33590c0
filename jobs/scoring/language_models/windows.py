"""Texts as windows of tokens, and their negative log-likelihoods at several temperatures from one pass of the base model.

Windows are rolling windows of a document, or a context with its last word. The document-start token is placed before every
document and, unless this is turned off, before every context. Softmax, τ and entropy are computed in float32.
Shapes: B windows, T tokens, V vocabulary, N target tokens.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer
from lm_eval.utils import get_rolling_token_windows
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from jobs.scoring.language_models.config import TemperatureFunction
from pipelines.lines import decode, lines_of
from pipelines.local_copy import local_copy
from pipelines.text.tokenization import document_start_id, encode_prompt
from tempnet.devices import input_device
from tempnet.inference import record_hidden_states

# Number of elements of a float32 chunk of logits (64 MiB).
_CHUNK_ELEMENTS = 1 << 24
# Maximum number of tokens in one unit of work. It is fixed, so that no figure depends on the number of workers.
NUM_TOKENS_PER_SLICE = 1 << 15


@dataclass(frozen=True, slots=True)
class ScoredWindow:
    """Tokens that the model reads, and the targets of the last `len(targets)` of them."""

    inputs: tuple[int, ...]
    targets: tuple[int, ...]


def read_text(path: str) -> str:
    """Returns the content of a UTF-8 file at a path or URI."""
    try:
        text = decode(Path(local_copy(path)).read_bytes())
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error
    if not text.strip():
        raise ValueError(f"{path} holds no text")
    return text


def wikitext_pages(text: str) -> list[str]:
    """Returns the documents of a WikiText file, each from a heading `= Title =` on; a text without headings is one document.

    These are the pages that lm-evaluation-harness scores (62 in the test split, 60 in the validation split).
    """
    pages: list[list[str]] = [[]]
    for line in text.split("\n"):
        if re.fullmatch(r"=\s(?!=).*(?<!=)\s=", line.strip()):
            pages.append([])
        pages[-1].append(line)
    joined = ["\n".join(page) for page in pages]
    return [page for page in joined if page.strip()]


def num_words(page: str) -> int:
    """Returns the number of pieces between runs of whitespace, also empty ones at the ends, as lm-evaluation-harness does."""
    return len(re.split(r"\s+", page))


def document_windows(
    tokenizer: PreTrainedTokenizerFast, page: str, max_length: int, *, detokenize: bool
) -> list[ScoredWindow]:
    """Returns the rolling windows of a document, in which every token is a target exactly once.

    They do not overlap, except that the last one is filled up with context, as in lm-evaluation-harness.
    """
    text = wikitext_detokenizer({"page": page}) if detokenize else page
    ids = tokenizer.encode(text, add_special_tokens=False)
    windows = get_rolling_token_windows(
        ids, prefix_token=document_start_id(tokenizer), max_seq_len=max_length, context_len=1
    )
    return [ScoredWindow(tuple(inputs), tuple(targets)) for inputs, targets in windows]


def read_lambada(path: str, limit: int) -> list[tuple[str, str]]:
    """Returns (context, last word) for every line of a JSONL file with a field `text`, at most `limit` (0: all)."""
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
    tokenizer: PreTrainedTokenizerFast, context: str, continuation: str, max_length: int, *, document_start: bool
) -> ScoredWindow:
    """Returns the window of a context and the continuation to score, truncated on the left if it is too long.

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
    digest = hashlib.blake2b(digest_size=16)
    for window in windows:
        for part in (window.inputs, window.targets):
            digest.update(np.array([len(part), *part], dtype=np.int64).tobytes())
    return digest.hexdigest()


@dataclass(slots=True, kw_only=True)
class Score:
    nll: float = 0.0
    """Sum of −log p over the target tokens, in nats."""
    num_tokens: int = 0
    num_windows: int = 0
    num_greedy: int = 0
    """Number of windows in which every target has the largest logit."""
    tau: list[np.ndarray] = field(default_factory=list)
    """τ of the targets, as a list of arrays, window after window in the order of scoring."""
    entropy: list[np.ndarray] = field(default_factory=list)
    """Entropy of the same predictions at τ = 1, in nats."""


@torch.no_grad()
def score_windows(
    base: PreTrainedModel,
    windows: Sequence[ScoredWindow],
    functions: Mapping[str, TemperatureFunction],
    *,
    vocab_size: int | None,
    batch_size: int,
) -> dict[str, Score]:
    scores, device = {name: Score() for name in functions}, input_device(base)
    # sorted by length, so that batches need little padding
    order = sorted(windows, key=lambda window: -len(window.inputs))
    for at in range(0, len(order), batch_size):
        batch = order[at : at + batch_size]
        # Padding on the right needs no mask: the model is causal, and no position after the end of a window is scored.
        inputs = pad_sequence([torch.tensor(window.inputs) for window in batch], batch_first=True).to(device)
        with record_hidden_states(base) as seen:
            logits = base(input_ids=inputs, use_cache=False).logits.flatten(0, 1)  # (B·T, V)
        hidden = seen[-1].flatten(0, 1)
        wanted = [  # place among the B·T, row and target
            (row * inputs.shape[1] + len(window.inputs) - len(window.targets) + place, row, target)
            for row, window in enumerate(batch)
            for place, target in enumerate(window.targets)
        ]
        num_missed = torch.zeros(len(batch), dtype=torch.long, device=device)
        every = torch.tensor(wanted, dtype=torch.long, device=device).view(-1, 3)
        for chunk in every.split(num_rows_a_chunk(logits.shape[-1])):
            places, owners, targets = chunk.unbind(1)
            rows, states = logits[places][:, :vocab_size].float(), hidden[places.to(hidden.device)].to(device)
            num_missed.index_add_(0, owners, (rows.argmax(-1) != targets).long())
            log_probs = torch.log_softmax(rows, dim=-1)
            entropy = -(log_probs.exp() * log_probs).sum(-1).cpu().numpy()
            for name, function in functions.items():
                tau, score = function(rows, states), scores[name]
                scaled = rows / tau.unsqueeze(-1)
                nll = torch.logsumexp(scaled, -1) - scaled.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
                score.nll += float(nll.double().sum())
                score.tau.append(tau.cpu().numpy())
                score.entropy.append(entropy)
        for score in scores.values():
            score.num_tokens += len(wanted)
            score.num_windows += len(batch)
            score.num_greedy += int((num_missed == 0).sum())
    return scores


def num_rows_a_chunk(vocab_size: int) -> int:
    """Returns the number of rows of logits to hold in float32 at a time."""
    return max(1, _CHUNK_ELEMENTS // vocab_size)


@torch.no_grad()
def divide_(logits: Tensor, hidden: Tensor, function: TemperatureFunction) -> Tensor:
    """Divide float32 logits (B, T, V) of hidden states (B, T, d) by τ in place, a chunk of tokens at a time."""
    size = num_rows_a_chunk(logits.shape[-1])
    chunks = logits.view(-1, logits.shape[-1]).split(size), hidden.flatten(0, 1).split(size)
    for chunk, states in zip(*chunks, strict=True):
        chunk.div_(function(chunk, states.to(chunk.device)).unsqueeze(-1))
    return logits
