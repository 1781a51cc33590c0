"""Test what holds for every job: its exit status and message, its help, what it loads, and where Ray has unpacked it."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.engine import revision
from jobs.engine.command_line import job_of, run_job, with_hint
from jobs.engine.revision import checkout_revision, revision_tags
from jobs.studies.sweeps import presets as sweeps
from jobs.tasks.presets import classifiers, clip, images, language_models, sentences
from pipelines.local_copy import check_source

ROOT = Path(__file__).parents[2]
JOBS = sorted(path.stem for path in (ROOT / "jobs").glob("*.py") if "run_job(main)" in path.read_text())
MODEL = "runs/gpt2-scratch-small/export"
EXPORT = "This model is made by: python -m jobs.train_lm gpt2-scratch-small"
SAMPLE = "The sample data are made by: python -m jobs.sample_data"

REFUSED = {
    "train_lm gpt2-scratch-small --data.train nowhere": "nowhere",
    "train_lm gpt2-scratch-small --dry-run": SAMPLE,
    "train_clip clip-cc3m-clip-small --data.train nowhere": "nowhere",
    "train_sentences declutr-small-small --data.train nowhere": "nowhere",
    "train_images simclr-cifar10-small --data.train nowhere": "nowhere",
    "train_classifier triple-entropy-small --data.directory nowhere": "nowhere",
    "sweep gpt2-rho-lr-small --base.data.train nowhere": "nowhere",
    "reproduce T16 --change data.train=nowhere": "nowhere",
    "evaluate_lm --models nowhere --wikitext nowhere": "nowhere",
    f"evaluate_lm --models {MODEL} --wikitext text.txt": EXPORT,
    "evaluate_clip --models nowhere --retrieval test=nowhere": "nowhere",
    "evaluate_sentences --models nowhere --data nowhere": "nowhere",
    "predict_temperatures --model nowhere --text nowhere": "nowhere",
    "predict_temperatures --images nowhere --model nowhere --output tables": "nowhere",
    "generate --model nowhere --prompts nowhere --output texts.jsonl": "nowhere",
    f"generate --model {MODEL} --prompts q.txt --output texts.jsonl": "prompts = 'q.txt' is missing: there is no such file",
    "train_reward --model nowhere --prompts nowhere --verifier.name exact": "nowhere",
    "playground --model nowhere": "nowhere",
    "analyse subjectivity --model nowhere --data nowhere --output analysis": "nowhere",
    "analyse instructions --model nowhere --data nowhere --output analysis": "nowhere",
    "analyse openness --runs nowhere --output analysis": "nowhere",
    "analyse decoders --model nowhere --text nowhere --output analysis": "nowhere",
    "calibrate headroom --model nowhere --text nowhere": "nowhere",
    "calibrate headroom --model nowhere --images nowhere": "nowhere",
    "calibrate rho --model nowhere --text nowhere": "nowhere",
    "calibrate tau-max --model nowhere --prompts nowhere": "nowhere",
    "calibrate tau-max --model . --prompts text.txt --mean-tau .5": "nowhere to save tau_max_eval",
    "export runs/nowhere": "nowhere",
    "prepare_features frozen-small --model.path nowhere --data.train nowhere": "nowhere",
    "prepare_text --source nowhere --tokenizer nowhere --context-length 64": "nowhere",
    "prepare_images --source nowhere": "nowhere",
    "sample_data --vocab-size 1": "vocab_size = 1 is too small",
    "revision nowhere": "nowhere",
    "runs nowhere": "nowhere",
    "submit ray --address http://head:8265 --working-dir nowhere -- train_lm gpt2-scratch": "nowhere",
}
"""Maps commands that name something missing or impossible to what their messages say."""


def test_every_job_is_tried() -> None:
    assert {command.split()[0] for command in REFUSED} == set(JOBS)


@pytest.mark.parametrize("command", REFUSED)
def test_what_is_refused_ends_with_2_and_a_message(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Callable[..., str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("TEMPNET_HOME", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    Path("text.txt").write_text("= A =\n\nsome words\n")
    assert REFUSED[command] in refusal(*shlex.split(command))
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]  # The refused job leaves no file behind.


@pytest.mark.parametrize("job", JOBS)
def test_every_job_shows_its_help_also_where_ray_unpacks_it(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    enter_uploaded(tmp_path, monkeypatch)
    presets = {
        "train_lm": "gpt2-scratch-small", "train_clip": "clip-cc3m-tempnet-small", "train_sentences": "declutr-small-small",
        "train_images": "simclr-cifar10-small",
        "train_classifier": "triple-entropy-small", "sweep": "gpt2-rho-lr-small", "prepare_features": "frozen-small",
        "reproduce": "T4",
    }  # fmt: skip
    try:
        status = importlib.import_module(f"jobs.{job}").main([*filter(None, [presets.get(job)]), "--help"])
    except SystemExit as ended:
        status = ended.code
    printed, said = capsys.readouterr()
    assert (status, said) == (0, "")
    assert "usage: " in printed


def enter_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enter a directory like the one where Ray unpacks a submitted job, and deletes it afterwards."""
    uploaded = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_0"
    uploaded.mkdir(parents=True)
    monkeypatch.chdir(uploaded)
    monkeypatch.delenv("TEMPNET_HOME", raising=False)


