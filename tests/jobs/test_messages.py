"""Tests the messages for users who have not made the sample data, name a missing model, or have no network."""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.engine.hints import with_hint
from jobs.tasks.presets import clip, language_models, sentences
from pipelines.sources import check_source

ROOT = Path(__file__).parents[2]
SAMPLE = "The sample data are made by: python -m jobs.sample_data"
EXPORT = "This model is made by: python -m jobs.train_lm gpt2-scratch-small"
MODEL = "runs/gpt2-scratch-small/export"


def test_a_missing_path_is_called_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    for source in (MODEL, "/nowhere", "./model", "../model", "~/no/model", "here/model"):
        with pytest.raises(ValueError, match=r"is missing: there is no such file or directory$") as refused:
            check_source(source)
        assert repr(source) in str(refused.value)
    check_source("here")


def test_a_hub_without_a_network_is_given_up_at_once() -> None:
    """It runs in its own process, as the hub's library reads the address and the offline mode on import."""
    with socket.socket() as taken:  # Nobody listens on this port.
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0"}
        script = "from pipelines.sources import check_source\ncheck_source('no-such-owner/no-such-model')"
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
        )
    last = done.stderr.splitlines()[-1]
    assert last == (
        f"ValueError: 'no-such-owner/no-such-model' is no local directory, and the hub at {address} cannot be reached from "
        "here: give the path of a directory"
    )


def test_the_command_that_makes_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        with_hint("uri 'data/sample/text/train': no such file.")
        == f"uri 'data/sample/text/train': no such file. {SAMPLE}"
    )
    assert with_hint(f"models: {MODEL!r} is missing") == f"models: {MODEL!r} is missing. {EXPORT}"
    assert with_hint("/a/runs/declutr-small-small/export is none").endswith("jobs.train_sentences declutr-small-small")
    assert with_hint("/a/clip-cc3m-tempnet-small/export is none").endswith("jobs.train_clip clip-cc3m-tempnet-small")
    for message in ("runs/mine/export is missing", "run.num_steps = 0 must be positive"):
        assert with_hint(message) == message
    for job, presets in (("train_lm", language_models), ("train_clip", clip), ("train_sentences", sentences)):
        for name in presets.PRESETS:
            is_twin = name.endswith("-small") and name.removesuffix("-small") in presets.PRESETS
            command = f" This model is made by: python -m jobs.{job} {name}" if is_twin else ""
            assert with_hint(f"runs/{name}/export is missing.") == f"runs/{name}/export is missing.{command}"
    Path(MODEL).mkdir(parents=True)
    assert with_hint(f"{MODEL!r} holds no tokenizer") == f"{MODEL!r} holds no tokenizer"


@pytest.mark.parametrize(
    ("job", "arguments", "expected"),
    [
        ("train_lm", ["gpt2-scratch-small", "--dry-run"], SAMPLE),
        ("sweep", ["clip-rho-lr-small", "--dry-run"], SAMPLE),
        ("prepare_images", ["--source", "data/sample/images/train"], SAMPLE),
        ("evaluate_lm", ["--models", MODEL, "--wikitext", "text.txt"], EXPORT),
        ("generate", ["--model", MODEL, "--prompts", "text.txt", "--output", "o.jsonl"], EXPORT),
        ("calibrate", ["tau-max", "--model", MODEL, "--prompts", "text.txt"], EXPORT),
        ("predict_temperatures", ["--model", MODEL, "--text", "text.txt"], EXPORT),
        ("evaluate_clip", ["--models", MODEL, "--retrieval", "a=b"], EXPORT),
        ("generate", ["--model", MODEL, "--prompts", "q.txt", "--output", "o.jsonl"],
         "prompts = 'q.txt' is missing: there is no such file"),
    ],
)  # fmt: skip
def test_jobs_say_so_in_one_line(
    job: str, arguments: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TEMPNET_HOME", raising=False)
    Path("text.txt").write_text("= A =\n\nsome words\n")
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"jobs.{job}").main(arguments)
    said = capsys.readouterr().err
    assert (ended.value.code, said.count("\n")) == (2, 1), said
    assert said.startswith("error: ")
    assert said.rstrip().endswith(expected)
    assert "Repo id" not in said
