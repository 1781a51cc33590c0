"""Running an evaluation: workers encode the units that are not in the store, then figures are computed from it.

The class of an image of a zero-shot set is the last folder of its path: `train/airplane/0001.jpg` and
`test/airplane/0001.jpg` both belong to the class `airplane`. Nothing is extracted: only the location of every image's bytes
is stored. Damaged images are reported. The shipped templates are those that CLIP was published with (Radford et al. 2021):
80 for ImageNet, 18 for CIFAR.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
import torch
from pyarrow.fs import FileSelector, FileType
from torch import Tensor

from jobs.engine.cluster import start_ray
from jobs.engine.fields import absolute_path, named_values
from jobs.engine.tracking import resolve_uri
from jobs.scoring.dual_encoders.config import EvaluateClipConfig
from jobs.scoring.dual_encoders.encoder import (
    DualEncoderSpec,
    Embeddings,
    ImageSet,
    caption_encoder,
    embedding_store,
    encode_missing,
    encoding_units,
    read_embeddings,
)
from jobs.scoring.results import Column, Results, percent_table, publish_evaluation
from jobs.scoring.units import model_labels
from jobs.tasks.base import naming_field
from pipelines.archives import ArchiveFormat, list_archives, list_once
from pipelines.images.archives import IMAGE_SUFFIXES, MAX_IMAGE_BYTES
from pipelines.images.decoding import ImageError
from pipelines.images.pairs import PairSource
from pipelines.images.prepare import PrepareImagesConfig, check_source, prepare_images
from pipelines.images.views import evaluation_view
from pipelines.lines import decode, lines_of
from pipelines.local_copy import local_copy
from pipelines.problems import check_problems
from pipelines.ranges import ByteRange, range_reader
from pipelines.storage import relative, resolve
from pipelines.tars import tar_members
from tempnet.contrastive.retrieval import accuracy, class_embeddings, recall

_TITLES = {
    "text_recall": "image → text R@",
    "image_recall": "text → image R@",
    "top": "top-",
    "mean_recall": "mean recall",
    "num_images": "images",
    "num_texts": "texts",
    "num_classes": "classes",
    "num_unreadable": "unreadable",
    "share_cut": "texts cut to the model's tokens",
}
clip_table = partial(percent_table, titles=_TITLES, hidden_if_zero=("share_cut",))


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    name: str
    images: ImageSet
    texts: Sequence[str]
    figures: Callable[[Embeddings, Embeddings], dict[str, float]]
    """Embeddings of the images and the texts → figures: shares from 0 to 1, and counts whose names begin with `num_`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """Counts of a data set's records and problems, in the form that :func:`check_problems` expects."""

    path: str
    num_records: int
    problems: dict[str, int]
    examples: Sequence[str]


def retrieval_sources(config: EvaluateClipConfig) -> dict[str, PrepareImagesConfig]:
    captions, splits = named_values("captions", config.captions), named_values("splits", config.splits)
    return {
        name: PrepareImagesConfig(
            source=uri,
            captions=captions.get(name, ""),
            splits=tuple(splits.get(name, "").split(",")),
            max_bad_share=config.max_bad_share,
            max_pixels=config.max_pixels,
            key_dot=config.key_dot,
        )
        for name, uri in named_values("retrieval", config.retrieval).items()
    }


def retrieval_sets(config: EvaluateClipConfig) -> Iterator[DataSet]:
    """Check all retrieval sets before Ray is started, and prepare them one after the other."""
    sources = retrieval_sources(config)
    for source in sources.values():
        check_source(source)
    if sources:
        start_ray()
    for name, source in sources.items():
        manifest = prepare_images(source, config.run.prepared_directory, max_bad_share_field="max_bad_share")
        pairs = PairSource(manifest=manifest, image_size=1)
        texts, owners = pairs.captions()
        figures = partial(_retrieval_figures, torch.from_numpy(owners), manifest.problems.total())
        yield DataSet(name=name, images=ImageSet.of_pairs(pairs), texts=texts, figures=figures)


def _retrieval_figures(owners: Tensor, num_unreadable: int, image: Embeddings, text: Embeddings) -> dict[str, float]:
    """Returns the recalls; unreadable images were counted when the set was prepared."""
    figures = recall(torch.from_numpy(image.rows), torch.from_numpy(text.rows), owners)
    return {
        **figures,
        "num_images": len(image.rows),
        "num_texts": len(text.rows),
        "num_unreadable": num_unreadable,
    }


def zero_shot_set(config: EvaluateClipConfig, name: str, uri: str) -> DataSet:
    folders = ClassFolders.read(uri)
    templates = read_templates(config.template_set(name))
    class_names = read_class_names(named_values("class_names", config.class_names).get(name, ""), folders.folders)
    if folders.num_left_out:
        print(f"{name}: {folders.num_left_out} files that are no images by their names are left out")
    return DataSet(
        name=name,
        images=folders.images(config.max_pixels),
        texts=prompts(templates, class_names),
        figures=partial(_zero_shot_figures, folders, config.max_bad_share),
    )