@pytest.mark.parametrize(
    ("command", "field"),
    [
        ("train_lm gpt2-scratch-small --data.train {0} --data.validation {0}", "--run.storage"),
        ("train_classifier triple-entropy-small --data.directory {0} --data.tokenizer {0}", "--run.storage"),
        ("sweep gpt2-rho-lr-small --base.data.train {0} --base.data.validation {0}", "--base.run.storage"),
    ],
)
def test_a_submitted_job_keeps_nothing_in_the_directory_that_ray_deletes(
    command: str, field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Callable[..., str]
) -> None:
    enter_uploaded(tmp_path, monkeypatch)
    missing = str(tmp_path / "missing")
    words = [*shlex.split(command.format(missing)), "--dry-run"]
    said = "error: run.storage = {!r} is relative to the uploaded working directory"
    assert refusal(*words).startswith(said.format("runs"))
    assert refusal(*words, field, "here/runs").startswith(said.format("here/runs"))
    # These storages are accepted, so the job refuses the missing data instead.
    assert missing in refusal(*words, field, str(tmp_path))
    monkeypatch.setenv("TEMPNET_HOME", str(tmp_path))
    assert missing in refusal(*words)


def test_the_status_is_that_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["job", "three", "words", "here"])
    with pytest.raises(SystemExit) as ended:
        run_job(len)
    assert ended.value.code == 3


def start_job(body: str, **environment: str) -> subprocess.Popen[str]:
    code = "import sys, time; from jobs.engine.command_line import run_job; sys.argv[1:] = []\n"
    code += f"def main(arguments):\n    {body}\n    return 0\nrun_job(main)"
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_ctrl_c_ends_with_130() -> None:
    job = start_job("print('started', flush=True); time.sleep(60)")
    assert job.stdout is not None
    assert job.stdout.readline() == "started\n"
    time.sleep(0.1)
    job.send_signal(signal.SIGINT)
    _, said = job.communicate(timeout=60)
    assert (job.returncode, said) == (130, "\ninterrupted\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_nobody_reads_ends_with_141_and_no_traceback(unbuffered: str) -> None:
    job = start_job("print('line\\n' * 100_000)", PYTHONUNBUFFERED=unbuffered)
    assert job.stdout is not None
    assert job.stderr is not None
    assert job.stdout.readline() == "line\n"
    job.stdout.close()
    assert job.wait(timeout=60) == 141
    assert job.stderr.read() == ""


def test_commands_and_workers_start_without_what_they_need_later_or_not_at_all() -> None:
    """Commands without presets are loaded whole."""
    commands = sorted({*JOBS} - {"prepare_images", "prepare_text", "sample_data"})
    files = sorted((ROOT / "jobs/tasks").glob("*/task.py"))
    parts = [f"jobs.tasks.{path.parent.name}.task" for path in files]
    assert len(parts) == 5
    code = f"""
import importlib, sys
def load(heavy, *names):
    for name in names:
        importlib.import_module(name)
        print(name, *sorted(heavy & set(sys.modules)))
load({{"deepspeed", "mlflow", "ray", "transformers"}}, *(f"jobs.{{name}}" for name in {commands}))
for name in [name for name in sys.modules if name.partition(".")[0] in ("mlflow", "jobs")]:
    del sys.modules[name]
from jobs.engine.worker import import_deepspeed
import_deepspeed()
load({{"matplotlib", "mlflow", "jobs.engine.launch"}}, "jobs.engine.loop", *{parts})
"""
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = [line for line in shown.splitlines() if line.startswith("jobs.")]
    assert len(lines) == len(commands) + 1 + len(parts)
    assert [line for line in lines if " " in line] == []


def test_a_missing_path_that_looks_like_a_name_on_the_hub_is_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    for source in ("./model", "here/model"):
        with pytest.raises(ValueError, match=f"^'{source}' is missing: there is no such file or directory$"):
            check_source(source)


def test_a_hub_without_a_network_is_given_up_at_once_and_what_is_in_its_cache_is_used(tmp_path: Path) -> None:
    """It runs in its own process, as the hub's library reads the address and the offline mode on import."""
    cached = tmp_path / "models--owner--cached"
    (cached / "snapshots" / "1").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("1")
    (cached / "snapshots" / "1" / "config.json").write_text("{}")
    script = """
from pipelines.local_copy import check_source
try: check_source("owner/missing")
except ValueError as error: print(error)
check_source("owner/cached")
from huggingface_hub import is_offline_mode  # so that no file of it is asked for again
assert is_offline_mode()
"""
    with socket.socket() as taken:  # Nobody listens on this port.
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_HUB_CACHE": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
        )
    assert (done.returncode, done.stderr) == (0, "")
    missing, found = done.stdout.splitlines()
    assert missing.startswith("'owner/missing' is no local directory")
    assert f"the hub at {address} cannot be reached from here: give the path of a directory" in missing
    assert found == f"the hub at {address} does not answer: owner/cached is read from its cache here"


