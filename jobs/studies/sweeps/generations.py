"""Population based training as rounds of trials: every generation is a round of runs that start from those before."""

from __future__ import annotations

import numpy as np

from jobs.studies.sweeps.plan import Sweep
from jobs.studies.sweeps.population import Member, breed, last_steps
from jobs.studies.sweeps.round_record import RoundRecord
from jobs.studies.sweeps.rounds import read_result, run_round
from jobs.studies.sweeps.stopping import GenerationRule, TrialWatch
from jobs.studies.trials.trial import Rounds


def make_generations(sweep: Sweep, record: RoundRecord) -> Rounds:
    """Yields the generations of a sweep as trials, without those whose failure is final.

    A run of a later generation has a directory, an outcome and an MLflow run of its own. Its configuration names the
    checkpoint from which it starts (`run.start_from`), so the values with which a model was trained can be read back
    through the generations.
    """
    config, section = sweep.config, sweep.config.sweep
    rng = np.random.default_rng(section.seed)
    members = [Member(point=point) for point in next(config.start())]
    first = sweep.first.config
    ends = last_steps(
        first.run.num_steps, num_generations=section.num_generations, validation_every=first.validation.every
    )
    parents: list[str] = []
    for generation, end in enumerate(ends, start=1):
        configs = [
            config.trial(
                member.point,
                prefix=f"g{generation}-{number}-",
                start_from="" if member.parent is None else parents[member.parent],
            )
            for number, member in enumerate(members)
        ]
        names = [trial.run.name for trial in configs]
        record.begin({name: member.point for name, member in zip(names, members, strict=True)})
        is_last = generation == len(ends)
        rule = None if is_last else GenerationRule(number=generation, num_generations=len(ends), last_step=end)
        watches = [TrialWatch(trial=name, rule=rule) for name in names]
        finished = yield from run_round(sweep, record, configs, watches)
        results = [
            read_result(member.point, finished.get(name), first.run.num_steps)
            for member, name in zip(members, names, strict=True)
        ]
        parents = [f"{name}@{end}" for name in names]
        members = breed(results, axes=section.values, band=section.band, rng=rng)
        if not members:
            return
