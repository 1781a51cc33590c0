"""What the global losses remember of every sample: each rank keeps the samples that it owns.

Sample `id` belongs to rank id mod W and lies there in slot id // W, so a rank holds N/W samples whatever the order of the
data. Per sample and modality a loss keeps log u (a moving average in log space, −inf before the first visit) and, where
temperatures are its own affair, τ and its momentum. Reading: every rank fills in the values that it owns, zeros elsewhere,
and the sum over ranks completes them; −inf and NaN survive a sum with zeros. Writing: the owners take what all ranks have
computed. Only scalars travel.

Shapes: N samples, W ranks, B ids of a batch; modalities 0 = image, 1 = text come first.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tempnet.contrastive.world import World

NUM_MODALITIES = 2
_FILE = "samples-{rank:05d}-of-{size:05d}.safetensors"


class SampleState:
    """float32 columns of N samples, sharded over the ranks.

    Args:
        num_samples: N; ids are 0 … N − 1.
        columns: name → value before the first visit (`ContrastiveLossConfig.state_columns`).
        world: who shares the samples; default: this process alone.
        device: where the columns lie.
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
        self.columns = {
            name: torch.full((NUM_MODALITIES, num_slots), initial, dtype=torch.float32, device=device)
            for name, initial in columns.items()
        }

    @property
    def bytes_per_rank(self) -> int:
        """The size of this rank's columns."""
        return sum(column.nbytes for column in self.columns.values())

    def check(self, ids: Tensor) -> None:
        """Refuse ids outside [0, N).

        Raises:
            ValueError: naming an id and N.
        """
        low, high = (int(bound) for bound in torch.aminmax(ids))
        if low < 0 or high >= self.num_samples:
            raise ValueError(
                f"id {low if low < 0 else high} is not one of the {self.num_samples} samples that the loss keeps state of "
                f"(ids 0 to {self.num_samples - 1}): was the state made for another data set?"
            )

    def read(self, ids: Tensor) -> dict[str, Tensor]:
        """The columns of ids (B,), the same on every rank → name → (2, B)."""
        is_owned, slots = self._owned(ids)
        values = torch.zeros(len(self.columns), NUM_MODALITIES, len(ids), device=ids.device)
        for row, column in zip(values, self.columns.values(), strict=True):
            row[:, is_owned] = column[:, slots]
        return dict(zip(self.columns, self.world.sum(values), strict=True))

    def update(self, ids: Tensor, values: dict[str, Tensor]) -> None:
        """Keep the values, name → (2, B), of ids (B,); all occurrences of an id must carry the same."""
        is_owned, slots = self._owned(ids)
        for name, value in values.items():
            column = self.columns[name]
            column[:, slots] = value[:, is_owned].to(column.dtype)

    def fill(self, name: str, table: Tensor) -> None:
        """Set a column of all samples from a table (2, N) that every rank has.

        Raises:
            ValueError: if the table has another size, or entries that are not positive numbers.
        """
        expected = (NUM_MODALITIES, self.num_samples)
        if tuple(table.shape) != expected:
            raise ValueError(f"the table of {name} has shape {tuple(table.shape)}, {expected} is needed")
        if num_missing := int((~(table > 0)).any(0).sum()):
            raise ValueError(f"the table of {name} lacks {num_missing} of {self.num_samples} ids")
        self.columns[name].copy_(table[:, self.world.rank :: self.world.size])

    def save(self, directory: str | Path) -> None:
        """Write this rank's file; all ranks together make the whole."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / _FILE.format(rank=self.world.rank, size=self.world.size)
        columns = {name: column.cpu().contiguous() for name, column in self.columns.items()}
        save_file(columns, path, metadata={"num_samples": str(self.num_samples)})

    def load(self, directory: str | Path, num_writers: int) -> None:
        """Read what any number of ranks has saved.

        Args:
            num_writers: how many these were. Files of another number may lie beside theirs: a run that was killed while it
                wrote, and continued on other ranks, has written there twice.

        Raises:
            FileNotFoundError: if not every rank's file is there.
            ValueError: if it was saved for other samples or by another loss.
        """
        for rank, path in enumerate(_files(Path(directory), num_writers)):
            # Of the samples that this file holds, in order, which are ours, and where?
            ids = torch.arange(rank, self.num_samples, num_writers)
            is_owned, slots = self._owned(ids)
            if not is_owned.any():
                continue
            with safe_open(path, "pt") as file:
                num_samples = int((file.metadata() or {}).get("num_samples", -1))
                if num_samples != self.num_samples:
                    raise ValueError(f"{path} holds the state of {num_samples} samples, not of {self.num_samples}")
                if set(file.keys()) != set(self.columns):
                    raise ValueError(f"{path} holds {_names(file.keys())}; this loss keeps {_names(self.columns)}")
                for name, column in self.columns.items():
                    column[:, slots] = file.get_tensor(name)[:, is_owned].to(column.device)

    def _owned(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the ids are this rank's, (B,) bool, and the slots of those."""
        is_owned = ids % self.world.size == self.world.rank
        return is_owned, ids[is_owned] // self.world.size


def _files(directory: Path, num_writers: int) -> list[Path]:
    """The file of every rank that wrote, in their order."""
    paths = [directory / _FILE.format(rank=rank, size=num_writers) for rank in range(num_writers)]
    if missing := [path.name for path in paths if not path.exists()]:
        raise FileNotFoundError(
            f"{directory} does not hold the per-sample state of {num_writers} ranks: {_names(missing)} missing"
        )
    return paths


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
