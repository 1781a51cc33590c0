"""Run one Ray Data task per archive and record each finished one, so that an interrupted preparation can be resumed."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import ray.data

from pipelines.storage import read_json, write_json


def run_archive_tasks(
    prepare: Callable[[int], dict[str, Any]], num_archives: int, directory: str
) -> list[dict[str, Any]]:
    """Call `prepare(number)` for every archive that has no record in `directory` yet; return the results of all.

    Args:
        prepare: function that runs in a Ray task and returns a JSON object. The object is saved as the archive's record
            after `prepare` has returned, so a record exists only if everything else was written.
        num_archives: number of archives; `prepare` is called with numbers 0 … num_archives−1.
        directory: path or URI of an existing directory, which holds the records.

    Returns:
        The results of all archives in archive order, both those computed now and those read from earlier records.
    """

    def record(number: int) -> str:
        return f"{directory}/archive-{number:05d}.json"

    done = {number: read_json(record(number)) for number in range(num_archives)}
    rows = [{"number": number} for number in range(num_archives) if done[number] is None]

    def run(row: dict[str, Any]) -> dict[str, Any]:
        entry = prepare(row["number"])
        write_json(record(row["number"]), entry)
        return {"number": row["number"], "entry": json.dumps(entry)}

    if rows:
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        ray.data.DataContext.get_current().enable_progress_bars = False
        for row in ray.data.from_items(rows, override_num_blocks=len(rows)).map(run).iter_rows():
            done[row["number"]] = json.loads(row["entry"])
    return [done[number] or {} for number in range(num_archives)]
