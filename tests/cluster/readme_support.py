"""Find the shell lines of the README and of the pages in docs/, and run a line."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
from fnmatch import fnmatchcase

from support import ROOT

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
    "runs": "cluster/test_train_lm.py::test_the_run_is_listed",
    "calibrate": "cluster/test_readme_text.py::test_measuring_headroom",
    "generate": "cluster/test_readme_text.py::test_generating",
    "train_reward": "cluster/test_readme_text.py::test_learning_from_a_verifier",
    "playground": "jobs/scoring/test_playground.py::test_the_command_serves_until_ctrl_c",
    "evaluate_lm": "cluster/test_readme_text.py::test_evaluating",
    "predict_temperatures": "cluster/test_readme_text.py::test_predicting_temperatures_of_texts",
    "analyse": "cluster/test_readme_text.py::test_analysing_groups_of_texts",
    "train_clip": "cluster/test_readme_images.py::test_training_and_scoring",
    "evaluate_clip": "cluster/test_readme_images.py::test_training_and_scoring",
    "prepare_text": "cluster/test_readme_text.py::test_preparing",
    "prepare_images": "cluster/test_readme_text.py::test_preparing",
    "train_sentences": "cluster/test_readme_sentences.py::test_training_and_scoring",
    "evaluate_sentences": "cluster/test_readme_sentences.py::test_training_and_scoring",
    "train_classifier": "cluster/test_train_classifier.py::test_a_cross_validation",
    "sweep": "cluster/test_readme_sentences.py::test_sweeping_some_values",
    "prepare_features": "cluster/test_frozen_grid.py::test_a_grid_trains_from_stored_features",
    "reproduce": "cluster/test_reproduce.py::test_a_run_is_made_once_and_its_figures_are_in_the_table",
    "revision": "jobs/test_exit_status.py::test_the_revision_is_that_of_the_checkout",
    "submit": "cluster/test_submit.py::test_status_log_and_end_of_jobs_on_a_cluster",
    "ray job submit": "cluster/test_train_lm_failures.py::test_a_killed_job_goes_on_through_ray_job_submit",
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
    shown = subprocess.run(
        ["make", "--dry-run", "--always-make", target], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )  # fmt: skip
    return re.findall(r"^(?:[A-Z_]+=\S+ )*(\.venv/bin/\S+ (?!-m (?:pip|venv) ).*)$", shown.stdout, re.MULTILINE)


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
