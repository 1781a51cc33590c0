"""Experiments on the level of temperatures: ρ, τ_max, the training text (TempNet Tables 15, 17 and 23, Figure 9)."""

from __future__ import annotations

from jobs.studies.reproduction.experiment import (
    Measure,
    PaperTable,
    Scale,
    Statement,
    Study,
    above,
    between,
    equal,
    falling,
    score,
)
from jobs.studies.reproduction.experiments.language_models import (
    AVERAGE,
    AVERAGE_COLUMN,
    ELEVEN_TASKS,
    NATS,
    PERPLEXITY,
    SMALL_CHANGES,
    TAU,
    average,
    experiment,
    frozen,
    rho,
    study,
    with_base,
)
from jobs.studies.reproduction.scoring import Language

# The values reach up to log V − 3.6 (log V = 7.62 for V = 2 048); for larger ρ, 300 steps are too few (docs/results.md).
_SMALL_RHO = (1.5, 2.0, 2.5, 3.0, 3.5, 4.0)
_PAPER_RHO = (8.0, 9.0, 9.5, 10.0, 10.5, 11.0)


def _table_15(scale: Scale) -> tuple[Study, ...]:
    paper = {
        f"ρ = {value:g}": figures
        for value, figures in zip(
            _PAPER_RHO,
            ((1.65, 56.66), (1.03, 57.34), (0.95, 57.77), (0.81, 57.87), (0.69, 57.74), (0.35, 56.86)),
            strict=True,
        )
    }
    values = _SMALL_RHO if scale == "small" else _PAPER_RHO
    names = [f"ρ = {value:g}" for value in values]
    arms = [
        frozen(scale, name, "llama1-7b-frozen", row=row, changes=rho(value))
        for name, row, value in zip(names, paper, values, strict=True)
    ]
    return (
        study(
            scale,
            "a frozen base",
            with_base(scale, *arms),
            PaperTable(columns=("mean τ", "average of 11, %"), rows=paper),
            small=falling(names, "tau_mean"),
            full=(*falling(names, "tau_mean"), *(above("ρ = 10", f"ρ = {value}", "average") for value in (8, 9, 11))),
            small_measures=(TAU, PERPLEXITY),
            full_measures=(TAU, average(tasks=ELEVEN_TASKS)),
            scoring=Language(tasks=ELEVEN_TASKS, lambada=""),
            notes=(
                "At small scale the paper's six ρ stand beside six others, in order, and accuracies are not measured. "
                "They were chosen after ρ = 4.5 had failed; at ρ = 4 the TempNet is a constant (docs/results.md).",
            ),
        ),
    )


def _table_17(scale: Scale) -> tuple[Study, ...]:
    arms = [
        frozen(scale, f"τ_max = {value:g}", "llama1-7b-frozen", changes={"temperature.tau_max": value})
        for value in (2.0, 1.4)
    ]
    return (
        study(
            scale,
            "τ_max in training",
            with_base(scale, *arms),
            PaperTable(columns=AVERAGE_COLUMN, rows={"τ_max = 2": (58.02,), "τ_max = 1.4": (57.96,)}),
            small=[equal("τ_max = 2", "τ_max = 1.4", "cross-entropy", within=0.05)],
            full=[equal("τ_max = 2", "τ_max = 1.4", "average", within=0.5)],
            small_measures=(NATS, TAU),
            full_measures=(AVERAGE, TAU),
            notes=("No difference means less than .5 points of the average, and less than .05 nats at small scale.",),
        ),
    )


_TAU_MAX_EVAL = (0.8, 1.0, 1.2, 1.4, 1.6, 2.0)


def _figure_9(scale: Scale) -> tuple[Study, ...]:
    is_small = scale == "small"
    arm = frozen(scale, "TempNet", "llama2-7b-frozen")
    # At small scale bits per byte are used, since the word perplexity of a text unlike any that such a model has seen
    # has fifteen digits.
    figure = "bits a byte" if is_small else "average"
    best = (
        Statement(
            text=f"{figure}: better at τ_max {inside:g} than at {outside:g}",
            weights={
                ("TempNet", f"{figure} at {inside:g}"): -1.0 if is_small else 1.0,
                ("TempNet", f"{figure} at {outside:g}"): 1.0 if is_small else -1.0,
            },
            low=0.0,
        )
        for inside in (1.2, 1.4)
        for outside in (0.8, 1.0, 1.6, 2.0)
    )
    measures = [
        score(
            f"{figure} at {value:g}", f"{figure} at {value:g}", f"wikitext/bits_per_byte at tempnet:{value:g}", digits=3
        )
        if is_small
        else _rename(average(at=f" at tempnet:{value:g}"), f"average at {value:g}")
        for value in _TAU_MAX_EVAL
    ]
    taus = [
        score(f"tau at {value:g}", f"mean τ at {value:g}", f"wikitext/tau_mean at tempnet:{value:g}", digits=3)
        for value in _TAU_MAX_EVAL
    ]
    temperatures = tuple(f"tempnet:{value:g}" for value in _TAU_MAX_EVAL)
    return (
        Study(
            title="τ_max at evaluation",
            arms=with_base(scale, arm),
            changes=SMALL_CHANGES if is_small else {},
            measures=(*measures, *taus),
            statements=(
                *best,
                *(between("TempNet", f"tau at {value:g}", 0.7, 0.8) for value in (1.2, 1.4)),
            ),
            scoring=Language(wikitext="README.md", lambada="", tasks=(), temperatures=temperatures)
            if is_small
            else Language(lambada="", temperatures=temperatures),
            notes=(
                "The paper has a figure only, of accuracies and win rates. At small scale the bits a byte of a text "
                "(README.md; another by --data wikitext=FILE) take their place; the base has no TempNet.",
            ),
        ),
    )


def _rename(measure: Measure, name: str) -> Measure:
    return Measure(name=name, title=measure.title, value=measure.value, digits=measure.digits)


def _table_23(scale: Scale) -> tuple[Study, ...]:
    arms = [
        frozen(scale, "SlimPajama", "llama1-7b-frozen", changes={"data.train": "data/slimpajama/train"}),
        frozen(scale, "OpenWebText2", "llama1-7b-frozen"),
    ]
    return (
        study(
            scale,
            "training text of the TempNet",
            with_base(scale, *arms),
            PaperTable(columns=AVERAGE_COLUMN, rows={"SlimPajama": (57.96,), "OpenWebText2": (58.02,)}),
            small=[equal("SlimPajama", "OpenWebText2", "cross-entropy", within=0.05)],
            full=[equal("SlimPajama", "OpenWebText2", "average", within=0.5)],
            small_measures=(NATS, TAU),
            notes=(
                "At small scale OpenWebText2 is the sample text, and any other text can be put in the place of SlimPajama.",
            ),
        ),
    )


EXPERIMENTS = (
    experiment("T15", "ρ", "Table 15", "mean τ falls with ρ; accuracy is best at ρ = 10", _table_15),
    experiment("T17", "τ_max in training", "Table 17", "2.0 or 1.4 makes no difference", _table_17),
    experiment("T23", "Training text", "Table 23", "SlimPajama or OpenWebText2 makes no difference", _table_23),
    experiment("F9", "τ_max at evaluation", "Figure 9", "best at τ_max 1.2 to 1.4, mean τ .7 to .8", _figure_9),
)
