"""Test data, models and whole jobs in a real S3 server: they do what they do with local files, also if the server fails."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from language_model_support import assert_same_losses
from PIL import Image
from s3_support import ObjectStore, run_object_store
from support import LANGUAGE_MODEL_OPTIONS, ROOT
from text_archive_support import tar

from pipelines.images.manifest import ImageManifest
from pipelines.images.pairs import PairSource
from pipelines.images.prepare import PrepareImagesConfig, prepare_images
from pipelines.plan import StreamPlan
from pipelines.storage import read_bytes, read_json
from pipelines.stream import RankStream
from pipelines.text.tokenization import train_bpe

pytestmark = [pytest.mark.cluster, pytest.mark.long]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ObjectStore]:
    with run_object_store(tmp_path / "log") as store:
        yield store


def test_images_of_a_stream_are_read_once_in_large_ranges(
    cluster: dict[str, str], store: ObjectStore, tmp_path: Path
) -> None:
    """Tars have 9 MB and more, so that each has at least a block, and images that do not compress."""
    (tmp_path / "data").mkdir()
    for number in range(3):
        members = []
        for key in range(16):
            pixels = np.random.default_rng([number, key]).integers(0, 256, (400, 500, 3), dtype=np.uint8)
            buffer = io.BytesIO()
            Image.fromarray(pixels).save(buffer, "PNG", compress_level=0)
            members += [
                (f"{number}{key:02}.png", buffer.getvalue()),
                (f"{number}{key:02}.txt", f"caption {key}".encode()),
            ]
        (tmp_path / "data" / f"{number:05d}.tar").write_bytes(tar(members))
    num_bytes = sum(file.stat().st_size for file in (tmp_path / "data").iterdir())
    store.upload(tmp_path / "data", "bucket/data")
    # The workers of the shared Ray were started without the address of the server, so the URI has it.
    endpoint = store.endpoint.removeprefix("http://")
    uri = f"s3://testing:testing@bucket/data?scheme=http&region=us-east-1&endpoint_override={endpoint}"
    store.behave(latency=0.03)
    local = prepare_images(PrepareImagesConfig(source=str(tmp_path / "data")), str(tmp_path / "local"))
    remote = prepare_images(PrepareImagesConfig(source=uri), str(tmp_path / "remote"))
    assert remote.digest == local.digest
    counts = store.counts()
    assert counts.num_bytes <= 1.05 * num_bytes
    assert counts.num_bytes >= 8e6 * counts.num_gets

    tokenizer = train_bpe([f"caption {number}" for number in range(16)], 300)
    tokenizer.pad_token = tokenizer.eos_token

    def batches(manifest: ImageManifest, rank: int, start: int = 0) -> Iterator[list[int]]:
        """Yield the digests of a rank's batches, of two ranks, from a place on up to the end of two epochs."""
        stream = RankStream(
            source=PairSource(manifest=manifest, tokenizer=tokenizer, image_size=32, cache_bytes=2**30),
            plan=StreamPlan(shard_sizes=manifest.shard_sizes, seed=1, window_size=20), batch_size=8, rank=rank,
            world_size=2, num_readers=0 if manifest is local else 2, num_batches_per_task=2, num_batches_per_output=1,
        )  # fmt: skip
        for batch in stream.batches(start, 2 * sum(manifest.shard_sizes)):
            yield batch["digest"].tolist()

    references = [list(batches(local, rank)) for rank in range(2)]
    # A tar that is gone ends the reading with its name. When it is back, the next batch is the one that was missing.
    line = {"latency": 0.03, "bytes_per_second": 100e6, "share_failing": 0.3, "seed": 1}
    store.behave(**line, gone="00001.tar")
    found: list[list[int]] = []
    with pytest.raises(Exception, match=r"s3://bucket/data/00001\.tar: there is no such object"):
        found.extend(batches(remote, 0))
    assert len(found) < len(references[0])
    all_counts = [store.counts()]
    store.behave(**line)
    assert found + list(batches(remote, 0, start=8 * len(found))) == references[0]
    assert list(batches(remote, 1)) == references[1]
    # Two epochs of two ranks read every byte once, because all processes of the node share the cache.
    all_counts.append(store.counts())
    assert sum(count.num_failed for count in all_counts) > 0
    assert sum(count.num_bytes for count in all_counts) <= 1.05 * num_bytes
    assert sum(count.num_bytes for count in all_counts) >= 8e6 * sum(count.num_gets for count in all_counts)


TINY = [
    *LANGUAGE_MODEL_OPTIONS, "--run.num-steps=6", "--run.checkpoint-every=6", "--run.log-every=3",
    "--validation.every=6", "--validation.num-blocks=8", "--validation.num-oracle-tokens=64",
    "--workers.num-workers=1", "--workers.zero-stage=0", "--tracking.no-enabled",
]  # fmt: skip


