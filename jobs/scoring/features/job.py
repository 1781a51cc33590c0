"""Stores what a frozen model computes of a data set, once: what the jobs of `jobs.prepare_features` have in common.

A unit of the map (`jobs.scoring.units`) is a file: what a model reads is read beside the pool, and the pool's worker writes
the file. Files that exist are not made again.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jobs.engine.config import WorkersSection
from jobs.scoring.config import PoolSection
from jobs.scoring.units import UnitStore, Work, map_units
from pipelines.features import FeatureFiles, FeaturePart, describe_bytes
from pipelines.object_store import is_local
from pipelines.storage import MANIFEST_FILE, create_directory, exists, resolve


class StoredFeatures(Protocol):
    """The features of a data set, which may not be stored yet."""

    @property
    def directory(self) -> str:
        """Path or URI of their directory."""
        ...

    def describe_size(self) -> str:
        """Return how much they take, in total and per item."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureUnit:
    """What one item of the pool makes: a file."""

    file: str
    """Name of the file."""
    files: FeatureFiles | None = None
    """The files that it belongs to; None for a file that holds no features."""
    part: FeaturePart | None = None
    """The rows that the file holds; None for a file that holds no features."""

    @classmethod
    def of(cls, files: FeatureFiles) -> list[FeatureUnit]:
        """Return the units of all files of a kind."""
        return [cls(file=part.file, files=files, part=part) for part in files.parts()]

    @property
    def place(self) -> tuple[FeatureFiles, FeaturePart]:
        """The files and the rows of a unit that holds features."""
        assert self.files is not None
        assert self.part is not None
        return self.files, self.part


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureJob:
    """The features of one data set, and how they are made."""

    features: StoredFeatures
    units: Sequence[FeatureUnit]
    """All files."""
    work: Work[FeatureUnit]
    """Makes the file of a unit."""
    save: Callable[[], None]
    """Writes the manifest, whose presence marks the features as complete."""

    def run(self, pool: PoolSection) -> None:
        """Make the files that are missing. Ray must be running.

        Args:
            pool: number and resources of the models that compute at a time.

        Raises:
            ValueError: if the cluster is too small.
            OSError: if there is no room for the features; the message says how much they take.
            ScoringFailedError: if files could not be made; the others are kept.
        """
        directory = self.features.directory
        print(f"{directory}\n{self.features.describe_size()}", flush=True)
        if exists(f"{directory}/{MANIFEST_FILE}"):
            print("stored before", flush=True)
            return
        store = UnitStore(directory)
        create_directory(directory)  # whose disk is looked at
        finished = store.names()
        missing = [unit for unit in self.units if unit.file not in finished]
        self._check_room(missing)
        started = time.monotonic()
        map_units(missing, self.work, pool, store).check()
        self.save()
        print(f"stored in {time.monotonic() - started:.0f} s", flush=True)

    def _check_room(self, missing: Sequence[FeatureUnit]) -> None:
        filesystem, path = resolve(self.features.directory)
        if not is_local(filesystem):
            return
        free = shutil.disk_usage(path).free
        places = [unit.place for unit in missing if unit.part is not None]
        needed = sum(files.bytes_per_row * (part.stop - part.start) for files, part in places)
        if needed > free:
            raise OSError(
                f"{self.features.directory} takes {describe_bytes(needed)} more, and its disk has {describe_bytes(free)} "
                "left: make room, or set run.prepared to a directory on another disk"
            )


def pool_options(workers: WorkersSection) -> dict[str, Any]:
    """Return the options of the pool of models that a run with these workers stores its features with."""
    return {
        "num_workers": workers.max_workers,
        "use_gpu": workers.use_gpu,
        "cpus_per_worker": workers.cpus_per_worker,
    }
