"""Tokenise text archives into blocks or whole documents, ahead of training (which otherwise does this itself).

For example:

    python -m jobs.prepare_text --source data/sample/text/train --tokenizer data/sample/tokenizer --context-length 128
    python -m jobs.prepare_text --source data/sample/text/train --tokenizer data/sample/wordpiece --least-num-tokens 128
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from jobs.engine.command_line import ending_in_one_line, parse_options, run_job
from jobs.engine.config import RunSection
from pipelines.text.prepare import PrepareConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareTextJob:
    """What to prepare, and where to store it."""

    prepare: Annotated[PrepareConfig, tyro.conf.arg(name="")]
    context_length: int = 0
    """Pack documents into blocks of this many tokens, for language models. Give either this or --least-num-tokens."""
    least_num_tokens: int = 0
    """Keep whole documents that have at least this many tokens, for sentence encoders. Give either this or
    --context-length."""
    problems: str = ""
    """Path or URI of a file to which every lost record is written as a line of JSON: kind of problem, archive, position
    in the archive, and message. If empty: no such file is written."""
    storage: str = ""
    """Storage directory or URI (run.storage) of the runs that will use the data. If empty: $TEMPNET_HOME, else ./runs."""

    def __post_init__(self) -> None:
        if bool(self.context_length) == bool(self.least_num_tokens):
            raise ValueError(
                f"context_length = {self.context_length}, least_num_tokens = {self.least_num_tokens}: give one of them, "
                "the tokens of a block or the least of a whole document"
            )


def main(arguments: Sequence[str]) -> int:
    """Run the job; returns the exit status."""
    job = parse_options(PrepareTextJob, arguments, job="prepare_text", description=__doc__)
    from jobs.engine.cluster import start_ray
    from pipelines.archives import list_archives
    from pipelines.store_errors import RETRIES, describe_retries
    from pipelines.text.manifest import Layout
    from pipelines.text.packing import DocumentConfig, PackingConfig
    from pipelines.text.prepare import describe, prepare_text
    from pipelines.text.tokenization import load_tokenizer

    with ending_in_one_line():
        storage = RunSection(name="prepared", storage=job.storage).resolved_storage
        list_archives(job.prepare.source)
        tokenizer = load_tokenizer(job.prepare.tokenizer, needs_eos=bool(job.context_length))
        layout: Layout = (
            PackingConfig.for_tokenizer(tokenizer, job.context_length)
            if job.context_length
            else DocumentConfig(least_num_tokens=job.least_num_tokens, vocab_size=len(tokenizer))
        )
        start_ray()
        started = time.monotonic()
        manifest = prepare_text(job.prepare, layout, f"{storage}/prepared", losses=job.problems)
    print(f"{manifest.directory}\n{describe(manifest, time.monotonic() - started)}")
    if retries := RETRIES.take():
        print(describe_retries(retries, retries))
    return 0


if __name__ == "__main__":
    run_job(main)
