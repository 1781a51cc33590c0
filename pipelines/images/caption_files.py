"""Read captions from a separate JSON file that accompanies tars or directories of images: COCO, Flickr30K, Flickr8k."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from pipelines.storage import resolve


@dataclass(frozen=True, kw_only=True)
class CaptionFile:
    """Captions by the path of their image; use :meth:`load` to read them from a file."""

    captions: dict[str, tuple[str, ...]]
    """Mapping from an image's path, as the file spells it, to its captions in the order of the file."""

    @classmethod
    def load(cls, uri: str, splits: Sequence[str] = ()) -> CaptionFile:
        """Read a JSON file in one of two forms.

        * Karpathy's form: `{"images": [{"filename", "filepath"?, "split", "sentences": [{"raw"}]}]}`.
        * A list of `{"image": path, "caption": string or list of strings}`; an image may occur several times.

        Args:
            uri: path or URI of the JSON file.
            splits: splits of Karpathy's form to read, such as "train"; if empty, all images are read.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if the file has another form or names no image, or if a split is unknown or not applicable.
        """
        return _load(uri, tuple(filter(None, splits)))  # `--splits ""` gives one empty string, which selects no split.

    def find(self, path: str) -> str | None:
        """Return the path in this file of the image that `path` names, or None if there is none.

        Two paths match if one of them ends in the other, compared by whole path components: `val2014/1.jpg` in the
        JSON file is found as `coco/val2014/1.jpg` and, if that is unambiguous, as `1.jpg`.
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


@lru_cache(maxsize=2)
def _load(uri: str, splits: tuple[str, ...]) -> CaptionFile:
    filesystem, path = resolve(uri)
    with filesystem.open_input_stream(path) as stream:
        data = stream.read()
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:  # An integer of thousands of digits also raises ValueError.
        raise _explain(uri, error) from error
    try:
        if isinstance(content, dict):
            pairs = _parse_karpathy(content["images"], uri, splits)
        else:
            pairs = _parse_list(content, uri, splits)
        if wrong := [value for name, texts in pairs for value in (name, *texts) if not isinstance(value, str)]:
            raise TypeError(f"a path or a caption is a {type(wrong[0]).__name__}, not a string")
    except (KeyError, TypeError, AttributeError) as error:
        raise _explain(uri, error) from error
    captions: dict[str, tuple[str, ...]] = {}
    for name, texts in pairs:
        captions[name] = captions.get(name, ()) + texts
    if not captions:
        raise ValueError(f"captions = {uri!r} names no image")
    return CaptionFile(captions=captions)


def _explain(uri: str, error: Exception) -> ValueError:
    return ValueError(
        f"captions = {uri!r} is not understood ({type(error).__name__}: {error}); expected Karpathy's form, or a list "
        'of {"image": path, "caption": string or list}'
    )


def _parse_karpathy(
    images: list[dict[str, Any]], uri: str, splits: tuple[str, ...]
) -> list[tuple[str, tuple[str, ...]]]:
    present = {image["split"] for image in images} if splits else set()
    if unknown := sorted(set(splits) - present):
        splits_present = ", ".join(sorted(present)) or "none"
        raise ValueError(f"splits: {unknown[0]!r} is not in captions = {uri!r}; it has {splits_present}")
    return [
        (
            "/".join(part for part in (image.get("filepath", ""), image["filename"]) if part),
            tuple(sentence["raw"] for sentence in image["sentences"]),
        )
        for image in images
        if not splits or image["split"] in splits
    ]


def _parse_list(records: list[dict[str, Any]], uri: str, splits: tuple[str, ...]) -> list[tuple[str, tuple[str, ...]]]:
    if splits:
        raise ValueError(
            f"splits = {' '.join(splits)}, but captions = {uri!r} is a list without splits: leave it empty"
        )
    return [
        (record["image"], (record["caption"],) if isinstance(record["caption"], str) else tuple(record["caption"]))
        for record in records
    ]
