"""Make an export of a run from any checkpoint that was kept: of its last step, or of an earlier one.

For example:

    python -m jobs.export runs/gpt2-scratch-small
    python -m jobs.export runs/gpt2-scratch-small --step 400 --output exports/step-400
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module

import tyro

from jobs.engine.command_line import ending_in_one_line, parse_options, run_job

_TASKS = {
    "LanguageModelConfig": "jobs.tasks.language_model.config",
    "ClipConfig": "jobs.tasks.dual_encoder.config",
    "SentenceConfig": "jobs.tasks.sentence_encoder.config",
    "ImageEncoderConfig": "jobs.tasks.image_encoder.config",
    "ClassifierConfig": "jobs.tasks.classifier.config",
}
"""Maps the class of a run's configuration to its module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportJob:
    """Which checkpoint to export, and where to."""

    run: tyro.conf.Positional[str]
    """Directory or URI of the run, such as runs/gpt2-scratch-small."""
    step: int | None = None
    """Step of the checkpoint. None: the newest that is whole."""
    output: str = ""
    """Directory or URI of the export, which must not exist yet. If empty: export-STEP in the directory of the run."""
    use_gpu: bool | None = None
    """Whether a worker uses a GPU. None: as in the run."""


def main(arguments: Sequence[str]) -> int:
    """Run the job; returns the exit status."""
    job = parse_options(ExportJob, arguments, job="export", description=__doc__)
    from jobs.engine.export import configuration_from, configure, find_checkpoint, make_late_export, read_task
    from jobs.engine.fields import absolute_path, with_fields
    from jobs.engine.launch import make_plan

    with ending_in_one_line():
        directory = absolute_path(job.run).rstrip("/")
        kind, values = read_task(directory)
        if kind not in _TASKS:
            raise ValueError(f"{directory} is a run of {kind}, which is none of {', '.join(_TASKS)}")
        late = find_checkpoint(directory, job.step, job.output)
        config = configuration_from(getattr(import_module(_TASKS[kind]), kind), values)
        # The directory may have been moved since the run.
        storage, _, name = directory.rpartition("/")
        config = replace(config, run=replace(config.run, storage=storage, name=name))
        if kind == "ClassifierConfig":
            config = with_fields(config, {"fold.keep_model": True})
        if job.use_gpu is not None:
            config = replace(config, workers=replace(config.workers, use_gpu=job.use_gpu))
        make_late_export(make_plan(configure(config, late)), late)
    print(f"step {late.step} of {job.run} is exported to {late.output}")
    return 0


if __name__ == "__main__":
    run_job(main)
