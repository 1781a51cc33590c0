"""Images per second and core: `PairSource` beside webdataset + torch DataLoader, with the same transforms.

    .venv/bin/python -m benchmarks.image_pipeline [--data DIR] [--image-size 224] [--num-rounds 5]

Every pipeline yields batches of uint8 views (random-resized crop .5–1, bicubic, flip) and 30 tokens per caption;
scaling and normalisation happen on the device. Our pipeline reads through the source itself, in this process, in the
order of a training plan. It also checks every image against its checksum and computes every pair's digest, which the
other pipeline does not. That of webdataset is what one would write by hand: a shuffle buffer of 1000, Pillow, no DataLoader
workers. It lets Pillow decode a JPEG at no more than the size that its crop needs (`draft`), as ours does. One process and
one thread are used, so that CPU seconds are core seconds.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

# This must be set before tokenizers starts threads, whose CPU time would be counted, too.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np
import torch
import tyro
import webdataset
from PIL import Image
from transformers import PreTrainedTokenizerFast

from benchmarks.measure import print_setting, print_table, ratios, spread
from pipelines.images.manifest import ImageManifest
from pipelines.images.pairs import PairSource
from pipelines.images.prepare import PrepareImagesConfig, prepare_images
from pipelines.images.views import AugmentationConfig, random_crop
from pipelines.plan import StreamPlan
from pipelines.text.tokenization import train_bpe

TARGET = 0.95
WINDOW_SIZE = 32_768
NUM_TEXT_TOKENS = 30
OURS, PEER = "PairSource", "webdataset + DataLoader"
IMAGES = "jpg;jpeg;png;webp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What to measure."""

    data: str = ""
    """A local directory of img2dataset tars. Default: generated tars of `num_images` photograph-like JPEGs."""
    num_images: int = 2048
    stored_size: int = 384
    """Shorter side of the generated images, in pixels."""
    image_size: int = 224
    batch_size: int = 64
    num_batches: int = 16
    """Number of batches that every pipeline yields in a round."""
    num_rounds: int = 7


def generate(directory: Path, num_images: int, size: int) -> None:
    """Write tars of 512 samples: noise with the spectrum of photographs, 3 : 4 or 4 : 3, JPEG quality 90."""
    rng = np.random.default_rng(0)
    for first in range(0, num_images, 512):
        with tarfile.open(directory / f"{first // 512:05d}.tar", "w") as file:
            for number in range(first, min(first + 512, num_images)):
                shape = (size, size * 4 // 3) if rng.random() < 0.5 else (size * 4 // 3, size)
                fy, fx = np.meshgrid(np.fft.fftfreq(shape[0]), np.fft.rfftfreq(shape[1]), indexing="ij")
                spectrum = np.fft.rfft2(rng.standard_normal((3, *shape))) / (np.hypot(fx, fy) + 1 / size)
                pixels = np.fft.irfft2(spectrum, shape)
                pixels = 128 + 50 * (pixels - pixels.mean()) / pixels.std()
                buffer = io.BytesIO()
                image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8).transpose(1, 2, 0))
                image.save(buffer, "JPEG", quality=90)
                caption = " ".join(f"word{word}" for word in rng.integers(200, size=rng.integers(6, 20)))
                for suffix, data in (("jpg", buffer.getvalue()), ("txt", caption.encode())):
                    info = tarfile.TarInfo(f"{number:09d}.{suffix}")
                    info.size = len(data)
                    file.addfile(info, io.BytesIO(data))


def prepare(source: str, directory: str) -> ImageManifest:
    """Prepare the images as pipelines.images.prepare does, but without Ray."""
    return prepare_images(PrepareImagesConfig(source=source), directory)


def read_epoch(source: PairSource, batch_size: int, window_size: int, number: int) -> Iterator[Any]:
    """Yield the batches of an epoch as `pipelines.stream.RankStream` reads them, without Ray."""
    num_pairs = source.manifest.num_pairs
    plan = StreamPlan(shard_sizes=source.manifest.shard_sizes, seed=0, window_size=window_size)
    windows = list(plan.windows(number * num_pairs, (number + 1) * num_pairs))
    for index, window in enumerate(windows):
        later = windows[index + 1].shards if index + 1 < len(windows) else ()
        source.prefetch(window.shards, later)
        for start in range(window.start, window.stop, batch_size):
            places = np.arange(start, min(start + batch_size, window.stop))
            yield source.read(*plan.locate(window, places), number)


