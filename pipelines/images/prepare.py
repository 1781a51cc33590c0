"""Preparing image–text data: a Ray Data job that indexes archives and checks every image, one task an archive.

Images stay where they are. The directory is named after everything that decides its content, so preparing again is free,
and an interrupted preparation goes on with the archives that are left.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from pipelines.archive_tasks import run_archive_tasks
from pipelines.images.archives import ImageArchive, list_image_archives
from pipelines.images.caption_files import CaptionFile
from pipelines.images.decoding import LARGEST_MAX_PIXELS, MAX_PIXELS
from pipelines.images.index import ASSEMBLY, assemble, index_archive, index_name
from pipelines.images.manifest import FORMAT_VERSION, ImageManifest
from pipelines.losses import list_losses, losses_name
from pipelines.problems import check_problems
from pipelines.storage import resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareImagesConfig:
    """What to prepare and how."""

    source: str
    """A WebDataset tar as img2dataset writes it, a directory of such, or a directory of images; path or pyarrow URI."""
    captions: str = ""
    """A json with the captions, for images that come without: Karpathy's form, or a list of {"image", "caption"}."""
    splits: tuple[str, ...] = ()
    """Which splits of a Karpathy json. Empty: all of them."""
    max_bad_share: float = 0.01
    """Share of samples that may be unreadable before preparing fails."""
    max_pixels: int = MAX_PIXELS
    """Larger images are refused, before decoding, as decompression bombs."""

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
    config: PrepareImagesConfig, root: str, *, max_bad_share_field: str = "data.max_bad_share", losses: str = ""
) -> ImageManifest:
    """Prepare `config.source` under the directory `root` (path or URI), or return what is already there.

    Needs a running Ray.

    Args:
        max_bad_share_field: how the person who gave it knows it, for the message.
        losses: path or URI of a file to write every lost sample to (`pipelines.losses`), also if there are too many.

    Raises:
        FileNotFoundError, ValueError: as `check_source`.
        TooManyProblemsError: naming the share, the kinds and the archives.
    """
    archives, captions = check_source(config)
    directory = f"{root}/{_content_name(config, archives, captions)}"
    try:
        manifest = ImageManifest.load(directory)
    except FileNotFoundError:
        filesystem, path = resolve(directory)
        filesystem.create_dir(path, recursive=True)

        def prepare(number: int) -> dict[str, Any]:
            # Read again where it is needed: a worker reads it once, however many archives it is given.
            named = CaptionFile.load(config.captions, config.splits) if config.captions else None
            return index_archive(
                config.source,
                archives[number],
                named,
                max_pixels=config.max_pixels,
                index=f"{directory}/{index_name(number)}",
            )

        manifest = assemble(
            run_archive_tasks(prepare, len(archives), directory),
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
    """What there is to prepare; needs no Ray.

    Raises:
        FileNotFoundError: the source or the captions do not exist, or the source holds neither tar nor image.
        ValueError: the captions are not understood, or needed and not given.
    """
    archives = list_image_archives(config.source)
    captions = CaptionFile.load(config.captions, config.splits) if config.captions else None
    if captions is None and any(archive.files for archive in archives):
        raise ValueError(f"source = {config.source!r} holds images in files of their own: captions must name a json")
    return archives, captions


def _content_name(config: PrepareImagesConfig, archives: list[ImageArchive], captions: CaptionFile | None) -> str:
    """A directory name that is a function of everything that decides the prepared content."""
    files = [asdict(archive) for archive in archives]
    content = json.dumps([FORMAT_VERSION, files, captions and captions.captions, config.max_pixels])
    digest = hashlib.blake2b(content.encode(), digest_size=6).hexdigest()
    name = config.source.rstrip("/").rsplit("/", 1)[-1].split(".")[0]
    return f"{name}-pairs-{digest}"


def describe(manifest: ImageManifest, seconds: float | None = None) -> str:
    """Counts of a prepared data set, for a person."""
    lost = ", ".join(f"{number} {kind}" for kind, number in sorted(manifest.problems.items())) or "none"
    kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(manifest.left_out.items()))
    left_out = f"; left out: {kinds}" if kinds else ""
    took = "" if seconds is None else f" in {seconds:.0f} s"
    return (
        f"{manifest.num_pairs} pairs of {manifest.num_images} images ({len(manifest.shards)} shards, digest "
        f"{manifest.digest}){took}; unreadable: {lost}{left_out}"
    )
