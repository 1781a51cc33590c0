"""Validate manifests against the published schemas that are kept beside this file; unknown fields and kinds fail."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

SCHEMAS = Path(__file__).parent / "schemas"


@functools.cache
def _validators() -> dict[str, Draft202012Validator]:
    """Return the validator of each kind, by `apiVersion/kind`."""
    files = {path.name: json.loads(path.read_text()) for path in sorted(SCHEMAS.glob("*.json"))}
    base = "https://schemas.invalid/"
    resources = [
        (f"{base}{name}", Resource(contents={"$id": f"{base}{name}", **schema}, specification=DRAFT202012))
        for name, schema in files.items()
    ]
    registry: Registry[Any] = Registry().with_resources(resources)
    return {
        kind: Draft202012Validator({"$ref": f"{base}{name}{reference['$ref']}"}, registry=registry)
        for name, schema in files.items()
        for kind, reference in schema["kinds"].items()
    }


def problems_of(manifest: dict[str, Any]) -> list[str]:
    """Return what is wrong with a manifest: the place and the message of every violation of its schema."""
    kind = f"{manifest.get('apiVersion')}/{manifest.get('kind')}"
    if kind not in _validators():
        return [f"there is no schema of {kind}"]
    errors = sorted(_validators()[kind].iter_errors(manifest), key=str)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message[:300]}" for error in errors]


def is_valid(manifest: dict[str, Any]) -> bool:
    """Return whether a manifest of a known kind satisfies its schema, which is faster than to list all problems."""
    return _validators()[f"{manifest['apiVersion']}/{manifest['kind']}"].is_valid(manifest)
