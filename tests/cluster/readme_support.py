"""Find the shell lines, the notebooks and the Python files of the README and of docs/, and run a line or a notebook."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).parents[2]

README = (ROOT / "README.md").read_text()
HISTORY = {"results"}
"""Pages about the past, whose commands need not work any more."""
FOLLOWED = {"extend"}
"""Pages whose own commands and Python files tests/cluster/test_extend_task.py runs."""
PAGES = {page.stem: page.read_text() for page in sorted((ROOT / "docs").glob("*.md")) if page.stem not in HISTORY}
PYTHON = ".venv/bin/python -m "

RUN_BY = {
    "sample_data": "cluster/test_readme_text.py::test_what_make_run_runs",
    "train_lm": "cluster/test_train_lm.py::test_the_run_learned_and_left_everything_a_person_needs",
    "export": "cluster/test_train_lm.py::test_an_export_is_made_of_a_checkpoint",
    "runs": "cluster/test_train_lm.py::test_the_run_is_finished_and_listed",
    "calibrate": "cluster/test_readme_text.py::test_measuring_headroom",
    "generate": "cluster/test_readme_text.py::test_generating",
    "train_reward": "cluster/test_scoring.py::test_training_on_rewards_with_a_worker_that_dies",
    "playground": "jobs/scoring/test_playground.py::test_the_command_serves_until_ctrl_c",
    "evaluate_lm": "cluster/test_readme_text.py::test_evaluating",
    "predict_temperatures": "cluster/test_readme_text.py::test_predicting_temperatures_of_texts",
    "analyse": "cluster/test_readme_text.py::test_analysing_groups_of_texts",
    "train_clip": "cluster/test_readme_images.py::test_training_and_scoring",
    "evaluate_clip": "cluster/test_readme_images.py::test_training_and_scoring",
    "train_images": "cluster/test_readme_images.py::test_training_without_captions",
    "prepare_text": "cluster/test_readme_text.py::test_preparing",
    "prepare_images": "cluster/test_readme_text.py::test_preparing",
    "train_sentences": "cluster/test_readme_text.py::test_training_and_scoring_a_sentence_encoder",
    "evaluate_sentences": "cluster/test_readme_text.py::test_training_and_scoring_a_sentence_encoder",
    "train_classifier": "cluster/test_train_classifier.py::test_a_cross_validation",
    "sweep": "cluster/test_sweep.py::test_sweeping_some_values",
    "prepare_features": "cluster/test_frozen.py::test_a_grid_trains_from_stored_features",
    "reproduce": "cluster/test_reproduce.py::test_runs_are_made_once_and_their_figures_are_in_the_table",
    "revision": "jobs/test_exit_status.py::test_the_revision_is_that_of_the_checkout",
    "submit": "cluster/test_submit.py::test_status_log_and_end_of_jobs_on_a_cluster",
    "ray job submit": "cluster/test_train_lm.py::test_a_job_and_a_worker_that_are_killed_cost_the_steps_since_the_checkpoint",
    "echo ": "test_readme.py::reader",
    "make run": "cluster/test_readme_text.py::test_what_make_run_runs",
    "make test": "test_readme.py::test_make_test_and_make_test_all_run_every_test",
    "make wheel": "test_wheel.py::test_the_wheel_holds_the_library_and_the_jobs_below_it",
    "pip install dist/": "test_wheel.py::test_it_works_with_its_dependencies_alone",
    "make mlflow": "cluster/test_readme_text.py::test_mlflow_is_served_on_loopback",
    "infra/mlflow/add_user.sh": "cluster/test_readme_text.py::test_mlflow_is_served_for_a_team",
}
"""Maps a job, or the beginning of another line, to the test that runs one such line for real."""


def shell_lines(*pages: str) -> list[str]:
    """Return every shell line of pages once, without comments; by default of the README and of all pages."""
    chosen = pages or (README, *(text for name, text in PAGES.items() if name not in FOLLOWED))
    blocks = [block for page in chosen for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL)]
    lines = [line.split(" #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in dict.fromkeys(lines) if line]


def lines_like(pattern: str) -> list[str]:
    """Return the shell lines that match a pattern, without `.venv/bin/python -m`, in order; at least one."""
    found = [line for line in shell_lines() if fnmatchcase(line.removeprefix(PYTHON), pattern)]
    assert found, f"no page has a line like {pattern!r}"
    return found


def recipe(target: str) -> list[str]:
    """Return the lines of `make TARGET` that run programs of this environment, except pip and venv.

    The variables that a line sets for its program are removed.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "--dry-run", "--always-make", target]
    shown = subprocess.check_output(command, cwd=ROOT, env=environment, text=True)
    return re.findall(r"^(?:[A-Z_]+=\S+ )*(\.venv/bin/\S+ (?!-m (?:pip|venv) ).*)$", shown, re.MULTILINE)


def run_line(line: str, *options: str) -> None:
    """Run a line `.venv/bin/python -m jobs.JOB …` with more options at its end, and assert that it succeeds.

    The job's `main` runs in this process, which has imported what it needs and is connected to Ray.
    """
    assert line.startswith(PYTHON)
    module, *arguments = shlex.split(line.removeprefix(PYTHON))
    try:
        status = importlib.import_module(module).main([*arguments, *options])
    except SystemExit as exit:
        status = exit.code
    assert status == 0, f"{line}: exit status {status}"


TASK_FILES = dict(re.findall(r"```python\n# (\S+\.py)\n(.*?)```", PAGES["extend"], re.DOTALL))
"""Path of every Python file of docs/extend.md, which is its first line as a comment → the text below that line."""


def write_task(directory: Path) -> Path:
    """Write the Python files of docs/extend.md into a directory, and return it."""
    for name, text in TASK_FILES.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n{text}")
    return directory


def run_notebook(name: str, home: Path, options: Mapping[str, Sequence[str]]) -> str:
    """Execute a notebook of docs/ in the directory of the README's reader, and return what it printed and displayed as text.

    `options` maps the pattern of a line `jobs.JOB …` to what is added at its end; every command must match one.
    """
    import nbformat
    from nbclient import NotebookClient

    if not (home / ".venv").exists():
        (home / ".venv").symlink_to(sys.prefix)
    notebook = nbformat.read(ROOT / "docs" / name, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code" and PYTHON in cell.source:
            (line,) = (line for line in cell.source.splitlines() if line.startswith(PYTHON))
            (added,) = (more for pattern, more in options.items() if fnmatchcase(line.removeprefix(PYTHON), pattern))
            cell.source = cell.source.replace(line, " ".join([line, *added]))
    NotebookClient(notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(home)}}).execute()
    outputs = [
        output for cell in notebook.cells for output in cell.get("outputs", ()) if output.get("name") != "stderr"
    ]
    return "".join(output.get("text") or f"{output.get('data', {}).get('text/plain', '')}\n" for output in outputs)
