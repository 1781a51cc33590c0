"""Measuring a text: archives → parts of their documents → a pool of models → tables of measured tokens.

The model reads the text once. A job that is started again measures only the parts that its output still lacks. The
tables depend neither on the number of workers nor on the order in which parts are finished.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jobs.scoring.headroom.config import Headroom
from jobs.scoring.headroom.questions import Question
from jobs.scoring.headroom.texts.measure import Measurer
from jobs.scoring.headroom.texts.settings import HeadroomSettings, resolve_settings
from jobs.scoring.stages import ScoringFailedError, Stages, run_stages
from jobs.scoring.temperatures.tables import existing_parts, part_file, write_part
from jobs.scoring.temperatures.texts.parts import Part, ReadArchive, read_parts
from pipelines.archives import Archive
from pipelines.problems import check_problems
from pipelines.storage import relative, resolve

FEATURES = {"scalars": "scalars of the logits", "hidden": "hidden state", "both": "both"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextMeasurement:
    """A text and a causal language model."""

    config: Headroom
    settings: HeadroomSettings
    archives: list[Archive]
    kind: str = "text"

    @classmethod
    def resolve(cls, config: Headroom) -> TextMeasurement:
        """Check a configuration.

        Raises:
            ValueError, OSError: before any work starts, see `resolve_settings`.
        """
        settings, archives = resolve_settings(config)
        return cls(config=config, settings=settings, archives=archives)

    @property
    def source(self) -> str:
        """Path or URI of the text."""
        return self.settings.source

    @property
    def warning(self) -> str:
        """A sentence if the model is known to have been trained on some of the text."""
        known = "The model was trained on some of this text: the verdict does not hold for new text."
        return known if self.settings.known_text else ""

    def record(self) -> dict[str, Any]:
        """Returns everything that decides the measured tokens, without file locations and the batch size."""
        return self.settings.record(self.archives)

    def facts(self) -> dict[str, Any]:
        """Returns the names of the archives that the model was trained on."""
        return {"known_text": list(self.settings.known_text)}

    def measure(self, output: str) -> list[Question]:
        """Write the parts that are missing in `output`, and return the one question with all parts in order.

        Raises:
            ScoringFailedError: naming every archive that failed; the parts that were finished are kept.
            TooManyProblemsError: if too many records are unreadable.
        """
        self._write_missing(output)
        records = [
            record for number in range(len(self.archives)) if (record := ReadArchive.load(output, number)) is not None
        ]
        entries = [record.entry for record in records]
        check_problems(self.source, entries, self.config.max_bad_share, field="max_bad_share")
        files = [part_file(number, part) for number, record in enumerate(records) for part in range(record.num_parts)]
        return [token_question(files)]

    def _write_missing(self, output: str) -> None:
        settings, archives, pool = self.settings, self.archives, self.config.workers
        done = existing_parts(output)
        missing = [number for number in range(len(archives)) if not _is_complete(output, number, done)]
        if done:
            print(
                f"{output} holds {len(done)} parts; {len(archives) - len(missing)} of {len(archives)} archives are "
                "complete"
            )
        root = resolve(settings.source)[1]
        names = [relative(archive.path, root) for archive in archives]

        def read(number: int) -> Iterator[Part]:
            return read_parts(settings, archives[number], number, output, done=done)

        def write(part: Part) -> tuple[int, int]:
            write_part(part.table, output, part.file)
            return part.number, part.table.num_rows

        def keep(number: int, written: tuple[int, int], seconds: float) -> str:
            return f"part {written[0]}: {written[1]} tokens, {written[1] / seconds:,.0f} tokens/s"

        stages: Stages[int] = Stages(read=read, model=partial(Measurer, settings, **pool.devices), write=write)
        failed = run_stages(stages, missing, pool, title=names.__getitem__, keep=keep)
        if failed:
            raise ScoringFailedError(failed)


def token_question(files: Sequence[str]) -> Question:
    """Returns the question that a language model is asked, with the names of its tables."""
    return Question(
        name="",
        title="",
        files=tuple(files),
        noun="token",
        case="token",
        document="document",
        candidate="token",
        features=FEATURES,
        own_name="τ = 1",
    )


def _is_complete(output: str, number: int, done: frozenset[str]) -> bool:
    record = ReadArchive.load(output, number)
    return record is not None and all(part_file(number, part) in done for part in range(record.num_parts))
