"""What the manifests of prepared text and of prepared images share: the file, and how it is checked."""

from __future__ import annotations

from typing import Any

from pipelines.storage import read_json, write_json

MANIFEST_FILE = "manifest.json"


def write_manifest(directory: str, content: dict[str, Any]) -> None:
    """Write a manifest to its directory; the presence of this file marks the directory as complete."""
    write_json(f"{directory}/{MANIFEST_FILE}", content)


def read_manifest(directory: str, *, noun: str, field: str, version: int) -> dict[str, Any]:
    """Read the manifest of a prepared directory.

    Args:
        directory: path or URI of the directory.
        noun: word for the kind of data, for the error message.
        field: name of a field that only manifests of this kind have.
        version: version of the manifest format that is expected.

    Raises:
        FileNotFoundError: if the directory has no manifest.
        ValueError: if the manifest is of another kind or version.
    """
    content = read_json(f"{directory}/{MANIFEST_FILE}")
    if content is None:
        raise FileNotFoundError(f"{directory} holds no {MANIFEST_FILE}: it is not a (completely) prepared data set")
    if field not in content or content.get("version") != version:
        raise ValueError(
            f"{directory} does not hold prepared {noun} of version {version}, which this program reads: prepare it again"
        )
    return content
