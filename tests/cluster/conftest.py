"""One Ray for all cluster tests: a head with token authentication, as an engineer would start it, and tiny real data."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from support import BIN, free_port, tiny_config, wait_for_ports, write_jsonl_zst

from jobs.language_models.config import LanguageModelConfig
from pipelines.tokenization import train_bpe


@pytest.fixture(scope="session")
def ray_head() -> Iterator[dict[str, str]]:
    """`ray start --head` with `RAY_AUTH_MODE=token`; its environment, with RAY_ADDRESS and the dashboard's address."""
    port, dashboard_port, agent_port = free_port(), free_port(), free_port()
    # pyenv and the like put their own interpreters first; the head's workers must be this environment's.
    # Nor is there a cloud to take this node away: a process less for every run.
    os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"
    # Told to end, the head would wait half a minute for others to take its work over. The rest is as `jobs.cluster` has it.
    environment = os.environ | {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "RAY_num_workers_soft_limit": "4",
        "RAY_DATA_USAGE_DISABLED": "1",
        "REPORTER_UPDATE_INTERVAL_MS": "60000",
    }
    command = [
        str(BIN / "ray"), "start", "--head", "--block", "--num-cpus=4", f"--port={port}", "--include-dashboard=true",
        "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard_port}", "--disable-usage-stats",
        # It reads all logs ten times a second, for drivers that want to see them; ours do not.
        "--include-log-monitor=false",
        # Else the second Ray on a machine finds the usual port taken, and no job can be submitted to it.
        f"--dashboard-agent-listen-port={agent_port}",
    ]  # fmt: skip
    if not (Path.home() / ".ray" / "auth_token").exists():
        subprocess.run(
            [str(BIN / "ray"), "get-auth-token", "--generate"],
            env=environment,
            check=True,
            timeout=60,
            capture_output=True,
        )
    # A process of our own, ended by its own signal: `ray stop` would end every Ray of this machine.
    head = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    environment |= {"RAY_ADDRESS": f"127.0.0.1:{port}"}
    try:
        wait_for_ports(head, port, dashboard_port, timeout=120)
        yield environment | {"DASHBOARD": f"http://127.0.0.1:{dashboard_port}", "HEAD_PID": str(head.pid)}
    finally:
        ray.shutdown()
        head.terminate()
        head.wait(timeout=60)
        # Where Ray notes the cluster that was started last; `ray stop` would remove it.
        note = Path(tempfile.gettempdir()) / "ray" / "ray_current_cluster"
        if note.is_file() and note.read_text().strip().endswith(f":{port}"):
            note.unlink()


@pytest.fixture
def cluster(ray_head: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The head, with this process connected to it."""
    for name in ("RAY_ADDRESS", "PATH"):
        monkeypatch.setenv(name, ray_head[name])
    from jobs.cluster import start_ray

    start_ray()
    return ray_head


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few hundred documents of a small language with structure to learn: `train/`, `validation/`, `tokenizer/`."""
    directory = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefgh"), size=rng.integers(2, 7))) for _ in range(300)]
    follows = rng.integers(0, 300, size=(300, 4))

    def document() -> str:
        word, sentence = int(rng.integers(300)), []
        for _ in range(int(rng.integers(20, 120))):
            sentence.append(words[word])
            word = int(follows[word, rng.choice(4, p=[0.6, 0.25, 0.1, 0.05])])
        return " ".join(sentence)

    texts = [document() for _ in range(400)]
    for shard in range(3):
        write_jsonl_zst(directory / "train" / f"part-{shard}.jsonl.zst", texts[shard:360:3])
    write_jsonl_zst(directory / "validation" / "part-0.jsonl.zst", texts[360:])
    train_bpe(texts[:360], 512).save_pretrained(directory / "tokenizer")
    return directory


@pytest.fixture
def tiny(corpus: Path, tmp_path: Path) -> Callable[..., LanguageModelConfig]:
    """`tiny(name, section={field: value})`: see :func:`support.tiny_config`."""

    def make(name: str, **sections: dict[str, Any]) -> LanguageModelConfig:
        return tiny_config(corpus, tmp_path / "runs", name, **sections)

    return make