def _zero_shot_figures(
    folders: ClassFolders, max_bad_share: float, image: Embeddings, text: Embeddings
) -> dict[str, float]:
    num_unreadable = len(image.problems)
    reading = _Reading(
        path=folders.source,
        num_records=len(image.rows),
        problems={"unreadable": num_unreadable} if num_unreadable else {},
        examples=image.problems,
    )
    check_problems(folders.source, [reading], max_bad_share, field="max_bad_share", noun="image")
    classes = class_embeddings(torch.from_numpy(text.rows).unflatten(0, (len(folders.folders), -1)))
    figures = accuracy(torch.from_numpy(image.rows), classes, torch.from_numpy(folders.labels[image.numbers]))
    counts = {"num_images": len(image.rows), "num_classes": len(folders.folders), "num_unreadable": num_unreadable}
    return {**figures, **counts}


def evaluate(config: EvaluateClipConfig) -> Results:
    """Run or continue an evaluation, write `results.md` and `results.json`, and return the figures."""
    uri = resolve_uri(config.tracking, config.run.resolved_storage)
    labels = model_labels(config.models)
    models = [DualEncoderSpec.read(label, path) for label, path in zip(labels, config.models, strict=True)]
    encoders = [caption_encoder(model) for model in models]
    zero_shot = [zero_shot_set(config, name, uri) for name, uri in named_values("zero_shot", config.zero_shot).items()]
    data = [*retrieval_sets(config), *zero_shot]
    units = {
        (model.label, one.name): encoding_units(model, config.precision, one.name, one.images, one.texts)
        for model in models
        for one in data
    }
    all_units = [unit for images, texts in units.values() for unit in (*images, *texts)]
    store = embedding_store(config.run.directory)
    failed = encode_missing(
        all_units,
        {one.name: one.images for one in data},
        store,
        config.workers,
        precision=config.precision,
        batch_size=config.batch_size,
    )
    finished = store.names()
    columns = [Column.of_model(model) for model in models]
    for column, encoder in zip(columns, encoders, strict=True):
        for one in data:
            images, texts = units[column.title, one.name]
            if finished >= {unit.file for unit in (*images, *texts)}:
                figures = one.figures(read_embeddings(store, images), read_embeddings(store, texts))
                figures["share_cut"] = float(np.mean(encoder.are_cut(one.texts)))
                column.metrics.update({f"{one.name}/{name}": value for name, value in figures.items()})
    return publish_evaluation(
        config, columns=columns, render=clip_table, uri=uri, identity=[unit.key for unit in all_units], failed=failed
    )


_SUFFIXES = tuple(f".{suffix}" for suffix in IMAGE_SUFFIXES)
_HERE = Path(__file__).parent
_TEMPLATES = ("imagenet", "cifar")
_CLASS_NAMES = ("cifar10", "cifar100")


class _Entry(NamedTuple):
    """A member of an archive, or a file or folder of a directory."""

    name: str
    """Its path relative to the root of the archive or directory."""
    is_folder: bool
    archive: int
    offset: int
    num_bytes: int
    stamp: float
    """Time of its last modification, in seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassFolders:
    """The images of a data set, numbered from 0, with their classes. Shapes: n images."""

    source: str
    files: tuple[str, ...]
    """The image files, or the archives that contain the images: paths within the filesystem of `source`."""
    names: tuple[str, ...]
    places: np.ndarray
    """(n, 3) int64: the number of the image's file in `files`, its offset in that file, and its size in bytes."""
    folders: tuple[str, ...]
    labels: np.ndarray
    """(n,) int64: the number of each image's folder in `folders`."""
    num_left_out: int
    digest: str
    """Digest that changes whenever an image is added, removed, renamed or changed."""

    @classmethod
    def read(cls, source: str) -> ClassFolders:
        """List the images at a path or URI."""
        files, entries = _list(source)
        entries = [entry for entry in entries if not _is_hidden(entry.name)]
        images = sorted(entry for entry in entries if not entry.is_folder and entry.name.lower().endswith(_SUFFIXES))
        if not images:
            raise ValueError(f"{source} holds no image in a folder ({', '.join(_SUFFIXES)})")
        classes = [PurePosixPath(entry.name).parent.name for entry in images]
        if "" in classes:
            raise ValueError(f"{source}: the image {images[classes.index('')].name!r} lies in no folder of a class")
        # Accuracy on a class without an image is undefined.
        filled = {str(folder) for entry in images for folder in PurePosixPath(entry.name).parents}
        there = {entry.name if entry.is_folder else str(PurePosixPath(entry.name).parent) for entry in entries}
        if empty := sorted(there - filled):
            raise ValueError(f"{source}: the folder {empty[0]!r} of a class holds no image")
        folders, labels = np.unique(classes, return_inverse=True)
        return cls(
            source=absolute_path(source),
            files=tuple(files),
            names=tuple(entry.name for entry in images),
            places=np.array([(entry.archive, entry.offset, entry.num_bytes) for entry in images], dtype=np.int64),
            folders=tuple(folders.tolist()),
            labels=labels,
            num_left_out=sum(not entry.is_folder for entry in entries) - len(images),
            digest=hashlib.blake2b(repr(images).encode(), digest_size=12).hexdigest(),
        )

    def read_bytes(self, numbers: Sequence[int]) -> Iterator[bytes]:
        """Yields the encoded bytes of the images; an image over the size limit is cut one byte past it."""
        places = self.places[np.asarray(numbers, dtype=np.int64)].tolist()
        ranges = [ByteRange(self.files[at], offset, min(size, MAX_IMAGE_BYTES + 1)) for at, offset, size in places]
        return range_reader(self.source).stream(ranges)

    def images(self, max_pixels: int) -> ImageSet:
        return ImageSet(num_images=len(self.names), digest=self.digest, read=partial(self._read, max_pixels))

    def _read(self, max_pixels: int, numbers: Sequence[int], image_size: int) -> Iterator[np.ndarray | str]:
        for number, data in zip(numbers, self.read_bytes(numbers), strict=True):
            if len(data) > MAX_IMAGE_BYTES:
                yield f"{self.names[number]} (longer than {MAX_IMAGE_BYTES} bytes)"
                continue
            try:
                yield evaluation_view(data, image_size, max_pixels=max_pixels)
            except ImageError as error:
                yield f"{self.names[number]} ({error.kind}: {error})"


