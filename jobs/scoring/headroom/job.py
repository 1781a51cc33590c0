"""The job: text → parts → a pool of models → tables of measured tokens → the test → figures, a diagram and MLflow.

The model reads the text once. A job that is started again measures only the parts that its output still lacks. The
figures depend neither on the number of workers nor on the order in which parts are finished.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import ray
import torch

from jobs.engine.cluster import start_ray
from jobs.engine.export import open_export
from jobs.engine.identity import flatten
from jobs.engine.tracking import finish_run, open_run, resolve_uri, survive_outage
from jobs.scoring.headroom.config import Headroom
from jobs.scoring.headroom.measure import Measurer
from jobs.scoring.headroom.report import figures, plot, table
from jobs.scoring.headroom.settings import HeadroomSettings, resolve_settings
from jobs.scoring.headroom.tables import count_documents, read_measured
from jobs.scoring.stages import ScoringFailedError, Stages, run_stages
from jobs.scoring.temperatures.tables import existing_parts, part_file, write_part
from jobs.scoring.temperatures.texts.parts import Part, ReadArchive, read_parts
from jobs.scoring.temperatures.texts.settings import claim_output, record_digest
from pipelines.archives import Archive
from pipelines.problems import check_problems
from pipelines.storage import relative, resolve
from tempnet.headroom.run import HeadroomTest, run_headroom_test

RESULTS_FILE = "headroom.json"
DIAGRAM_FILE = "reliability.png"


def measure_headroom(config: Headroom) -> dict[str, Any]:
    """Run or continue the job, print its table and verdict, and return the figures.

    Raises:
        ValueError, OSError: before any work starts, see `resolve_settings`.
        ScoringFailedError: naming every archive that failed; the parts that were finished are kept.
        TooManyProblemsError: if too many records are unreadable.
    """
    uri = resolve_uri(config.tracking, config.run.resolved_storage)
    settings, archives = resolve_settings(config)
    output = config.output if "://" in config.output else resolve(config.output)[1]
    record = settings.record(archives)
    claim_output(output, record)
    started = time.monotonic()
    files = _measure_text(config, settings, archives, output)
    start_ray()
    run = ray.remote(num_cpus=config.workers.cpus_per_worker)(_run_test)
    test: HeadroomTest = ray.get(run.remote(output, files, config.folds, max(1, int(config.workers.cpus_per_worker))))
    values = figures(test, least_gain=config.least_gain)
    values |= {"folds": config.folds, "known_text": list(settings.known_text), "settings": record}
    with open_export(output) as directory:
        (directory / RESULTS_FILE).write_text(json.dumps(_finite(values), indent=1, ensure_ascii=False) + "\n")
        plot(test, values["best_features"], directory / DIAGRAM_FILE)
        if uri:
            with survive_outage("the headroom test"):
                tracked = open_run(
                    uri=uri,
                    experiment=config.tracking.experiment,
                    name="headroom",
                    directory=f"{output}#{record_digest(record)}",
                    parameters=flatten(config),
                    tags={},
                    data_sets={"evaluation": ("text", record_digest(record), settings.source)},
                )
                note = f"{values['verdict']}\n\n{table(values)}"
                finish_run(tracked, status="FINISHED", artifacts=directory, metrics=_metrics(values), note=note)
    if settings.known_text:
        print("\nThe model was trained on some of this text: the verdict does not hold for new text.")
    print(
        f"\n{table(values)}\n\n{values['verdict']}\n"
        f"{values['num_tokens']:,} tokens of {values['num_documents']:,} documents, {time.monotonic() - started:.0f} s; "
        f"gains per token, ± 95 % over documents\n{output}/{RESULTS_FILE} and {DIAGRAM_FILE}"
    )
    return values


def _measure_text(config: Headroom, settings: HeadroomSettings, archives: list[Archive], output: str) -> list[str]:
    """Write the parts that are missing in `output`, and return the names of all parts in order."""
    done = existing_parts(output)
    missing = [number for number in range(len(archives)) if not _is_complete(output, number, done)]
    if done:
        print(
            f"{output} holds {len(done)} parts; {len(archives) - len(missing)} of {len(archives)} archives are complete"
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

    stages: Stages[int] = Stages(read=read, model=partial(Measurer, settings, **config.workers.devices), write=write)
    failed = run_stages(stages, missing, config.workers, title=names.__getitem__, keep=keep)
    if failed:
        raise ScoringFailedError(failed)
    records = [record for number in range(len(archives)) if (record := ReadArchive.load(output, number)) is not None]
    check_problems(settings.source, [record.entry for record in records], config.max_bad_share, field="max_bad_share")
    return [part_file(number, part) for number, record in enumerate(records) for part in range(record.num_parts)]


def _run_test(output: str, files: list[str], num_folds: int, num_threads: int) -> HeadroomTest:
    torch.set_num_threads(num_threads)
    return run_headroom_test(lambda: read_measured(output, files), count_documents(output, files), num_folds=num_folds)


def _is_complete(output: str, number: int, done: frozenset[str]) -> bool:
    record = ReadArchive.load(output, number)
    return record is not None and all(part_file(number, part) in done for part in range(record.num_parts))


def _metrics(values: dict[str, Any]) -> dict[str, float]:
    """Returns the figures for MLflow, gains in thousandths of a nat per token."""
    metrics = {
        "best_constant/tau": values["best_constant"]["tau"],
        "best_constant/gain_mnat": 1000 * values["best_constant"]["gain"]["mean"],
        "best_constant/ece": values["best_constant"]["ece"]["mean"],
        "cross_entropy": values["cross_entropy"],
    }
    for name, found in values["per_token"].items():
        metrics |= {
            f"{name}/gain_mnat": 1000 * found["gain"]["mean"],
            f"{name}/gain_half_width_mnat": 1000 * found["gain"]["half_width"],
            f"{name}/ece": found["ece"]["mean"],
        }
    return metrics


def _finite(value: Any) -> Any:
    """Returns the values with None in the place of NaN, which JSON does not know."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
