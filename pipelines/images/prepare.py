"""Prepare image–text data: a Ray Data job that indexes archives and checks every image, with one task per unit.

A unit is an archive, or a part of a large tar (`pipelines.images.units`). Images are not copied. The name of the
prepared directory contains a hash of everything that determines its content, so that preparing the same data again
costs nothing, and an interrupted preparation continues with the remaining units.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from pipelines.images.archives import ImageArchive, list_image_archives
from pipelines.images.assembly import ASSEMBLY, assemble
from pipelines.images.caption_files import CaptionFile
from pipelines.images.decoding import LARGEST_MAX_PIXELS, MAX_PIXELS
from pipelines.images.index import index_name
from pipelines.images.manifest import FORMAT_VERSION, ImageManifest
from pipelines.images.units import IndexTask, choose_part_bytes, index_archives
from pipelines.losses import list_losses, losses_name
from pipelines.problems import check_problems
from pipelines.storage import resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareImagesConfig:
    """Which image–text data to prepare, and how.

    Raises:
        ValueError: if a field is outside its range, or `splits` is given without `captions`.
    """

    source: str
    """WebDataset tar as img2dataset writes it, directory of such tars, or directory of images; path or pyarrow URI."""
    captions: str = ""
    """JSON file of captions, for images without their own: Karpathy's form, or a list of {"image", "caption"}."""
    splits: tuple[str, ...] = ()
    """Splits to use from a JSON file in Karpathy's form; if empty, all of them."""
    max_bad_share: float = 0.01
    """Largest share of samples that may be unreadable, in [0, 1]; above it, preparation fails."""
    max_pixels: int = MAX_PIXELS
    """Maximum number of pixels of an image; a larger one is rejected before decoding, as a decompression bomb."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.max_bad_share <= 1.0:
            raise ValueError(f"max_bad_share = {self.max_bad_share:g} must lie in [0, 1]")
        if not 1 <= self.max_pixels <= LARGEST_MAX_PIXELS:
            raise ValueError(f"max_pixels = {self.max_pixels} must lie in 1 … {LARGEST_MAX_PIXELS}")
        if any(self.splits) and not self.captions:
            raise ValueError(
                f"splits = {' '.join(self.splits)} selects from captions, which is empty: give a Karpathy json"
            )


def prepare_images(
    config: PrepareImagesConfig,
    root: str,
    *,
    max_bad_share_field: str = "max_bad_share",
    losses: str = "",
    resources: Mapping[str, float] | None = None,
    part_bytes: int | None = None,
) -> ImageManifest:
    """Prepare `config.source` in a subdirectory of `root`, or load it if it is already prepared.

    Args:
        config: which data to prepare, and how.
        root: path or URI of the directory of all prepared data.
        max_bad_share_field: name of the setting that `max_bad_share` comes from, for the error message.
        losses: path or URI of a file to list every lost sample in (`pipelines.losses`); it is also written if there
            are too many. If empty, no list is written.
        resources: custom Ray resources that every task takes, by which the tasks are kept to certain nodes.
        part_bytes: number of stored bytes that complete a part of a tar; None: what suits the data and the cluster
            (`choose_part_bytes`). The result does not depend on it.

    Raises:
        FileNotFoundError: if the source or the captions do not exist, or the source holds neither a tar nor an image.
        ValueError: if the captions are not understood, or are needed but not given.
        TooManyProblemsError: if too many samples are unreadable; the message names the share, the kinds of problems
            and the archives.
    """
    archives, captions = check_source(config)
    directory = f"{root}/{_name_content(config, archives, captions)}"
    try:
        manifest = ImageManifest.load(directory)
    except FileNotFoundError:
        filesystem, path = resolve(directory)
        filesystem.create_dir(path, recursive=True)

        task = IndexTask(
            source=config.source,
            archives=archives,
            captions=config.captions,
            splits=config.splits,
            max_pixels=config.max_pixels,
            directory=directory,
        )
        manifest = assemble(
            index_archives(task, part_bytes=part_bytes or choose_part_bytes(archives), resources=resources),
            captions,
            directory=directory,
            source=config.source,
            captions_uri=config.captions,
            max_pixels=config.max_pixels,
        )
        manifest.save()
    if losses:
        list_losses(
            directory, [losses_name(name) for name in [*map(index_name, range(len(archives))), ASSEMBLY]], losses
        )
    check_problems(config.source, manifest.readings, config.max_bad_share, field=max_bad_share_field, noun="pair")
    return manifest


def check_source(config: PrepareImagesConfig) -> tuple[list[ImageArchive], CaptionFile | None]:
    """Return the archives to prepare, and the captions if they come in a file of their own; Ray is not needed.

    Raises:
        FileNotFoundError: if the source or the captions do not exist, or the source holds neither a tar nor an image.
        ValueError: if the captions are not understood, or are needed but not given.
    """
    archives = list_image_archives(config.source)
    captions = CaptionFile.load(config.captions, config.splits) if config.captions else None
    if captions is None and any(archive.files for archive in archives):
        raise ValueError(
            f"source = {config.source!r} holds images in files of their own: captions must name a json file"
        )
    return archives, captions


def _name_content(config: PrepareImagesConfig, archives: list[ImageArchive], captions: CaptionFile | None) -> str:
    """Return a directory name that contains a hash of everything that determines the prepared content."""
    files = [asdict(archive) for archive in archives]
    content = json.dumps([FORMAT_VERSION, files, captions and captions.captions, config.max_pixels])
    digest = hashlib.blake2b(content.encode(), digest_size=6).hexdigest()
    name = config.source.rstrip("/").rsplit("/", 1)[-1].split(".")[0]
    return f"{name}-pairs-{digest}"


def describe(manifest: ImageManifest, seconds: float | None = None) -> str:
    """Summarise the counts of a prepared data set in one line, for a human reader."""
    lost = ", ".join(f"{number} {kind}" for kind, number in sorted(manifest.problems.items())) or "none"
    kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(manifest.left_out.items()))
    left_out = f"; left out: {kinds}" if kinds else ""
    duration = "" if seconds is None else f" in {seconds:.0f} s"
    return (
        f"{manifest.num_pairs} pairs of {manifest.num_images} images ({len(manifest.shards)} shards, digest "
        f"{manifest.digest}){duration}; unreadable: {lost}{left_out}"
    )
