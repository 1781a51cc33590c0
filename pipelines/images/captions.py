"""Captions: tokenised to a fixed length, with noise, and read from a JSON file of their own (COCO, Flickr30K, Flickr8k).

Shapes: n captions of t tokens each.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from pipelines.object_store import version_of
from pipelines.problems import name_type
from pipelines.storage import resolve

RANDOM_WORD = "random"

# Keeps the random generators of the noise distinct from those of image views, which are keyed by (seed, epoch, id).
_NOISE_STREAM = 0x6E6F697365


@dataclass(frozen=True, kw_only=True)
class CaptionEncoder:
    """Tokenizer with output of a fixed length t: a longer caption keeps its special tokens, and padding is masked."""

    tokenizer: PreTrainedTokenizerFast
    """Tokenizer to apply; its own truncation and padding settings are not changed."""
    num_text_tokens: int = 30
    """Number t of tokens per caption, including special tokens and padding."""

    def __post_init__(self) -> None:
        num_special = self.tokenizer.num_special_tokens_to_add()
        if self.num_text_tokens <= num_special:
            raise ValueError(
                f"num_text_tokens = {self.num_text_tokens} must exceed the {num_special} special tokens that the "
                "tokenizer adds to every caption"
            )

    @cached_property
    def _backend(self) -> Tokenizer:
        """Copy of the backend tokenizer, because truncation and padding lengths are part of a tokenizer's state."""
        backend = Tokenizer.from_str(self.tokenizer.backend_tokenizer.to_str())
        backend.enable_truncation(self.num_text_tokens)
        # Masked positions are never read, so any token serves as padding if the tokenizer has no pad token (GPT-2).
        backend.enable_padding(length=self.num_text_tokens, pad_id=self.tokenizer.pad_token_id or 0)
        return backend

    def are_cut(self, texts: Sequence[str]) -> np.ndarray:
        """Return (n,) bool: which captions have more than t tokens and are therefore truncated."""
        encodings = self._backend.encode_batch(list(texts))
        return np.array([bool(encoding.overflowing) for encoding in encodings], dtype=bool)

    def encode(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """Tokenise n captions; return `input_ids` and `attention_mask`, each (n, t) int64."""
        encodings = self._backend.encode_batch(list(texts))
        rows = {
            "input_ids": [encoding.ids for encoding in encodings],
            "attention_mask": [encoding.attention_mask for encoding in encodings],
        }
        shape = len(encodings), self.num_text_tokens
        return {name: np.array(values, dtype=np.int64).reshape(shape) for name, values in rows.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionNoise:
    """Caption noise of TempNet's robustness experiment (arXiv 2404.04575, §6 and appendix D).

    With probability p, one word of a caption is either deleted or replaced by the word "random", with equal probability; a
    single word is always replaced. Both depend on (seed, pair id) only, so they are the same in every epoch, and a caption
    that is changed at p is also changed at any larger p.
    """

    share: float = 0.0
    """Probability p that a caption receives noise, in [0, 1]."""
    seed: int = 0

    def selects(self, pair: int) -> bool:
        """Return whether the caption of pair id `pair` receives noise."""
        return self.apply(RANDOM_WORD, pair)[1]

    def apply(self, caption: str, pair: int) -> tuple[str, bool]:
        """Return the caption of pair id `pair` as it is used in training, and whether noise was added to it."""
        if not self.share:
            return caption, False
        rng = np.random.default_rng([self.seed, _NOISE_STREAM, pair])
        if rng.random() >= self.share:
            return caption, False
        words = caption.split()
        is_deletion = rng.random() < 0.5 and len(words) > 1
        at = int(rng.integers(len(words)))
        words[at : at + 1] = [] if is_deletion else [RANDOM_WORD]
        return " ".join(words), True


@dataclass(frozen=True, kw_only=True)
class CaptionFile:
    """Captions by the path of their image; use :meth:`load` to read them from a file."""

    unnamed: ClassVar = "images that the captions do not name"
    captions: dict[str, tuple[str, ...]]
    """Mapping from an image's path, as the file spells it, to its captions in the order of the file."""
    invalid: tuple[tuple[str, str], ...] = ()
    """Place and reason of every record, or caption of a record, that cannot be used."""

    @classmethod
    def load(cls, uri: str, splits: Sequence[str] = ()) -> CaptionFile:
        """Read a JSON file in one of two forms.

        * Karpathy's form: `{"images": [{"filename", "filepath"?, "split", "sentences": [{"raw"}]}]}`, selected by `splits`.
        * A list of `{"image": path, "caption": string or list of strings}`; an image may occur several times.

        A record without a path or captions, and a caption that is no text, cost themselves (`invalid`).

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if the file has another form or no usable record, or if a split is unknown or not applicable.
        """
        # `--splits ""` gives one empty string, which selects no split.
        return _load(uri, tuple(filter(None, splits)), version_of(*resolve(uri)))

    def texts(self, name: str) -> tuple[str, ...]:
        """Return the captions of an image, given by its path as the file spells it."""
        return self.captions[name]

    def find(self, path: str) -> str | None:
        """Return the path in this file of the image that `path` names, or None if there is none.

        One of them must end in the other, by whole path components: `val2014/1.jpg` in the JSON file is found as
        `coco/val2014/1.jpg` and, if that is unambiguous, as `1.jpg`.
        """
        parts = path.split("/")
        for first in range(len(parts)):
            name = "/".join(parts[first:])
            if name in self.captions:
                return name
        return self._by_ending.get(path)

    @cached_property
    def _by_ending(self) -> dict[str, str | None]:
        """Mapping from every proper suffix of the images' paths to the path, or to None if several paths share it."""
        endings: dict[str, str | None] = {}
        for name in self.captions:
            parts = name.split("/")
            for first in range(1, len(parts)):
                ending = "/".join(parts[first:])
                endings[ending] = None if ending in endings else name
        return endings


class FolderNames:
    """In place of a :class:`CaptionFile`: the caption of an image is its class, the folder that it lies in."""

    unnamed = "images in no folder of a class"

    def find(self, path: str) -> str | None:
        """Return the path itself, or None if it has no folder or is hidden (`.DS_Store`, `__MACOSX/`)."""
        path = path.removeprefix("./")  # which `tar -c .` puts before every name
        is_hidden = any(part.startswith((".", "__")) for part in path.split("/"))
        return path if "/" in path and not is_hidden else None

    def texts(self, name: str) -> tuple[str, ...]:
        """Return the name of the last folder of a path: `airplane` for `train/airplane/0001.jpg`."""
        return (name.split("/")[-2],)


@lru_cache(maxsize=2)
def _load(uri: str, splits: tuple[str, ...], version: str) -> CaptionFile:
    filesystem, path = resolve(uri)
    with filesystem.open_input_stream(path) as stream:
        data = stream.read()
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:  # An integer of thousands of digits also raises ValueError.
        raise _explain(uri, f"{type(error).__name__}: {error}") from error
    if isinstance(content, dict):
        records, parse = content.get("images"), _parse_karpathy
        if splits:
            records = _select(records, uri, splits)
    else:
        records, parse = content, _parse_listed
        if splits:
            raise ValueError(
                f"splits = {' '.join(splits)}, but captions = {uri!r} is a list without splits: leave it empty"
            )
    if not isinstance(records, list):
        raise _explain(uri, f"it holds {name_type(content)}")
    captions: dict[str, tuple[str, ...]] = {}
    invalid: list[tuple[str, str]] = []
    for number, record in enumerate(records):
        try:
            name, texts = parse(record)
        except (KeyError, TypeError, AttributeError) as error:
            invalid.append((f"record {number}", f"{type(error).__name__}: {error}"))
            continue
        invalid += [
            (name, f"one of the captions is {name_type(text)}, not text") for text in texts if type(text) is not str
        ]
        if usable := tuple(text for text in texts if isinstance(text, str)):
            captions[name] = captions.get(name, ()) + usable
    if not captions:
        reason = f"{invalid[0][0]}: {invalid[0][1]}" if invalid else "it names no image"
        raise _explain(uri, reason)
    return CaptionFile(captions=captions, invalid=tuple(invalid))


def _explain(uri: str, reason: str) -> ValueError:
    return ValueError(
        f"captions = {uri!r} is not understood ({reason}); expected Karpathy's form, or a list of "
        '{"image": path, "caption": string or list}'
    )


def _select(images: object, uri: str, splits: tuple[str, ...]) -> list[Any]:
    """Return the records of Karpathy's form that belong to the splits."""
    records = [image for image in images if isinstance(image, dict)] if isinstance(images, list) else []
    present = {str(image.get("split")) for image in records}
    if unknown := sorted(set(splits) - present):
        splits_present = ", ".join(sorted(present)) or "none"
        raise ValueError(f"splits: {unknown[0]!r} is not in captions = {uri!r}; it has {splits_present}")
    return [image for image in records if image.get("split") in splits]


def _parse_karpathy(record: Any) -> tuple[str, list[object]]:
    name = "/".join(part for part in (record.get("filepath", ""), record["filename"]) if part)
    return name, [sentence["raw"] for sentence in record["sentences"]]


def _parse_listed(record: Any) -> tuple[str, list[object]]:
    name, caption = record["image"], record["caption"]
    if not isinstance(name, str):
        raise TypeError(f"the path of the image is {name_type(name)}, not text")
    return name, [caption] if isinstance(caption, str) or caption is None else list(caption)