def commands(home: str, base: str, export: str) -> list[list[str]]:
    """Return the commands that start from a trained base model, with all their paths below `home`."""
    data = [f"--data.train={home}/text/train", f"--data.validation={home}/text/validation"]
    frozen = [option for option in TINY if not option.startswith(("--model.", "--temperature.target"))]
    return [
        ["train_lm", "frozen-small", *frozen, *data, "--temperature.rho=2", f"--model.path={base}",
         f"--run.storage={home}/runs"],
        ["evaluate_lm", "--models", export, "--temperatures", "one", "tempnet", "--wikitext", f"{home}/words.txt",
         "--storage", f"{home}/runs", "--tracking.no-enabled"],
        ["predict_temperatures", "--model", export, "--text", f"{home}/text/validation", "--output", f"{home}/tau"],
        ["calibrate", "rho", "--model", base, "--text", f"{home}/text/train", "--tau", "0.2", "--num-tokens", "256",
         "--context-length", "32", "--storage", f"{home}/runs", "--output", f"{home}/calibration"],
    ]  # fmt: skip


def run(command: list[str]) -> None:
    job, *arguments = command
    assert importlib.import_module(f"jobs.{job}").main(arguments) == 0, command


def test_a_chain_of_jobs_in_a_store_does_what_it_does_on_local_files(
    cluster: dict[str, str], s3_server: ObjectStore, bucket: str, corpus: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("TEMPNET_MODELS", cluster["TEMPNET_MODELS"])  # The driver and the workers share their copies.
    there, here = f"s3://{bucket}", str(tmp_path / "here")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "text").symlink_to(corpus)
    (tmp_path / "here" / "words.txt").write_text("abc def\ngh ab\n")
    s3_server.upload(corpus, f"{bucket}/text")
    s3_server.upload(tmp_path / "here" / "words.txt", f"{bucket}/words.txt")
    base, export = f"{there}/runs/gpt2-scratch-small/export", f"{there}/runs/frozen-small/export"
    run([
        "train_lm", "gpt2-scratch-small", *TINY, f"--data.train={there}/text/train",
        f"--data.validation={there}/text/validation", f"--data.tokenizer={there}/text/tokenizer",
        f"--run.storage={there}/runs",
    ])  # fmt: skip
    for command in commands(there, base, export):
        run(command)
    for uri, name in ((base, "base"), (export, "export")):
        s3_server.download(uri.removeprefix("s3://"), tmp_path / "here" / name)
    for command in commands(here, f"{here}/base", f"{here}/export"):
        run(command)

    def both(read: Callable[[str], Any]) -> Any:
        """Return what lies in the store, which must equal what lies in the local directory."""
        found = [read(home) for home in (there, here)]
        assert found[0] == found[1]
        return found[0]

    def scores(home: str) -> Any:
        outcome = json.loads(read_bytes(f"{home}/runs/frozen-small/outcome.json"))
        return outcome["validation"], outcome["rivals"]

    def figures(home: str) -> Any:
        columns = json.loads(read_bytes(f"{home}/runs/evaluation/results.json"))["columns"]
        return {column["temperature"]: column["metrics"] for column in columns}

    def table(home: str) -> Any:
        return pq.read_table(io.BytesIO(read_bytes(f"{home}/tau/part-00000-00000.parquet"))).to_pylist()

    assert both(scores)[0]["tau_mean"] > 0
    assert both(figures).keys() == {"one", "tempnet"}
    assert len(both(table)) == 40
    assert 0 < both(lambda home: json.loads(read_bytes(f"{home}/calibration/calibration.json")))["rho"] < 6.3
    assert len(read_bytes(f"{there}/calibration/curve.png")) > 5000


def train_alone(name: str, home: Path, places: dict[str, str], environment: dict[str, str]) -> str:
    """Train `gpt2-scratch-small` with a Ray of its own, and return what it printed."""
    options = [
        *LANGUAGE_MODEL_OPTIONS, "--workers.num-workers=1", "--workers.zero-stage=0", f"--run.name={name}",
        f"--run.storage={home}", f"--tracking.uri=sqlite:///{home}/mlflow.db",
        *(f"--{field}={place}" for field, place in places.items()),
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "jobs.train_lm", "gpt2-scratch-small", *options],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_a_store_that_fails_costs_time_and_is_counted(store: ObjectStore, corpus: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    local = {"data.train": f"{corpus}/train", "data.validation": f"{corpus}/validation"}
    tokenizer = {"data.tokenizer": f"{corpus}/tokenizer"}
    train_alone("local", tmp_path, {**local, **tokenizer, "run.prepared": f"{tmp_path}/prepared"}, environment)
    with run_object_store(tmp_path / "log") as store:
        store.upload(corpus, "bucket/corpus")
        # The client repeats a request several times itself, of which nothing is known; the requests that are counted are
        # those that follow. So many requests for data fail that some of them are needed.
        store.behave(share_failing=0.9, seed=1)
        environment |= store.environment | {"TEMPNET_CACHE": str(tmp_path / "cache")}
        places = {"data.train": "s3://bucket/corpus/train", "data.validation": "s3://bucket/corpus/validation"}
        said = train_alone(
            "store", tmp_path, {**places, **tokenizer, "run.prepared": "s3://bucket/prepared"}, environment
        )
        num_failed = store.counts().num_failed
    outcome, reference = (read_json(f"{tmp_path}/{name}/outcome.json") for name in ("store", "local"))
    assert_same_losses(outcome, reference)
    assert num_failed > 0
    assert 0 < outcome["store_retries"] <= num_failed
    assert not reference["store_retries"]
    assert "requests to an object store failed and were repeated: " in said
    summary = (tmp_path / "store" / "report" / "summary.txt").read_text()
    assert re.search(rf"repeated requests to object stores +{outcome['store_retries']}\n", summary)
