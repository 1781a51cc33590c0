"""Class names and prompt templates for zero-shot classification.

The shipped templates are those that CLIP was published with (Radford et al. 2021): 80 for ImageNet, 18 for CIFAR.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from jobs.tasks.base import naming_field
from pipelines.lines import decode, lines_of
from pipelines.local_copy import local_copy

_HERE = Path(__file__).parent
_TEMPLATES = ("imagenet", "cifar")
_CLASS_NAMES = ("cifar10", "cifar100")


def read_templates(name: str) -> tuple[str, ...]:
    """Returns the templates of a shipped set, or of a file with one per line; `{}` stands for the class name.

    Raises:
        ValueError: naming the unknown set, the unreadable or empty file, or the template without `{}`.
    """
    path = _HERE / f"templates_{name}.txt" if name in _TEMPLATES else _file(name, "templates")
    if not path.is_file():
        raise ValueError(f"templates = {name!r} is neither {' nor '.join(_TEMPLATES)}, nor a file")
    lines = [line.strip() for line in lines_of(_text(path, "templates"))]
    templates = tuple(line for line in lines if line)
    if not templates:
        raise ValueError(f"templates = {name!r} holds no template")
    for template in templates:
        if "{}" not in template:
            raise ValueError(f"templates = {name!r}: {template!r} has no {{}} for the name of the class")
    return templates


def read_class_names(source: str, folders: Sequence[str]) -> tuple[str, ...]:
    """Returns the class name of every folder.

    Args:
        source: a JSON file with an object of folder → class name, or the name of a shipped list, in which folder i is
            the i-th name from 0. Empty: the folders' own names, with spaces for underscores.
        folders: names of the folders.

    Raises:
        ValueError: naming the file that cannot be used, or a folder without a class name.
    """
    if not source:
        return tuple(folder.replace("_", " ") for folder in folders)
    if source in _CLASS_NAMES:
        lines = lines_of(_text(_HERE / f"class_names_{source}.txt", "class_names").rstrip("\n"))
        names = {str(number): name for number, name in enumerate(lines)}
    else:
        names = _read_object(source)
    for folder in folders:
        if not isinstance(names.get(folder), str):
            raise ValueError(f"class_names = {source!r} has no name for the folder {folder!r}")
    return tuple(names[folder] for folder in folders)


def prompts(templates: Sequence[str], class_names: Sequence[str]) -> list[str]:
    """Returns every template filled with every class name, class after class."""
    return [template.replace("{}", name) for name in class_names for template in templates]


def _read_object(source: str) -> dict[str, str]:
    path = _file(source, "class_names")
    if not path.is_file():
        raise ValueError(f"class_names = {source!r} is neither {' nor '.join(_CLASS_NAMES)}, nor a file")
    try:
        content = json.loads(_text(path, "class_names"))
    except ValueError as error:
        raise ValueError(f"class_names = {source!r} is no json: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"class_names = {source!r} is no json object of folder → name")
    return content


def _file(source: str, field_name: str) -> Path:
    with naming_field(f"{field_name} = "):
        return Path(local_copy(source))


def _text(path: Path, field_name: str) -> str:
    try:
        return decode(path.read_bytes())
    except UnicodeDecodeError as error:
        raise ValueError(f"{field_name} = {str(path)!r} is no UTF-8 text") from error
