"""The fields of the data section of every task that reads shards, and of those that learn from text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jobs.engine.fields import FREE_TO_CHANGE, PATH, check_not_negative, check_positive, check_share, parse_resources


@dataclass(frozen=True, kw_only=True)  # without slots, so that a class can inherit from other slotted ones too
class ReadSection:
    """How data are prepared and read."""

    max_bad_share: float = 0.01
    """Largest share of unreadable records, in [0, 1], that is tolerated; above it the run fails."""
    shuffle_window: int = 32_768
    """Number of samples (blocks, documents or pairs) within which the order is fully random; across windows only whole
    shards are permuted."""
    reader_resources: tuple[str, ...] = field(default=(), metadata=FREE_TO_CHANGE)
    """Custom Ray resources NAME=AMOUNT that every task takes that prepares data or reads them for training, such as
    reader=0.1: it then runs on nodes that were started with these resources."""
    cache_gib: float = field(default=16.0, metadata=FREE_TO_CHANGE)
    """GiB of each node's disk that hold data from an object store, in $TEMPNET_CACHE or else the directory of temporary
    files; at least two windows. 0: no cache. Local data are never cached."""

    def __post_init__(self) -> None:
        check_positive("data", self, "shuffle_window")
        check_not_negative("data", self, "cache_gib")
        check_share("data", self, "max_bad_share")
        assert self.resources is not None  # parsed here already, so that a wrong entry is refused

    @property
    def resources(self) -> dict[str, float]:
        """Custom Ray resources of reading and preparing tasks."""
        return parse_resources("data.reader_resources", self.reader_resources)


@dataclass(frozen=True, kw_only=True)
class TextSection(ReadSection):
    """The text, and how it is prepared and read."""

    train: str = field(metadata=PATH)
    """Training text: path or URI of a .jsonl.zst, .tar, .jsonl, .jsonl.gz or .parquet file, or of a directory of such
    files."""
    validation: str = field(metadata=PATH)
    """Validation text, in the same formats as `train`."""
    text_field: str = "text"
    """Name of the field (column) of a record that holds the text."""
    prepare: Literal["ahead", "streaming"] = field(default="ahead", metadata=FREE_TO_CHANGE)
    """When the training text is tokenised: ahead, before the first step, or streaming, while training runs, in the order
    in which it is visited. The batches are the same."""
    num_parts_ahead: int = field(default=16, metadata=FREE_TO_CHANGE)
    """With prepare = streaming, the number of parts of the archives (8 MiB or a member of a tar, whichever is larger)
    that may be prepared before training asks for them."""
    prepare_cpus: float = field(default=1.0, metadata=FREE_TO_CHANGE)
    """With prepare = streaming, the number of logical CPUs that Ray reserves for each preparing task."""

    def __post_init__(self) -> None:
        ReadSection.__post_init__(self)
        check_positive("data", self, "num_parts_ahead", "prepare_cpus")

    @property
    def is_streaming(self) -> bool:
        """Whether the training text is prepared while training runs."""
        return self.prepare == "streaming"

    @property
    def preparing_cpus(self) -> float:
        """Number of logical CPUs that preparing text takes while training runs."""
        return self.prepare_cpus if self.is_streaming else 0.0
