"""Make the sample data: English documentation prose of the installed packages, and a tokenizer trained on it.

python -m jobs.sample_data --directory data/sample
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro

from jobs.command_line import fail
from pipelines.archives import list_archives
from pipelines.sample_text import write_corpus
from pipelines.text import Document, read_documents
from pipelines.tokenization import train_bpe

_NUM_TOKENIZER_CHARACTERS = 6_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleDataConfig:
    """What to make and where."""

    directory: str = "data/sample"
    """Gets `text/train`, `text/validation` and `tokenizer`."""
    num_bytes: int = 24_000_000
    """Text to collect, at most."""
    vocab_size: int = 2048
    """Tokens of the tokenizer."""

    def __post_init__(self) -> None:
        if self.num_bytes < 1_000_000:
            raise ValueError(f"num_bytes = {self.num_bytes} is too little to train on: choose at least 1 000 000")
        if self.vocab_size < 512:
            raise ValueError(f"vocab_size = {self.vocab_size} is too small for a byte-level BPE: choose at least 512")


def make_sample_data(config: SampleDataConfig) -> str:
    """Make the sample data, unless the same is there already; returns a line for a person."""
    directory = Path(config.directory)
    record = directory / "sample.json"
    if record.is_file() and json.loads(record.read_text())["config"] == asdict(config):
        return f"{directory} is there already"
    started = time.monotonic()
    summary = write_corpus(directory / "text", num_bytes=config.num_bytes)
    train_bpe(_texts(directory / "text" / "train"), config.vocab_size).save_pretrained(directory / "tokenizer")
    record.write_text(json.dumps({"config": asdict(config), "summary": asdict(summary)}, indent=1) + "\n")
    return (
        f"{directory}: {summary.num_documents_train} training documents ({summary.num_bytes_train / 1e6:.1f} MB), "
        f"{summary.num_documents_validation} for validation ({summary.num_bytes_validation / 1e6:.1f} MB), "
        f"a tokenizer of {config.vocab_size} tokens, in {time.monotonic() - started:.0f} s"
    )


def _texts(directory: Path) -> Iterator[str]:
    """Training texts in reading order, as many as the tokenizer needs."""
    num_characters = 0
    for archive in list_archives(str(directory)):
        for item in read_documents(str(directory), archive):
            if isinstance(item, Document):
                if num_characters >= _NUM_TOKENIZER_CHARACTERS:
                    return
                num_characters += len(item.text)
                yield item.text


def main(arguments: Sequence[str]) -> int:
    """Run the job."""
    try:
        config = tyro.cli(SampleDataConfig, args=arguments, prog="python -m jobs.sample_data", description=__doc__)
        print(make_sample_data(config))
    except (ValueError, OSError) as error:
        fail(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
