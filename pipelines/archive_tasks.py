"""One Ray Data task an archive, with a record of each that is done, so that an interrupted preparation goes on."""

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
    """`prepare(number)` for every archive that has no record in the directory yet; the results in archive order.

    Args:
        prepare: runs in a Ray task; gives a JSON object, which becomes the record once everything else is written.
        directory: path or URI, which exists.
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
