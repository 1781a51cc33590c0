"""Index the archives of a source in units that are balanced over a cluster: whole archives, and parts of large tars.

A part is a range of members that begins with the first member of a sample. The summaries and indexes of all parts of a
tar are joined to what one task would have made of the whole tar, byte for byte, so that prepared data do not depend on
how tars are divided. The tar's digest is a hash of its images in order, so that joining reads their bytes once more,
without decoding them.
"""

from __future__ import annotations

import hashlib
import itertools
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from pipelines.images.archives import ImageArchive
from pipelines.images.caption_files import CaptionFile
from pipelines.images.index import (
    OTHER_KINDS,
    count_left_out,
    hash_image,
    index_archive,
    index_name,
    write_table,
)
from pipelines.images.manifest import open_index
from pipelines.images.webdataset import group_of
from pipelines.losses import list_losses, losses_name
from pipelines.object_store import open_for_reading
from pipelines.parts import WHOLE, Part, divide_tar, make_parts
from pipelines.problems import NUM_EXAMPLES
from pipelines.recorded_tasks import read_records, run_recorded_tasks
from pipelines.storage import resolve

PART_BYTES = 2**27
"""Least number of stored bytes that complete a part of a tar: a few seconds' work."""

_NUM_UNITS_PER_CPU = 8
_NUM_ROWS_AT_A_TIME = 4096


def choose_part_bytes(archives: Sequence[ImageArchive]) -> int:
    """Return the number of stored bytes that complete a part of a tar, for the cluster that Ray has now, if it is running.

    A tar is only divided if it is more than an eighth of the work of one CPU, because the bytes of a tar that is
    divided are read more than once. So the tars of a large data set stay whole on a small cluster.
    """
    num_bytes = sum(archive.num_bytes or 0 for archive in archives)  # Some filesystems do not report sizes.
    num_cpus = max(1.0, ray.cluster_resources().get("CPU", 1.0)) if ray.is_initialized() else 1.0
    return max(PART_BYTES, round(num_bytes / (_NUM_UNITS_PER_CPU * num_cpus)))


