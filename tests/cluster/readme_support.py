"""Find the shell lines of the README and the test that runs each of them, and run a line."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
from fnmatch import fnmatchcase

from support import ROOT

README = (ROOT / "README.md").read_text()
PYTHON = ".venv/bin/python -m "

RUN_BY = {
    "make run": "test_readme_text.py::test_what_make_run_runs",
    # `make test` runs all tests, so none of them can run it. This one checks that it includes every cluster test.
    "make test": "../test_readme.py::test_every_cluster_test_is_in_one_part_of_make_test",
    "make wheel": "../test_wheel.py::test_the_wheel_holds_the_library_alone",
    "pip install dist/*": "../test_wheel.py::test_it_works_with_its_dependencies_alone",
    "make mlflow": "test_readme_text.py::test_mlflow_is_served_on_loopback",
    "make mlflow-team": "test_readme_text.py::test_mlflow_is_served_for_a_team",
    "infra/mlflow/add_user.sh *": "test_readme_text.py::test_mlflow_is_served_for_a_team",
    "jobs.train_lm --help": "test_readme_text.py::test_looking_before_training",
    "jobs.train_lm gpt2-scratch-small --dry-run": "test_readme_text.py::test_looking_before_training",
    "jobs.train_lm * --workers.zero-stage 3": (
        "test_train_lm_failures.py::test_a_killed_worker_costs_only_the_steps_since_the_checkpoint"
    ),
    "jobs.train_lm * --data.prepare streaming *": "test_growing_text.py::test_training_is_the_same",
    "jobs.export *": "test_train_lm.py::test_an_export_is_made_of_a_checkpoint",
    "jobs.prepare_features *": "test_frozen_grid.py::test_a_grid_trains_from_stored_features",
    "jobs.train_lm frozen-small *": "test_train_lm.py::test_a_tempnet_is_trained_on_a_frozen_base_in_bf16",
    "jobs.runs *": "test_train_lm.py::test_the_run_is_listed",
    "jobs.submit ray *": "test_submit.py::test_status_log_and_end_of_jobs_on_a_cluster",
    "jobs.submit render *": "../jobs/submission/test_readme_lines.py::test_rendering",
    "jobs.submit rayjob *": "../jobs/submission/test_readme_lines.py::test_writing_a_ray_job",
    "ray job submit *": "test_train_lm_failures.py::test_a_killed_job_goes_on_through_ray_job_submit",
    "jobs.calibrate headroom *": "test_readme_text.py::test_measuring_headroom",
    "jobs.calibrate rho *": "test_readme_text.py::test_calibrating_rho",
    "echo * > prompts.txt": "test_readme_text.py::test_generating",
    "jobs.generate *": "test_readme_text.py::test_generating",
    "jobs.calibrate tau-max *": "test_readme_text.py::test_generating",
    "echo * > rewards.py": "test_readme_text.py::test_learning_from_a_verifier",
    "jobs.train_reward *": "test_readme_text.py::test_learning_from_a_verifier",
    "jobs.playground *": "../jobs/scoring/test_playground.py::test_the_command_serves_until_ctrl_c",
    "jobs.evaluate_lm *": "test_readme_text.py::test_evaluating",
    "jobs.analyse subjectivity *": "test_readme_text.py::test_analysing_groups_of_texts",
    "jobs.prepare_text *": "test_readme_text.py::test_preparing_text",
    "jobs.predict_temperatures * --text *": "test_readme_text.py::test_predicting_temperatures_of_texts",
    "jobs.reproduce *": "test_readme_text.py::test_reproducing",
    "jobs.train_clip --help": "test_readme_images.py::test_looking_before_training",
    "jobs.train_clip clip-cc3m-tempnet-small": "test_readme_images.py::test_training_and_scoring",
    "jobs.evaluate_clip *": "test_readme_images.py::test_training_and_scoring",
    "jobs.predict_temperatures * --images *": "test_readme_images.py::test_training_with_predicted_temperatures",
    "jobs.train_clip clip-cc3m-sogclr-given-small": "test_readme_images.py::test_training_with_predicted_temperatures",
    "jobs.train_clip clip-cc3m-isogclr-small *": "test_readme_images.py::test_training_another_loss",
    "jobs.prepare_images *": "test_readme_images.py::test_preparing_images",
    "jobs.train_sentences *": "test_readme_sentences.py::test_training_and_scoring",
    "jobs.evaluate_sentences *": "test_readme_sentences.py::test_training_and_scoring",
    "jobs.train_classifier *": "test_train_classifier.py::test_a_killed_cross_validation_goes_on_with_two_workers",
    "jobs.sweep * --sweep.search band": "test_sweep.py::test_a_band_search_is_watched_reported_and_found_again",
    "jobs.sweep frozen-rho-lr-small *": "test_frozen_grid.py::test_a_grid_trains_from_stored_features",
    "jobs.sweep * --sweep.axes *": "test_readme_sentences.py::test_sweeping_some_values",
    "jobs.sweep * --dry-run": "test_readme_sentences.py::test_looking_before_sweeping",
}
"""Maps the pattern of a line (without `.venv/bin/python -m` and comments) to the test in this folder that runs it."""


def shell_lines(page: str = README) -> list[str]:
    """Return every shell line of a page, by default of the README, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    lines = [line.split(" #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def patterns_of(line: str) -> list[str]:
    """Return the patterns of `RUN_BY` that match a line, which is one pattern if a test runs the line."""
    return [pattern for pattern in RUN_BY if fnmatchcase(line.removeprefix(PYTHON), pattern)]


def lines_like(pattern: str) -> list[str]:
    """Return the shell lines of the README that match a pattern of `RUN_BY`, in order; fail if there is none."""
    found = [line for line in shell_lines() if patterns_of(line) == [pattern]]
    assert found, f"the README has no line like {pattern!r}"
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
