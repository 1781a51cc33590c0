"""The ranks that share a batch, and the per-sample state of the global contrastive losses, sharded over them.

Autograd never sees a collective operation: every rank computes the whole gradient of its own part in the forward
pass, so that the order of communication does not depend on autograd.

Sample `id` is owned by rank id mod W, where it is in slot id // W. For each sample and modality, a loss stores log u (a
moving average in log space, −inf before the first visit) and, if it learns or is given a temperature per sample, τ and
possibly its momentum. To read values, every rank fills in those that it owns and zeros elsewhere, and a sum over the ranks
completes them; −inf and NaN are preserved by a sum with zeros. To write values, each owner takes its own from the results,
which all ranks have. Only scalars are communicated.

Shapes: N samples, W ranks, b rows of a batch on each rank (the same number on all), B = W·b in total. Values of both
modalities are (2, …), where index 0 is the image and 1 the text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

NUM_MODALITIES = 2
_FILE = "samples-{rank:05d}-of-{size:05d}.safetensors"


@dataclass(frozen=True, slots=True)
class World:
    """A process among W ranks; `World.alone()` works without torch.distributed."""

    rank: int
    """Rank of this process, from 0."""
    size: int
    """Number W of ranks."""
    group: dist.ProcessGroup | None = None
    """Process group of the ranks; None stands for the default group if size > 1."""

    @classmethod
    def alone(cls) -> World:
        """Return the world of a single process."""
        return cls(0, 1)

    @classmethod
    def current(cls, group: dist.ProcessGroup | None = None) -> World:
        """Return the world of the given or the default process group, or of one process if none is initialised."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls.alone()
        return cls(dist.get_rank(group), dist.get_world_size(group), group)

    def part(self, num_rows: int) -> slice:
        """Return the part of `num_rows` = B rows, in the order of ranks, that belongs to this rank."""
        num_local = num_rows // self.size
        return slice(self.rank * num_local, (self.rank + 1) * num_local)

    def gather(self, x: Tensor) -> Tensor:
        """Concatenate the (b, …) of all ranks to (B, …), in the order of ranks; every rank receives the result."""
        x = x.detach().contiguous()
        if self.size == 1:
            return x
        gathered = x.new_empty(self.size * len(x), *x.shape[1:])
        dist.all_gather_single(gathered, x, group=self.group)
        return gathered

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks, on every rank; −inf and NaN are preserved. `x` may be overwritten."""
        x = x.detach().contiguous()
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def sum_part(self, x: Tensor) -> Tensor:
        """Sum the (B, …) of all ranks, and return this rank's part (b, …) of the sum."""
        if self.size == 1:
            return x
        reduced = x.new_empty(len(x) // self.size, *x.shape[1:])
        dist.reduce_scatter_single(reduced, x.contiguous(), group=self.group)
        return reduced


class SampleState:
    """Named float32 columns with two values (image, text) for each of N samples, sharded over the ranks.

    `columns` are the names with their initial values (`ContrastiveLossConfig.state_columns`). By default there is only this
    process.
    """

    def __init__(
        self,
        num_samples: int,
        columns: dict[str, float],
        *,
        world: World | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_samples, self.world = num_samples, world or World.alone()
        num_slots = len(range(self.world.rank, num_samples, self.world.size))
        # Values of samples that other ranks own are written into one slot more, because choosing by a mask would make the
        # host wait for a GPU.
        self._slots = {
            name: torch.full((NUM_MODALITIES, num_slots + 1), initial, dtype=torch.float32, device=device)
            for name, initial in columns.items()
        }
        self.columns = {name: slots[:, :-1] for name, slots in self._slots.items()}

    def placed(self, world: World, device: torch.device) -> SampleState:
        """Return the state on a device; one that was made by a process alone is divided among the ranks."""
        if world == self.world and all(column.device == device for column in self.columns.values()):
            return self
        placed = SampleState(self.num_samples, dict.fromkeys(self.columns, 0.0), world=world, device=device)
        for name, column in self.columns.items():
            placed.columns[name].copy_(column if world == self.world else column[:, world.rank :: world.size])
        return placed

    def read(self, ids: Tensor) -> dict[str, Tensor]:
        """Return the values (2, B) of every column for ids (B,), equal on all ranks.

        Ids outside [0, N) raise ValueError; on a GPU, for which the host does not wait, they are out of bounds there.
        """
        is_known = ids.is_cuda or bool(((ids >= 0) & (ids < self.num_samples)).all())
        if not is_known:
            low, high = (int(bound) for bound in torch.aminmax(ids))
            raise ValueError(
                f"id {low if low < 0 else high} is not one of the {self.num_samples} samples that the loss keeps state of "
                f"(ids 0 to {self.num_samples - 1}): was the state made for another data set?"
            )
        is_owned, places = self._find(ids)
        values = torch.stack([torch.where(is_owned, slots[:, places], 0.0) for slots in self._slots.values()])
        return dict(zip(self.columns, self.world.sum(values), strict=True))

    def update(self, ids: Tensor, values: dict[str, Tensor]) -> None:
        """Store values (2, B) of some columns for ids (B,); all occurrences of an id must have the same values."""
        _, places = self._find(ids)
        for name, value in values.items():
            self._slots[name][:, places] = value.to(torch.float32)

    def fill(self, name: str, table: Tensor) -> None:
        """Set a column of all samples from a table (2, N) of positive numbers (else ValueError), which every rank has."""
        expected = (NUM_MODALITIES, self.num_samples)
        if tuple(table.shape) != expected:
            raise ValueError(f"the table of {name} has shape {tuple(table.shape)}, {expected} is needed")
        if num_missing := int((~(table > 0)).any(0).sum()):
            raise ValueError(f"the table of {name} lacks {num_missing} of {self.num_samples} ids")
        self.columns[name].copy_(table[:, self.world.rank :: self.world.size])

    def save(self, directory: str | Path) -> None:
        """Write this rank's part of the state to a file in the directory, which is created if necessary."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / _FILE.format(rank=self.world.rank, size=self.world.size)
        columns = {name: column.cpu().contiguous() for name, column in self.columns.items()}
        save_file(columns, path, metadata={"num_samples": str(self.num_samples)})

    def load(self, directory: str | Path, num_writers: int) -> None:
        """Read a state that `num_writers` ranks have saved; the directory may hold files of an earlier number of ranks, too.

        A missing file of a rank raises FileNotFoundError; a state of another number of samples or with other columns,
        ValueError.
        """
        paths = [Path(directory) / name for name in state_file_names(num_writers)]
        if missing := [path.name for path in paths if not path.exists()]:
            raise FileNotFoundError(
                f"{directory} does not hold the per-sample state of {num_writers} ranks: {_names(missing)} missing"
            )
        for rank, path in enumerate(paths):
            # Determine which of the samples in this file, in order, belong to this rank, and their slots.
            ids = torch.arange(self.num_samples)[rank::num_writers]
            is_owned = ids % self.world.size == self.world.rank
            places = ids[is_owned] // self.world.size
            if not is_owned.any():
                continue
            with safe_open(path, "pt") as file:
                num_samples = int((file.metadata() or {}).get("num_samples", -1))
                if num_samples != self.num_samples:
                    raise ValueError(f"{path} holds the state of {num_samples} samples, not of {self.num_samples}")
                if set(file.keys()) != set(self.columns):
                    raise ValueError(f"{path} holds {_names(file.keys())}; this loss keeps {_names(self.columns)}")
                for name, column in self.columns.items():
                    column[:, places] = file.get_tensor(name)[:, is_owned].to(column.device)

    def _find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return which of the ids (B,) this rank owns, (B,) bool, and their slots: the last one of an id of another rank."""
        is_owned = ids % self.world.size == self.world.rank
        last = len(range(self.world.rank, self.num_samples, self.world.size))
        places = torch.where(is_owned, ids // self.world.size, last)
        return is_owned, torch.where((ids >= 0) & (ids < self.num_samples), places, last + 1)


def state_file_names(num_writers: int) -> list[str]:
    """Return the names of the files in which ranks save their parts of a state, in the order of the ranks."""
    return [_FILE.format(rank=rank, size=num_writers) for rank in range(num_writers)]


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
