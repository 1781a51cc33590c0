"""Make the sample data: English text and source code from the installed packages, captioned images, and tokenizers.

For example:

    python -m jobs.sample_data --directory data/sample
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from jobs.engine.command_line import ending_in_one_line, parse_options, run_job
from pipelines.archives import list_archives
from pipelines.sample.images import IMAGE_SIZE_DEFAULT, NUM_IMAGES_DEFAULT, read_captions, write_images
from pipelines.sample.text import NUM_BYTES_DEFAULT, write_code, write_corpus
from pipelines.text.reading import Document, read_documents
from pipelines.text.tokenization import train_bpe, train_wordpiece

_NUM_TOKENIZER_CHARACTERS = 6_000_000
_TEXT_WORDPIECE_SIZE = 4096
_CAPTION_VOCAB_SIZE = 1024  # This exceeds the number of words in the captions, so every word becomes one token.

Part = Literal["text", "code", "images"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleDataConfig:
    """Which sample data to make, and where."""

    directory: str = "data/sample"
    """Directory for the sample data: `text/{train,validation}` with the tokenizers `tokenizer` and `wordpiece`, `code`,
    text of another kind, and `images/{train,validation,test,zero_shot,tokenizer}`."""
    parts: tuple[Part, ...] = ("text", "code", "images")
    """Parts to make."""
    num_bytes: int = NUM_BYTES_DEFAULT
    """Maximum number of bytes of text to collect, at least 1 000 000."""
    vocab_size: int = 2048
    """Vocabulary size of the BPE tokenizer of the text, at least 512."""
    num_images: int = NUM_IMAGES_DEFAULT
    """Number of image-text pairs for training. In addition, 1 000 images each are made for validation, test and
    zero-shot classification."""
    image_size: int = IMAGE_SIZE_DEFAULT
    """Side of the square images in pixels, from 32 to 1024."""
    images_seed: int = 0
    """Random seed of the images. Another seed gives other images of the same kind, with the same frequent concepts."""

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("parts is empty: choose text, code, images or several")
        for name, least in (("num_bytes", 1_000_000), ("vocab_size", 512), ("num_images", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} = {getattr(self, name)} is too small: choose at least {least:,}")
        if "://" in self.directory:
            raise ValueError(
                f"directory = {self.directory!r} is a URI, but sample data are written to a local directory"
            )
        if not 32 <= self.image_size <= 1024:
            raise ValueError(f"image_size = {self.image_size} is outside 32 … 1024: smaller, the shapes cannot be told")


def make_sample_data(config: SampleDataConfig) -> str:
    """Make the parts of the sample data that do not exist yet, and return one line of text about each part.

    `sample.json` records the existing parts, each with the fields that it was made with and a summary.
    """
    directory = Path(config.directory)
    path = directory / "sample.json"
    record: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    lines = {}
    missing: dict[Part, dict[str, Any]] = {}
    for part in dict.fromkeys(config.parts):
        fields = {name: value for name, value in asdict(config).items() if name in _FIELDS[part]}
        defaults = {name: SampleDataConfig.__dataclass_fields__[name].default for name in fields}
        if part in record and defaults | record[part]["config"] == fields:
            lines[part] = f"{directory / part} is there already"
        else:
            missing[part] = fields
    for part, summary, lines[part] in _make_all(list(missing), config):
        record[part] = {"config": missing[part], "summary": summary}
        path.write_text(json.dumps(record, indent=1) + "\n")
    return "\n".join(lines[part] for part in dict.fromkeys(config.parts))


def _make_all(parts: list[Part], config: SampleDataConfig) -> Iterator[tuple[Part, dict[str, int], str]]:
    """Make parts, several of them side by side: text and images take half a minute of one core each."""
    if len(parts) < 2:
        yield from (_make(part, config) for part in parts)
        return
    with ProcessPoolExecutor(len(parts), multiprocessing.get_context("spawn")) as pool:
        for made in as_completed([pool.submit(_make, part, config) for part in parts]):
            yield made.result()


def _make(part: Part, config: SampleDataConfig) -> tuple[Part, dict[str, int], str]:
    """Make a part, and return its name, its summary, and a line of text about it."""
    started = time.monotonic()
    summary, line = {"text": _make_text, "code": _make_code, "images": _make_images}[part](config)
    return part, summary, f"{Path(config.directory) / part}: {line}, in {time.monotonic() - started:.0f} s"


_FIELDS = {"text": ("num_bytes", "vocab_size"), "code": (), "images": ("num_images", "image_size", "images_seed")}


def _make_text(config: SampleDataConfig) -> tuple[dict[str, int], str]:
    directory = Path(config.directory)
    summary = write_corpus(directory / "text", num_bytes=config.num_bytes)
    train_bpe(_texts(directory / "text" / "train"), config.vocab_size).save_pretrained(directory / "tokenizer")
    # Encoders are trained by masking tokens, and a language model's tokenizer has no mask token.
    train_wordpiece(_texts(directory / "text" / "train"), _TEXT_WORDPIECE_SIZE).save_pretrained(directory / "wordpiece")
    return asdict(summary), (
        f"{summary.num_documents_train} training documents ({summary.num_bytes_train / 1e6:.1f} MB), "
        f"{summary.num_documents_validation} for validation ({summary.num_bytes_validation / 1e6:.1f} MB), "
        f"tokenizers of {config.vocab_size} tokens (BPE) and {_TEXT_WORDPIECE_SIZE} (WordPiece)"
    )


def _make_code(config: SampleDataConfig) -> tuple[dict[str, int], str]:
    number = write_code(Path(config.directory, "code"))
    return {"num_documents": number}, f"the beginnings of {number} Python files, text of another kind"


def _make_images(config: SampleDataConfig) -> tuple[dict[str, int], str]:
    directory = Path(config.directory, "images")
    summary = write_images(
        directory, num_images=config.num_images, image_size=config.image_size, seed=config.images_seed
    )
    tokenizer = train_wordpiece(read_captions(directory / "train"), _CAPTION_VOCAB_SIZE)
    tokenizer.save_pretrained(directory / "tokenizer")
    return asdict(summary), (
        f"{summary.num_images_train} training pairs ({summary.num_bytes / 1e6:.1f} MB with all splits), "
        f"{summary.num_images_validation} images for validation, {summary.num_images_test} for test, "
        f"{summary.num_images_zero_shot} in {summary.num_classes_zero_shot} classes, a tokenizer of {len(tokenizer)} tokens"
    )


def _texts(directory: Path) -> Iterator[str]:
    """Yield training texts in the order of reading, as many as are needed to train a tokenizer."""
    num_characters = 0
    for archive in list_archives(str(directory)):
        for item in read_documents(str(directory), archive):
            if isinstance(item, Document):
                if num_characters >= _NUM_TOKENIZER_CHARACTERS:
                    return
                num_characters += len(item.text)
                yield item.text


def main(arguments: Sequence[str]) -> int:
    """Run the job; returns the exit status."""
    config = parse_options(SampleDataConfig, arguments, job="sample_data", description=__doc__)
    with ending_in_one_line():
        print(make_sample_data(config))
    return 0


if __name__ == "__main__":
    run_job(main)
