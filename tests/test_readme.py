"""Test that the README and the pages of docs/ agree with the repository.

Every shell line is parsed, and planned by its own job's `--dry-run` where it has one; one line of every job is run for
real (`RUN_BY`). Every make target, job, option and link must exist."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import subprocess
from functools import cache
from pathlib import Path

import pytest
from readme_support import FOLLOWED, PAGES, PYTHON, README, RUN_BY, TASK_FILES, recipe, shell_lines

from tests.jobs.test_printed_commands import parse

ROOT = Path(__file__).parents[1]
JOB_LINES = [line for line in shell_lines() if line.startswith(PYTHON)]
OTHER_LINES = [line for line in shell_lines() if not line.startswith(PYTHON)]
DRY = ("train_lm", "train_clip", "train_sentences", "train_images", "train_classifier", "sweep", "train_reward",
       "prepare_features")  # fmt: skip
"""Jobs that can be asked for their plan."""
NEEDS_TABLE = "clip-cc3m-sogclr-given-small"
"""Preset whose plan reads what the line before it has written."""


@pytest.fixture(scope="module")
def reader(home_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a reader who has typed the lines that others need: a model, prompts, a reward, SentEval."""
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

    from tempnet import TempNet, TempNetConfig

    home = tmp_path_factory.mktemp("reader")
    for name in ("data", "README.md"):
        (home / name).symlink_to(home_directory / name)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(home / "data" / "sample" / "tokenizer")
    config = AutoConfig.for_model("gpt2", vocab_size=len(tokenizer), n_embd=32, n_layer=1, n_head=2, n_positions=128)
    for name in ("gpt2-ce-small", "gpt2-scratch-small"):
        export = home / "runs" / name / "export"
        AutoModelForCausalLM.from_config(config).save_pretrained(export)
        tokenizer.save_pretrained(export)
    TempNet(TempNetConfig.for_logits(len(tokenizer), rho=1.0)).save_pretrained(export / "tempnet")
    encoder = AutoConfig.for_model(
        "roberta", vocab_size=600, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=132, pad_token_id=0,
    )  # fmt: skip
    AutoModel.from_config(encoder).save_pretrained(home / "runs" / "declutr-small-small" / "export")
    words = AutoTokenizer.from_pretrained(home / "data" / "sample" / "wordpiece")
    words.save_pretrained(home / "runs" / "declutr-small-small" / "export")
    kinds = ["ABBR:x", "DESC:x", "ENTY:x", "HUM:x", "LOC:x", "NUM:x"]
    for number, name in enumerate(["CR/custrev.neg", "CR/custrev.pos", "TREC/train_5500.label", "TREC/TREC_10.label"]):
        file = home / "senteval" / "data" / "downstream" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(f"{kinds[(row + number) % 6]} word {row} of {number}" for row in range(1200)))
    for line in OTHER_LINES:
        if line.startswith("echo "):
            subprocess.run(line, shell=True, check=True, cwd=home)
    return home


