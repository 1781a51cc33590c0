"""Test the wheel: what it holds, that the library works with its own dependencies alone, and the jobs with their extra.

Their environments are new and download nothing: links bring in the distributions that the wheel's metadata
name, and those that they name, from the environment of the tests."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
NOT_FOR_THE_LIBRARY = ["ray", "deepspeed", "mlflow", "pyarrow", "lm_eval", "tyro", "matplotlib", "jobs", "pipelines"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel by the recipe of `make wheel`, from a copy of the sources, and return its path."""
    at = tmp_path_factory.mktemp("wheel")
    for room in ("tempnet", "jobs", "pipelines", "infra"):
        shutil.copytree(ROOT / room, at / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "requirements.lock", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, at)
    command = ["make", "--dry-run", "--no-print-directory", "--old-file=.venv/.ready", f"--file={ROOT}/Makefile"]
    recipe = subprocess.check_output([*command, f"BIN={Path(sys.executable).parent}", "wheel"], cwd=at, text=True)
    assert "pip wheel" in recipe
    subprocess.run(["bash", "-ec", recipe], cwd=at, check=True)
    (built,) = (at / "dist").iterdir()
    return built


def required(requirements: list[str], extra: str = "") -> Iterator[Requirement]:
    """Yield the requirements that apply here, with those that only an extra brings if it is named."""
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield requirement


def closure(requirements: list[str], extra: str) -> list[Distribution]:
    """Return the installed distributions that requirements name, and those that they name in turn."""
    found: dict[str, Distribution] = {}
    waiting = list(required(requirements, extra))
    while waiting:
        requirement = waiting.pop()
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name not in found:
            found[name] = distribution(name)
            assert requirement.specifier.contains(found[name].version), requirement
            extras = requirement.extras or {""}
            waiting += (one for name_ in extras for one in required(found[name].requires or [], name_))
    return list(found.values())


def distribution_of(wheel: Path) -> Distribution:
    (info,) = (place for place in zipfile.Path(wheel).iterdir() if place.name.endswith(".dist-info"))
    return PathDistribution(info)


def test_the_wheel_holds_the_library_and_the_jobs_below_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name and name.endswith(".py")}
        assert "tempnet/_pipeline/jobs/studies/reproduction/experiments.yaml" in archive.namelist()
    at = {"tempnet": "tempnet", "jobs": "tempnet/_pipeline/jobs", "pipelines": "tempnet/_pipeline/pipelines"}
    assert names == {
        f"{place}/{path.relative_to(ROOT / room)}" for room, place in at.items() for path in (ROOT / room).rglob("*.py")
    }
    assert wheel.name.endswith("-py3-none-any.whl")


def test_the_extra_brings_what_the_pipeline_pins(wheel: Path) -> None:
    requires = distribution_of(wheel).requires or []
    light = {requirement.name for requirement in required(requires)}
    assert light == {"huggingface-hub", "safetensors", "scipy", "torch", "transformers"}
    heavy = {requirement.name for requirement in required(requires, "pipeline")}
    assert {"ray", "deepspeed", "mlflow", "pyarrow"} <= heavy - light


SCRIPT = f"""
import importlib, importlib.util, pkgutil, sys, warnings
assert not [name for name in {NOT_FOR_THE_LIBRARY} if importlib.util.find_spec(name)]
import tempnet
assert not [name for name in ("transformers", "scipy") if name in sys.modules], "import tempnet is quick"
for module in pkgutil.walk_packages(tempnet.__path__, "tempnet."):
    if module.name != "tempnet.softmax.triton_kernels":  # needs Triton, which a CUDA build of PyTorch brings
        importlib.import_module(module.name)

import torch
from transformers import GPT2Config, GPT2LMHeadModel
from tempnet import TempNet, TempNetConfig
from tempnet.inference import TemperatureLogitsProcessor, generate
from tempnet.loading import load_causal_lm
base = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0))
base.save_pretrained(sys.argv[1])
TempNet(TempNetConfig.for_logits(50, rho=1.0)).save_pretrained(sys.argv[1] + "/tempnet")
model, network = load_causal_lm(sys.argv[1])
made = generate(model, network, input_ids=torch.tensor([[1, 2, 3]]), max_new_tokens=4, min_new_tokens=4, pad_token_id=0)
assert made.temperatures.shape == (1, 4)

from importlib.metadata import entry_points
(point,) = entry_points(group="vllm.logits_processors")
assert point.load().__name__ == "TempNetLogitsProcessor"
print("works")
"""


def install(wheel: Path, directory: Path, extra: str) -> Path:
    """Make an environment of the wheel and links to what its metadata name, and return the directory of its commands."""
    venv.create(directory, with_pip=False)
    (site,) = directory.glob("lib/python*/site-packages")
    for one in closure(distribution_of(wheel).requires or [], extra):
        for file in one.files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (site / top).exists():
                (site / top).symlink_to(Path(str(one.locate_file(top))))
    pip = [sys.executable, "-m", "pip", "--python", str(directory / "bin/python"), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True)
    return directory / "bin"


def run(*command: str | Path, at: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=at, capture_output=True, text=True)


def test_it_works_with_its_dependencies_alone(wheel: Path, tmp_path: Path) -> None:
    commands = install(wheel, tmp_path / "fresh", extra="")
    done = run(commands / "python", "-I", "-W", "ignore", "-c", SCRIPT, str(tmp_path / "model"), at=tmp_path)
    assert (done.returncode, done.stdout) == (0, "works\n"), done.stderr
    done = run(commands / "tempnet", "train-lm", "gpt2-scratch-small", at=tmp_path)
    assert done.returncode == 2
    assert "pip install 'PATH-OF-WHEEL[pipeline]'" in done.stderr


def test_its_command_runs_the_jobs(wheel: Path, tmp_path: Path) -> None:
    commands = install(wheel, tmp_path / "fresh", extra="pipeline")
    done = run(commands / "tempnet", "--help", at=tmp_path)
    assert done.returncode == 0
    jobs = {path.stem.replace("_", "-") for path in (ROOT / "jobs").glob("[!_]*.py")}
    assert jobs == {line.split()[0] for line in done.stdout.partition("options):\n")[2].splitlines()}
    done = run(commands / "tempnet", "train-ml", at=tmp_path)
    assert done.returncode == 2
    assert "did you mean train-lm" in done.stderr
    done = run(commands / "tempnet", "train-lm", "gpt2-scratch-small", "--dry-run", at=tmp_path)
    assert done.returncode == 2
    assert "data/sample/text" in done.stderr, done.stderr
