"""Tokenise and pack text archives once, ahead of training (which otherwise does it itself).

python -m jobs.prepare_text --source data/sample/text/train --tokenizer data/sample/tokenizer --context-length 128
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from jobs.command_line import fail
from jobs.training.config import RunSection
from pipelines.prepare import PrepareConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareTextJob:
    """What to prepare, and where to."""

    prepare: Annotated[PrepareConfig, tyro.conf.arg(name="")]
    storage: str = ""
    """The storage of the runs that will use it. Default: $TEMPNET_HOME, else ./runs."""


def main(arguments: Sequence[str]) -> int:
    """Run the job."""
    job = tyro.cli(PrepareTextJob, args=arguments, prog="python -m jobs.prepare_text", description=__doc__)
    from jobs.cluster import start_ray
    from pipelines.archives import list_archives
    from pipelines.prepare import describe, prepare_text
    from pipelines.problems import TooManyProblemsError
    from pipelines.tokenization import load_tokenizer

    try:
        storage = RunSection(name="prepared", storage=job.storage).resolved_storage
        list_archives(job.prepare.source)
        load_tokenizer(job.prepare.tokenizer)
        start_ray()
        started = time.monotonic()
        manifest = prepare_text(job.prepare, f"{storage}/prepared")
    except (ValueError, OSError, TooManyProblemsError) as error:
        fail(str(error))
    print(f"{manifest.directory}\n{describe(manifest, time.monotonic() - started)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