def make_transform(image_size: int) -> Callable[[tuple[bytes, bytes]], tuple[torch.Tensor, str]]:
    """Return a function that makes a view of an image, and a text of a caption, from their files."""
    rng, augmentation, size = np.random.default_rng(0), AugmentationConfig(), image_size

    def transform(sample: tuple[bytes, bytes]) -> tuple[torch.Tensor, str]:
        image = Image.open(io.BytesIO(sample[0]))
        width, height = image.size
        left, top, right, bottom = random_crop(width, height, augmentation, rng)
        image.draft(None, (math.ceil(width * size / (right - left)), math.ceil(height * size / (bottom - top))))
        x, y = image.width / width, image.height / height
        view = image.convert("RGB").resize(
            (size, size), Image.Resampling.BICUBIC, box=(left * x, top * y, right * x, bottom * y)
        )
        if rng.random() < augmentation.flip_probability:
            view = view.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(view)), sample[1].decode()

    return transform


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the generated captions."""
    tokenizer = train_bpe([f"word{number}" for number in range(200)], 512)
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def collate(samples: list[tuple[torch.Tensor, str]], tokenizer: PreTrainedTokenizerFast) -> dict[str, torch.Tensor]:
    """Make a batch of views and texts."""
    texts = [text for _, text in samples]
    options = {"padding": "max_length", "truncation": True, "max_length": NUM_TEXT_TOKENS, "return_tensors": "pt"}
    return {"images": torch.stack([image for image, _ in samples]), **tokenizer(texts, **options)}


def make_webdataset_loader(
    tars: list[str], tokenizer: PreTrainedTokenizerFast, image_size: int, batch_size: int
) -> Iterator[Any]:
    """Return an iterator over the batches of a handwritten webdataset pipeline."""
    dataset = webdataset.WebDataset(tars, shardshuffle=len(tars), handler=webdataset.warn_and_continue)
    dataset = dataset.repeat().shuffle(1000).to_tuple(IMAGES, "txt").map(make_transform(image_size))
    together = partial(collate, tokenizer=tokenizer)
    return iter(torch.utils.data.DataLoader(dataset, batch_size=batch_size, collate_fn=together))


def main(arguments: Arguments) -> None:
    """Run the benchmark and print the results."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(arguments.data or f"{scratch}/data")
        if not arguments.data:
            data.mkdir()
            generate(data, arguments.num_images, arguments.stored_size)
        Path(scratch, "prepared").mkdir()
        manifest = prepare(str(data), f"{scratch}/prepared")
        tars = [shard.archive for shard in manifest.shards if shard.num_pairs]
        num_bytes = sum(shard.num_bytes for shard in manifest.shards) / manifest.num_images
        print_setting(arguments, "torch", "pillow", "webdataset")
        print(f"{manifest.num_pairs} pairs, {num_bytes / 1024:.0f} KiB an image")
        tokenizer, size = make_tokenizer(), arguments.batch_size
        source = PairSource(
            manifest=manifest, tokenizer=tokenizer, image_size=arguments.image_size, num_text_tokens=NUM_TEXT_TOKENS
        )
        pipelines: dict[str, Iterator[Any]] = {
            OURS: itertools.chain.from_iterable(
                read_epoch(source, size, WINDOW_SIZE, number) for number in itertools.count()
            ),
            PEER: make_webdataset_loader(tars, tokenizer, arguments.image_size, size),
        }
        speeds: dict[str, list[float]] = {name: [] for name in pipelines}
        for number in range(arguments.num_rounds + 1):
            for name, batches in pipelines.items():
                started, num_images = time.process_time(), 0
                while num_images < arguments.num_batches * arguments.batch_size:
                    num_images += len(next(batches)["images"])
                if number:  # the first round fills the shuffle buffer and warms up
                    speeds[name].append(num_images / (time.process_time() - started))
    rows = [[name, f"{statistics.median(of):.1f}", spread(ratios(speeds[OURS], of))] for name, of in speeds.items()]
    print_table([f"target {TARGET} of {PEER}", "images/s a core", "ours / it"], rows)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
