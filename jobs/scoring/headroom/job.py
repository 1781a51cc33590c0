"""The job: held-out data → tables of measured predictions → the test → figures, a diagram and MLflow.

The figures depend neither on the number of workers nor on the order in which they finish.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import ray
import torch

from jobs.engine.cluster import start_ray
from jobs.engine.identity import flatten
from jobs.engine.tracking import resolve_uri
from jobs.scoring.headroom.config import Headroom
from jobs.scoring.headroom.report import Question, figures, metrics, plot, summary
from jobs.scoring.headroom.tables import count_documents, read_measured
from jobs.scoring.results import ResultRun, publish
from jobs.scoring.units import UnitStore, absolute_output, settings_digest
from tempnet.headroom.run import HeadroomTest, run_headroom_test

RESULTS_FILE = "headroom.json"
DIAGRAM_FILE = "reliability.png"


def measure_headroom(config: Headroom) -> dict[str, Any]:
    """Run or continue the job, print its tables and verdicts, and return what headroom.json holds.

    Raises:
        ValueError, OSError: as far as possible before any work starts, naming the field and the value.
        ScoringFailedError: naming everything that failed; what was finished is kept.
        TooManyProblemsError: if too many records are unreadable.
    """
    from jobs.scoring.headroom.pairs import PairMeasurement
    from jobs.scoring.headroom.texts import TextMeasurement

    uri = resolve_uri(config.tracking, config.run.resolved_storage)
    measurement = PairMeasurement.resolve(config) if config.images else TextMeasurement.resolve(config)
    output, record = absolute_output(config.output), measurement.record()
    UnitStore(output).claim(record)
    started = time.monotonic()
    questions = measurement.measure(output)
    start_ray()
    cpus = config.workers.cpus_per_worker
    run = ray.remote(num_cpus=cpus)(run_test)
    tests = ray.get([run.remote(output, question, config.folds, max(1, int(cpus))) for question in questions])
    found = [
        (question, test, figures(test, question, least_gain=config.least_gain))
        for question, test in zip(questions, tests, strict=True)
    ]
    values: dict[str, Any] = {}
    for question, _, part in found:
        values |= {question.name: part} if question.name else part
    values |= {"folds": config.folds, **measurement.facts(output, questions), "settings": record}
    said = "\n\n".join(summary(question, part) + measurement.advice(test, question) for question, test, part in found)
    digest = settings_digest(record)

    def write(directory: Path) -> None:
        (directory / RESULTS_FILE).write_text(json.dumps(_finite(values), indent=1, ensure_ascii=False) + "\n")
        plot(found, directory / DIAGRAM_FILE)

    publish(
        output,
        write,
        uri=uri,
        experiment=config.tracking.experiment,
        run=ResultRun(
            name="headroom",
            digest=digest,
            parameters=flatten(config),
            metrics={name: value for question, _, part in found for name, value in metrics(question, part)},
            note=said,
            data_sets={"evaluation": ("images" if config.images else "text", digest, measurement.source)},
        ),
    )
    if measurement.warning:
        print(f"\n{measurement.warning}")
    print(
        f"\n{said}\n{time.monotonic() - started:.0f} s; gains per {questions[0].case}, ± 95 % over "
        f"{questions[0].document}s\n{output}/{RESULTS_FILE} and {DIAGRAM_FILE}"
    )
    return values


def run_test(output: str, question: Question, num_folds: int, num_threads: int) -> HeadroomTest:
    """Run the test that answers a question on its tables, in this process."""
    torch.set_num_threads(num_threads)
    return run_headroom_test(
        lambda: read_measured(output, question.files, with_end=question.with_end),
        count_documents(output, question.files),
        num_folds=num_folds,
    )


def _finite(value: Any) -> Any:
    """Returns the values with None in the place of NaN, which JSON does not know."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
