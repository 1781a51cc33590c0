"""Captions that come in a json of their own, beside tars or directories of images: COCO, Flickr30K, Flickr8k."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from pipelines.storage import resolve


@dataclass(frozen=True, kw_only=True)
class CaptionFile:
    """Captions by the path of their image; read it with :meth:`load`."""

    captions: dict[str, tuple[str, ...]]
    """Path as the file gives it → its captions, in order."""

    @classmethod
    def load(cls, uri: str, splits: Sequence[str] = ()) -> CaptionFile:
        """Read a json in either form.

        * Karpathy's: `{"images": [{"filename", "filepath"?, "split", "sentences": [{"raw"}]}]}`; only the images of
          `splits`, or all of them if it is empty.
        * a list of `{"image": path, "caption": string or list of strings}`; an image may occur several times.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if it has another form, or a split is unknown or not applicable.
        """
        return _load(uri, tuple(filter(None, splits)))  # `--splits ""` names none

    def find(self, path: str) -> str | None:
        """The image of this file that a path names, or None: either path must end in the other, part by part.

        (`val2014/1.jpg` in the json is found as `coco/val2014/1.jpg` and, where that is unambiguous, as `1.jpg`.)
        """
        parts = path.split("/")
        for first in range(len(parts)):
            name = "/".join(parts[first:])
            if name in self.captions:
                return name
        return self._by_ending.get(path)

    @cached_property
    def _by_ending(self) -> dict[str, str | None]:
        """Every proper ending of the images' paths → the path; None where several end so."""
        endings: dict[str, str | None] = {}
        for name in self.captions:
            parts = name.split("/")
            for first in range(1, len(parts)):
                ending = "/".join(parts[first:])
                endings[ending] = None if ending in endings else name
        return endings


@lru_cache(maxsize=2)
def _load(uri: str, splits: tuple[str, ...]) -> CaptionFile:
    filesystem, path = resolve(uri)
    with filesystem.open_input_stream(path) as stream:
        data = stream.read()
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits
        raise _not_understood(uri, error) from error
    try:
        pairs = (
            _karpathy(content["images"], uri, splits) if isinstance(content, dict) else _listed(content, uri, splits)
        )
        if wrong := [value for name, texts in pairs for value in (name, *texts) if not isinstance(value, str)]:
            raise TypeError(f"a path or a caption is a {type(wrong[0]).__name__}, not a string")
    except (KeyError, TypeError, AttributeError) as error:
        raise _not_understood(uri, error) from error
    captions: dict[str, tuple[str, ...]] = {}
    for name, texts in pairs:
        captions[name] = captions.get(name, ()) + texts
    if not captions:
        raise ValueError(f"captions = {uri!r} names no image")
    return CaptionFile(captions=captions)


def _not_understood(uri: str, error: Exception) -> ValueError:
    return ValueError(
        f"captions = {uri!r} is not understood ({type(error).__name__}: {error}); expected Karpathy's form, or a list "
        'of {"image": path, "caption": string or list}'
    )


def _karpathy(images: list[dict[str, Any]], uri: str, splits: tuple[str, ...]) -> list[tuple[str, tuple[str, ...]]]:
    present = {image["split"] for image in images} if splits else set()
    if unknown := sorted(set(splits) - present):
        there = ", ".join(sorted(present)) or "none"
        raise ValueError(f"splits: {unknown[0]!r} is not in captions = {uri!r}; there are {there}")
    return [
        (
            "/".join(part for part in (image.get("filepath", ""), image["filename"]) if part),
            tuple(sentence["raw"] for sentence in image["sentences"]),
        )
        for image in images
        if not splits or image["split"] in splits
    ]


def _listed(records: list[dict[str, Any]], uri: str, splits: tuple[str, ...]) -> list[tuple[str, tuple[str, ...]]]:
    if splits:
        raise ValueError(
            f"splits = {' '.join(splits)}, but captions = {uri!r} is a list without splits: leave it empty"
        )
    return [
        (record["image"], (record["caption"],) if isinstance(record["caption"], str) else tuple(record["caption"]))
        for record in records
    ]