@pytest.mark.parametrize("line", JOB_LINES)
def test_every_line_of_a_job_is_accepted(line: str, reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(reader)
    monkeypatch.syspath_prepend(reader)
    for name in ("TEMPNET_HOME", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    parse(line)
    job, *words = shlex.split(line.removeprefix(PYTHON + "jobs."))
    if job in DRY and "--help" not in words and NEEDS_TABLE not in words:
        dry = words if "--dry-run" in words else [*words, "--dry-run"]
        assert importlib.import_module(f"jobs.{job}").main(dry) == 0
    assert not list((reader / "runs").glob("*/configuration.json"))  # nothing was begun


def test_what_is_submitted_is_a_line_of_a_job() -> None:
    (line,) = (line for line in OTHER_LINES if line.startswith("ray job submit"))
    command = line.partition(" -- ")[2]
    assert command.startswith("env TEMPNET_REVISION=$(.venv/bin/python -m jobs.revision) python -m jobs.train_lm ")
    parse(command[command.index("python -m jobs.train_lm") :])


@pytest.mark.parametrize("line", OTHER_LINES)
def test_every_other_line_is_run_by_a_test(line: str) -> None:
    assert any(line.startswith(beginning) for beginning in RUN_BY), line


def test_every_job_is_run_by_a_test() -> None:
    jobs = {path.stem for path in (ROOT / "jobs").glob("*.py") if "run_job(main)" in path.read_text()}
    assert {name for name in RUN_BY if name in jobs} == jobs
    assert {line.removeprefix(PYTHON + "jobs.").split()[0] for line in JOB_LINES} == jobs - {"sample_data", "revision"}
    for place in RUN_BY.values():
        file, _, name = place.partition("::")
        body = ast.parse((ROOT / "tests" / file).read_text()).body
        assert name in {node.name for node in body if isinstance(node, ast.FunctionDef)}, place


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_stands_in_a_block(page: str) -> None:
    text = PAGES[page]
    if page not in FOLLOWED | {"sweeps"}:  # tests/cluster/test_sweep.py runs the Python of this page
        assert set(blocks_of("python", text)) <= set(blocks_of("python", README))
    assert set(re.findall(r"^```(\w*)", text, re.MULTILINE)) <= {"bash", "python", ""}
    assert not re.findall(r"`(?:\S+/)?python [^`]+`", text)  # A command belongs in a block of its own.
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"`make ([^`]+)`", text)) <= set(targets)


def test_the_readmes_first_python_needs_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    (first, *_) = blocks_of("python", README)
    scope: dict[str, object] = {}
    exec(first, scope)
    tau = scope["tau"].tolist()  # type: ignore[attr-defined]
    assert tau == sorted(tau)
    *entropies, wanted = map(float, re.findall(r"\d\.\d+", capsys.readouterr().out.splitlines()[-1]))
    assert entropies == pytest.approx([wanted] * 3, abs=1e-3)


def blocks_of(language: str, text: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_every_python_block_of_a_followed_page_is_a_file_that_its_test_writes() -> None:
    assert len(TASK_FILES) == len(blocks_of("python", PAGES["extend"])) > 0


@cache
def field_names() -> set[str]:
    """Return the names that are annotated in the first level of classes of jobs/ and pipelines/, as all fields are."""
    texts = (path.read_text() for part in ("jobs", "pipelines") for path in (ROOT / part).rglob("*.py"))
    return {name for text in texts for name in re.findall(r"^    (\w+): ", text, re.MULTILINE)}


@pytest.mark.parametrize("page", ["README", *PAGES])
def test_options_are_fields(page: str) -> None:
    """Every option `--section.field` or `--field` that a page has in code font."""
    in_code_font = " ".join(re.findall(r"`([^`\n]+)`", README if page == "README" else PAGES[page]))
    options = set(re.findall(r"(?<!\S)--([a-z][a-z0-9.-]*)", in_code_font))
    for option in options - {"help", "dry-run", "save", "config"}:
        names = [name.removeprefix("no-").replace("-", "_") for name in option.split(".")]
        assert set(names) - {"section", "field", "base"} <= field_names(), f"{page} shows --{option}"


def test_make_test_and_make_test_all_run_every_test() -> None:
    """Together the marks of the parts select everything, and nothing is ignored by its path."""
    for target, selections in {
        "test": ["not cluster and not long", "cluster and not long"],
        "test-all": ["not cluster", "cluster"],
    }.items():
        lines = [line for line in recipe(target) if "-m pytest" in line and "tests/" not in line]
        assert [re.findall(r'-m "([^"]*)"', line) for line in lines] == [[selection] for selection in selections]
        assert not any("--ignore" in line or "--deselect" in line for line in lines)


def test_make_bench_runs_the_commands_of_the_figures() -> None:
    shown = re.findall(r"`(python -m benchmarks\.[^`[…]+)`", (ROOT / "benchmarks" / "README.md").read_text())
    run = [line.removeprefix(".venv/bin/") for line in recipe("bench")]
    assert run == [line for line in shown if "--gpu-check" not in line]


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {line.split()[1] for line in shell_lines() if line.startswith("make ")} <= targets


def test_links_and_pictures_exist() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert target.startswith("https://arxiv.org/abs/") or (ROOT / target).exists(), target
