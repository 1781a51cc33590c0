"""Run one Ray Data task per unit of data and record each finished one, so that an interrupted preparation goes on.

Where Ray is not running, the units are prepared in this process, one after the other.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import ray
import ray.data

from pipelines.retries import RETRIES, RetryLog
from pipelines.storage import read_json, write_json

_NUM_THREADS = 16


def run_recorded_tasks(
    prepare: Callable[[int], dict[str, Any]],
    names: Sequence[str],
    directory: str,
    *,
    resources: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Call `prepare(number)` for every unit that has no record in `directory` yet; return the results of all units.

    The units are balanced over the CPUs of the cluster, whichever archives they belong to. Requests to object stores that
    the tasks had to repeat are shown on the standard error, and counted in `pipelines.retries.RETRIES`.

    Args:
        prepare: function that runs in a Ray task and returns a JSON object. The object is saved as the unit's record
            after `prepare` has returned, so a record exists only if everything else was written.
        names: distinct name of every unit; its record is `<name>.json`, and its number the position in this list.
        directory: path or URI of an existing directory, which holds the records.
        resources: custom Ray resources that every task takes, by which the tasks are kept to certain nodes.

    Returns:
        The results of all units in order, both those computed now and those read from earlier records.
    """
    done = read_records(names, directory)
    rows = [{"number": number} for number, entry in enumerate(done) if entry is None]

    def run(row: dict[str, Any]) -> dict[str, Any]:
        entry = prepare(row["number"])
        write_json(f"{directory}/{names[row['number']]}.json", entry)
        return {"number": row["number"], "entry": json.dumps(entry), "retries": RETRIES.take()}

    if rows:
        retry_log = RetryLog(partial(print, file=sys.stderr, flush=True))
        for row in _map_in_tasks(run, rows, resources or {}) if ray.is_initialized() else map(run, rows):
            number = int(row["retries"])
            RETRIES.add(number)
            retry_log.add(number)
            done[row["number"]] = json.loads(row["entry"])
    return [entry or {} for entry in done]


def _map_in_tasks(
    run: Callable[[dict[str, Any]], dict[str, Any]], rows: Sequence[dict[str, Any]], resources: Mapping[str, float]
) -> Iterator[dict[str, Any]]:
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    dataset = ray.data.from_items(list(rows), override_num_blocks=len(rows)).map(run, resources=dict(resources))
    yield from dataset.iter_rows()


def read_records(names: Sequence[str], directory: str) -> list[dict[str, Any] | None]:
    """Return the record of every unit, or None where there is none yet."""
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="records") as pool:
        return list(pool.map(read_json, [f"{directory}/{name}.json" for name in names]))
