"""Provide what the cluster tests share beside fixtures: tiny data, tiny configurations, and ways to run commands."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import zstandard

from jobs.engine.command_line import parse_preset
from jobs.engine.config import RunSection
from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.presets.language_models import PRESETS

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent

LANGUAGE_MODEL_OPTIONS = [
    "--run.num-steps=40", "--run.checkpoint-every=5", "--run.log-every=10", "--run.max-restarts=1",
    "--data.context-length=64", "--model.hidden-size=64", "--model.num-layers=2", "--model.num-heads=4",
    "--temperature.target-entropy=3", "--temperature.hidden-size=32", "--temperature.num-prototypes=16",
    "--optimizer.batch-size=8", "--optimizer.learning-rate-base=3e-3", "--optimizer.learning-rate-tempnet=1e-2",
    "--workers.precision=fp32", "--workers.num-threads=1",
    "--validation.every=20", "--validation.num-blocks=32", "--validation.num-oracle-tokens=512",
]  # fmt: skip
"""Options that make `gpt2-scratch-small` 40 steps of a 2-layer GPT-2; the preset has two workers and ZeRO 2."""


def readme_lines(pattern: str, paths: dict[str, str]) -> list[str]:
    """Return the shell lines of the README that match a regular expression at their start.

    `paths` maps paths that the README shows to the paths of a test, which replace them before the match.
    """
    readme = (ROOT / "README.md").read_text()
    for shown, real in paths.items():
        assert shown in readme
        readme = readme.replace(shown, real)
    blocks = re.findall(r"```bash\n(.*?)```", readme, re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if re.match(pattern, line)]


def run_until(
    condition: Callable[[], bool],
    module: str,
    arguments: list[str],
    environment: dict[str, str],
    by: signal.Signals = signal.SIGKILL,
    directory: Path = ROOT,
) -> tuple[int, str]:
    """Run a module in a directory, and send it a signal as soon as a condition holds.

    Its exit status and its standard error are returned. The module runs in its own process, because a Ray whose data sets
    are left in mid-stream may take its driver down.
    """
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=directory,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=said,
        )
        try:
            wait_for(lambda: condition() or process.poll() is not None)
            process.send_signal(by)
            process.wait(timeout=120)
        finally:
            process.kill()
            process.wait()
        time.sleep(3)  # Ray needs some time to end the tasks of a dead driver.
        said.seek(0)
        return process.returncode, said.read()


def training_worker_pids(cluster: dict[str, str]) -> list[int]:
    """Return the process IDs of Ray Train's workers under this test's own head, oldest first; others may run beside it.

    psutil's own order is that of the process IDs, which begin again at small numbers once the largest has been given.
    """
    found: list[tuple[float, int]] = []
    for process in psutil.Process(int(cluster["HEAD_PID"])).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # A process may end while this loop looks at it.
            if "".join(process.cmdline()[:1]).startswith("ray::RayTrainWorker"):
                found.append((process.create_time(), process.pid))
    return [pid for _, pid in sorted(found)]


def wait_for(condition: Callable[[], bool], seconds: float = 400) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.02)


def write_jsonl_zst(path: Path, texts: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"text": text, "meta": {}}) + "\n" for text in texts)
    path.write_bytes(zstandard.ZstdCompressor().compress(lines.encode()))


def tiny_run(data: Path, storage: Path, name: str, **fields: int) -> RunSection:
    """Return the settings of a run whose prepared data are shared by all runs on the same data."""
    return RunSection(name=name, storage=str(storage), prepared=str(data / "prepared"), **fields)


def tiny_config(corpus: Path, storage: Path, name: str, **sections: dict[str, Any]) -> LanguageModelConfig:
    """Return `gpt2-scratch-small` with `LANGUAGE_MODEL_OPTIONS` under another name.

    `sections` maps the name of a section to the fields to override in it.
    """
    places = [f"--data.train={corpus / 'train'}", f"--data.validation={corpus / 'validation'}"]
    words = ["gpt2-scratch-small", *LANGUAGE_MODEL_OPTIONS, *places, f"--data.tokenizer={corpus / 'tokenizer'}"]
    config, _ = parse_preset(PRESETS, words, job="train_lm", purpose="")
    run = replace(config.run, name=name, storage=str(storage), prepared=str(corpus / "prepared"))
    config = replace(config, run=run)
    return replace(
        config, **{section: replace(getattr(config, section), **values) for section, values in sections.items()}
    )


def outcome_of(home: Path, name: str) -> dict[str, Any]:
    """Return the outcome of a finished run in the directory of the README's reader."""
    return json.loads((home / "runs" / name / "outcome.json").read_text())