def _list(source: str) -> tuple[list[str], list[_Entry]]:
    """Returns the files that hold images, and the entries of a tar, a directory of tars, or a directory of folders."""
    filesystem, root = resolve(source)
    info = filesystem.get_file_info(root)
    if info.type == FileType.NotFound:
        raise FileNotFoundError(f"{source}: no such file or directory")
    entries: list[_Entry] = []
    is_directory = info.type == FileType.Directory
    if is_directory and not any(file.path.endswith(".tar") for file in filesystem.get_file_info(FileSelector(root))):
        files = [file for file in list_once(filesystem, root) if not _is_hidden(relative(file.path, root))]
        for number, file in enumerate(files):
            is_folder, stamp = file.type == FileType.Directory, (file.mtime_ns or 0) / 1e9
            entries.append(_Entry(relative(file.path, root), is_folder, number, 0, file.size or 0, stamp))
        return [file.path for file in files], entries
    archives = list_archives(source, {".tar": ArchiveFormat.TAR})
    for number, archive in enumerate(archives):
        with filesystem.open_input_stream(archive.path, compression=None) as stream:
            try:
                for member, _ in tar_members(stream):
                    if member.isfile() or member.isdir():
                        name, place = str(PurePosixPath(member.name)), (number, member.offset_data, member.size)
                        entries.append(_Entry(name, member.isdir(), *place, member.mtime))
            except tarfile.TarError as error:
                raise ValueError(f"{archive.path} is cut or corrupt: {error}") from error
    return [archive.path for archive in archives], entries


def _is_hidden(name: str) -> bool:
    """Returns whether a path is hidden, such as `.DS_Store` or `__MACOSX/`."""
    return any(part.startswith((".", "__")) for part in name.split("/"))


def read_templates(name: str) -> tuple[str, ...]:
    """Returns the templates of a shipped set, or of a file with one per line; `{}` stands for the class name."""
    path = _HERE / f"templates_{name}.txt" if name in _TEMPLATES else None
    lines = [line.strip() for line in lines_of(_text(name, path, "templates", _TEMPLATES))]
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
    """
    if not source:
        return tuple(folder.replace("_", " ") for folder in folders)
    path = _HERE / f"class_names_{source}.txt" if source in _CLASS_NAMES else None
    text = _text(source, path, "class_names", _CLASS_NAMES)
    if path is not None:
        names = {str(number): name for number, name in enumerate(lines_of(text.rstrip("\n")))}
    else:
        try:
            names = json.loads(text)
        except ValueError as error:
            raise ValueError(f"class_names = {source!r} is no json: {error}") from error
        if not isinstance(names, dict):
            raise ValueError(f"class_names = {source!r} is no json object of folder → name")
    for folder in folders:
        if not isinstance(names.get(folder), str):
            raise ValueError(f"class_names = {source!r} has no name for the folder {folder!r}")
    return tuple(names[folder] for folder in folders)


def prompts(templates: Sequence[str], class_names: Sequence[str]) -> list[str]:
    return [template.replace("{}", name) for name in class_names for template in templates]


def _text(source: str, shipped: Path | None, field_name: str, known: Sequence[str]) -> str:
    """Returns the text of a shipped file, or of the file that the field names."""
    if shipped is None:
        with naming_field(f"{field_name} = "):
            shipped = Path(local_copy(source))
        if not shipped.is_file():
            raise ValueError(f"{field_name} = {source!r} is neither {' nor '.join(known)}, nor a file")
    try:
        return decode(shipped.read_bytes())
    except UnicodeDecodeError as error:
        raise ValueError(f"{field_name} = {str(shipped)!r} is no UTF-8 text") from error
