"""Index image–text archives and check every image, ahead of training (which otherwise does this itself).

For example:

    python -m jobs.prepare_images --source s3://bucket/cc3m
    python -m jobs.prepare_images --source coco/val2014 --captions coco/dataset_coco.json --splits train restval
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from jobs.engine.command_line import ending_in_one_line, parse_options, run_job
from jobs.engine.config import RunSection
from pipelines.images.prepare import PrepareImagesConfig

_NUM_EXAMPLES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareImagesJob:
    """What to prepare, and where to store it."""

    prepare: Annotated[PrepareImagesConfig, tyro.conf.arg(name="")]
    problems: str = ""
    """Path or URI of a file to which every lost sample is written as a line of JSON: kind of problem, archive, position
    in the archive, and message. If empty: no such file is written."""
    storage: str = ""
    """Storage directory or URI (run.storage) of the runs that will use the data. If empty: $TEMPNET_HOME, else ./runs."""


def main(arguments: Sequence[str]) -> int:
    """Run the job; returns the exit status."""
    from jobs.engine.cluster import start_ray
    from pipelines.images.prepare import check_source, describe, prepare_images
    from pipelines.store_errors import RETRIES, describe_retries

    job = parse_options(PrepareImagesJob, arguments, job="prepare_images", description=__doc__)
    with ending_in_one_line():
        storage = RunSection(name="prepared", storage=job.storage).resolved_storage
        check_source(job.prepare)
        start_ray()
        started = time.monotonic()
        manifest = prepare_images(
            job.prepare, f"{storage}/prepared", max_bad_share_field="max_bad_share", losses=job.problems
        )
    print(f"{manifest.directory}\n{describe(manifest, time.monotonic() - started)}")
    if retries := RETRIES.take():
        print(describe_retries(retries, retries))
    examples = [example for reading in manifest.readings for example in reading.examples]
    for example in examples[:_NUM_EXAMPLES]:
        print(f"  {example}")
    if len(examples) > _NUM_EXAMPLES:
        print("  …")
    return 0


if __name__ == "__main__":
    run_job(main)