def test_the_command_that_makes_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert with_hint("'data/sample/text/train': no such file.") == f"'data/sample/text/train': no such file. {SAMPLE}"
    assert with_hint("/a/clip-cc3m-tempnet-small/export is none").endswith("jobs.train_clip clip-cc3m-tempnet-small")
    for message in ("runs/mine/export is missing", "run.num_steps = 0 must be positive"):
        assert with_hint(message) == message
    modules = {"train_lm": language_models, "train_clip": clip, "train_sentences": sentences, "sweep": sweeps}
    for job, module in {**modules, "train_images": images, "train_classifier": classifiers}.items():
        assert {job_of(name) for name in module.PRESETS} == {job}
    for refused in ("model.path = 'model' is no local directory, and", "tokenizer = 'model' cannot be loaded"):
        assert with_hint(refused).endswith("of your own: give --model.path")
    assert "your own data: give --data.train" in with_hint("data.train: uri 'data/train': no such file or directory")
    Path("runs/mine/export").mkdir(parents=True)
    Path("runs/mine/export/config.json").write_text("{}")
    no_model = "model = runs/mine is no Transformers model directory"
    assert with_hint(no_model) == f"{no_model}. It is a run; its model is runs/mine/export"
    Path("runs/mine/export/config.json").write_text(json.dumps({"embedding_size": 8, "image_size": 32}))
    assert "give it --images in the place of --text" in with_hint("runs/mine/export is no Transformers model directory")
    Path(MODEL).mkdir(parents=True)
    assert with_hint(f"{MODEL!r} holds no tokenizer") == f"{MODEL!r} holds no tokenizer"


def test_the_revision_is_that_of_the_checkout(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    name = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "a"], [*name, "commit", "-qm", "first"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    clean = checkout_revision(tmp_path)
    assert len(clean) == 40
    (tmp_path / "new").write_text("1")
    assert checkout_revision(tmp_path) == f"{clean}-dirty"
    (tmp_path / "new").unlink()
    (tmp_path / "a").write_text("2")
    assert checkout_revision(tmp_path) == f"{clean}-dirty"
    (tmp_path / "site-packages").mkdir()  # It lies inside another project's checkout.
    assert checkout_revision(tmp_path / "site-packages") == ""


@pytest.mark.parametrize("told", ["0123", "0123-dirty", ""])
def test_without_a_checkout_the_revision_is_what_was_told_and_else_not_recorded(
    told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEMPNET_REVISION", told)
    monkeypatch.setattr(revision, "checkout_revision", lambda: "")
    tags = revision_tags()
    if told:
        assert tags == {"git.revision": "0123", "git.dirty": str("dirty" in told).lower()}
    else:
        assert tags.keys() == {"git.revision"}
        assert tags["git.revision"].startswith("not recorded: ")
