"""Run a frozen model over its data once and store what it computes, from which TempNets then train without the model.

    python -m jobs.prepare_features frozen-small --model.path runs/gpt2-scratch-small/export
    python -m jobs.prepare_features clip-cc12m-tempnet-frozen-small --model.path runs/clip-cc3m-clip-small/export
    python -m jobs.prepare_features --help

Of a language model these are its last hidden states, of a dual encoder the embeddings of images and captions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jobs.engine.command_line import ending_in_one_line, parse_preset, run_job
from jobs.tasks.dual_encoder.config import ClipConfig
from jobs.tasks.presets import clip, language_models

PRESETS: Mapping[str, Callable[[], Any]] = language_models.PRESETS | clip.PRESETS


def main(arguments: Sequence[str]) -> int:
    """Run the job; returns the exit status: 1 if a file could not be made."""
    config, dry_run = parse_preset(PRESETS, arguments, job="prepare_features", purpose=(__doc__ or "").splitlines()[0])
    # Imported only now, so that an error in the arguments is reported without waiting for Ray and Transformers to load.
    from jobs.engine.cluster import check_machine
    from jobs.engine.launch import check_room, check_writable, make_plan
    from jobs.scoring.features import prepare_embeddings, prepare_hidden_states

    prepare: Callable[[Any], Sequence[Any]] = prepare_hidden_states
    training = "--model.features to the same options of jobs.train_lm"
    if isinstance(config, ClipConfig):
        prepare = prepare_embeddings
        training = "--model.features --data.view central to the same options of jobs.train_clip"
    with ending_in_one_line(lambda: config.run.prepared_directory):
        plan = make_plan(config)
        if dry_run:
            print(plan.describe())
        check_writable("run.prepared", config.run.prepared_directory)
        check_machine()
        check_room(config, 0.0)
        if dry_run:
            return 0
        found = prepare(config)
    for features in found:
        print(f"{features.directory}  {features.describe_size()}")
    print(f"\nTo train on them, add {training}")
    return 0


if __name__ == "__main__":
    run_job(main)