def divide_archive(source: str, archive: ImageArchive, part_bytes: int) -> list[Part]:
    """Return the parts of an archive in stored order; a group of image files is one part.

    Args:
        source: the URI that the archive was listed from.
        archive: the archive.
        part_bytes: number of stored bytes that complete a part.

    Raises:
        OSError: if the archive cannot be opened, or the filesystem fails.
    """
    if archive.files or (archive.num_bytes or 0) <= part_bytes:
        return [WHOLE]
    last: str | None = None

    def begins_sample(info: tarfile.TarInfo) -> bool:
        nonlocal last
        group = group_of(info)
        if group is None or group == last:  # Members that belong to no sample may lie among those of one.
            return False
        last = group
        return True

    return make_parts(divide_tar(resolve(source)[0], archive.path, part_bytes, begins_sample, in_blocks=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What one task indexes: an archive, or a part of one."""

    archive: int
    """Number of the archive within the source."""
    part: Part
    """The part of it."""

    @property
    def name(self) -> str:
        """Distinct name of the unit, which its record has."""
        if self.part.is_whole:
            return archive_name(self.archive)
        stop = "end" if self.part.stop is None else self.part.stop
        return f"part-{self.archive:05d}-{self.part.start}-{stop}"

    @property
    def index(self) -> str:
        """File name of the unit's index."""
        return index_name(self.archive) if self.part.is_whole else f"{self.name}.arrow"


def archive_name(number: int) -> str:
    """Return the name of the record of archive `number`."""
    return f"archive-{number:05d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexTask:
    """What is needed to index any of the units of a source; it is sent to the tasks."""

    source: str
    """Path or URI that the archives were listed from."""
    archives: Sequence[ImageArchive]
    """The archives of the source, in order."""
    captions: str
    """Path or URI of the JSON file of captions; empty if captions are stored with the images."""
    splits: tuple[str, ...]
    """Splits to use of that file; if empty, all of them."""
    max_pixels: int
    """Maximum number of pixels of an image."""
    directory: str
    """Path or URI of the prepared directory."""

    def divide(self, number: int, part_bytes: int) -> dict[str, Any]:
        """Divide an archive, and return where its parts begin, as a JSON object."""
        parts = divide_archive(self.source, self.archives[number], part_bytes)
        return {"starts": [part.start for part in parts]}

    def index(self, unit: Unit) -> dict[str, Any]:
        """Index a unit, and return its summary (`index_archive`)."""
        # The worker reads the caption file itself; `load` caches it, so that each process reads it only once.
        named = CaptionFile.load(self.captions, self.splits) if self.captions else None
        return index_archive(
            self.source,
            self.archives[unit.archive],
            named,
            max_pixels=self.max_pixels,
            index=f"{self.directory}/{unit.index}",
            part=unit.part,
        )

    def join(self, units: Sequence[Unit]) -> dict[str, Any]:
        """Join the indexes of all parts of an archive, and return the summary that `index_archive` gives of the whole.

        Args:
            units: the parts, all of which are indexed, in stored order.
        """
        number = units[0].archive
        archive, whole = self.archives[number], Unit(archive=number, part=WHOLE)
        entries = [record or {} for record in read_records([unit.name for unit in units], self.directory)]
        table = _join_tables([open_index(self.directory, entry["file"]) for entry in entries], entries)
        digest = _hash_images(self.source, archive, table)
        was_written_again = digest is None or any(entry["num_bytes_read"] is not None for entry in entries[:-1])
        # Parts that do not tell all kinds of left-out members apart cannot say which kinds the whole tar would.
        if was_written_again or any(OTHER_KINDS in entry["left_out"] for entry in entries):
            return self.index(whole)
        write_table(f"{self.directory}/{whole.index}", table)
        list_losses(
            self.directory,
            [losses_name(entry["file"]) for entry in entries],
            losses_name(f"{self.directory}/{whole.index}"),
        )
        left_out: Counter[str] = Counter()
        for entry in entries:
            for kind, count in entry["left_out"].items():
                count_left_out(left_out, kind, count)
        return entries[0] | {
            "file": whole.index,
            "num_pairs": table.num_rows,
            "num_images": sum(entry["num_images"] for entry in entries),
            "digest": digest,
            "problems": dict(sum((Counter(entry["problems"]) for entry in entries), Counter())),
            "examples": [example for entry in entries for example in entry["examples"]][:NUM_EXAMPLES],
            "left_out": dict(left_out),
            "lost": [key for entry in entries for key in entry["lost"]],
            "num_bytes_read": entries[-1]["num_bytes_read"],  # Only the last part can end in damage.
        }


def index_archives(
    task: IndexTask, *, part_bytes: int, resources: Mapping[str, float] | None = None
) -> list[dict[str, Any]]:
    """Index all archives that have no record yet, the large tars in parts; return the summaries of all, in order.

    An archive that was divided before stays divided as it was, so that its remaining parts are what is left to do.

    Args:
        task: the archives, and how to index them.
        part_bytes: number of stored bytes that complete a part of a tar.
        resources: custom Ray resources that every task takes, by which the tasks are kept to certain nodes.
    """
    directory, numbers = task.directory, range(len(task.archives))
    names = [archive_name(number) for number in numbers]
    missing = [number for number, record in enumerate(read_records(names, directory)) if record is None]
    divided_before = read_records([_division_name(number) for number in missing], directory)
    to_divide = [
        number
        for number, division in zip(missing, divided_before, strict=True)
        if division is not None
        or (not task.archives[number].files and (task.archives[number].num_bytes or 0) > part_bytes)
    ]
    divisions = run_recorded_tasks(
        lambda place: task.divide(to_divide[place], part_bytes),
        [_division_name(number) for number in to_divide],
        directory,
        resources=resources,
    )
    units = {number: [Unit(archive=number, part=WHOLE)] for number in missing}
    for number, division in zip(to_divide, divisions, strict=True):
        units[number] = [Unit(archive=number, part=part) for part in make_parts(division["starts"])]
    flat = [unit for number in missing for unit in units[number]]
    run_recorded_tasks(
        lambda place: task.index(flat[place]), [unit.name for unit in flat], directory, resources=resources
    )
    # What is not divided has its record by now.
    return run_recorded_tasks(lambda number: task.join(units[number]), names, directory, resources=resources)


def _division_name(number: int) -> str:
    return f"division-{number:05d}"


def _join_tables(tables: Sequence[pa.Table], entries: Sequence[dict[str, Any]]) -> pa.Table:
    """Return the rows of the indexes of all parts; the images of a part are numbered on from those of the part before."""
    firsts = np.cumsum([0, *(entry["num_images"] for entry in entries)])
    place = tables[0].schema.get_field_index("image")
    shifted = [
        table.set_column(place, "image", pa.array(table.column("image").to_numpy() + first, pa.int64()))
        for table, first in zip(tables, firsts[:-1], strict=True)
    ]
    return pa.concat_tables(shifted).combine_chunks()


def _hash_images(source: str, archive: ImageArchive, table: pa.Table) -> str | None:
    """Return the digest of a tar's usable images, or None if the tar no longer holds what its index says."""
    digest = hashlib.blake2b(digest_size=8)
    with open_for_reading(resolve(source)[0], archive.path) as file:
        for _, group in itertools.groupby(_list_rows(table), key=lambda row: row["image"]):
            rows = list(group)
            file.seek(rows[0]["offset"])
            data = file.read(rows[0]["size"])
            if zlib.crc32(data) != rows[0]["checksum"]:
                return None
            hash_image(digest, rows[0]["key"], [row["caption"] for row in rows], data)
    return digest.hexdigest()


def _list_rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    for batch in table.to_batches(max_chunksize=_NUM_ROWS_AT_A_TIME):
        yield from batch.to_pylist()
