"""Experiments on training with the robust loss and its TempNet (TempNet Tables 2, 4, 10 and 16, Figures 2 and 4)."""

from __future__ import annotations

from collections.abc import Mapping

from jobs.studies.reproduction.experiment import (
    Arm,
    PaperTable,
    Scale,
    Study,
    above,
    below,
    between,
    equal,
    falling,
    perplexity,
    score,
)
from jobs.studies.reproduction.experiments.language_models import (
    BASE,
    CE,
    FULL_MEASURES,
    PERPLEXITY,
    PERPLEXITY_ONE,
    SMALL_CHANGES,
    TABLE_2_COLUMNS,
    TAU,
    TEMPNET,
    average,
    distinct,
    experiment,
    frozen,
    full_pair,
    own_against_one,
    rho,
    scratch,
    study,
    with_base,
)
from jobs.studies.reproduction.scoring import History, Language

_LLAMA_2 = {
    "llama2-7b-frozen": ((57.20, 4.01, 11.4), (59.44, 3.21, 12.2)),
    "llama2-13b-frozen": ((60.00, 3.62, 10.0), (61.24, 2.97, 11.1)),
}
_LLAMA_1 = {"llama1-7b-frozen": ((56.36, 4.41, 9.41), (58.02, 3.65, 9.87))}


def _table_2(scale: Scale) -> tuple[Study, ...]:
    from_scratch = study(
        scale,
        "from scratch",
        [CE, TEMPNET],
        PaperTable(columns=TABLE_2_COLUMNS, rows={"τ = 1": (31.44, 62.49, 49.86), "TempNet": (32.24, 60.13, 47.32)}),
        small=[below("TempNet", "τ = 1", "perplexity")],
        full=full_pair("TempNet", "τ = 1"),
    )
    after = BASE.name if scale == "small" else ""
    tuned = [
        Arm(name=name, preset="gpt2-finetune", changes={"temperature.loss": loss}, after=after)
        for name, loss in (("τ = 1", "ce"), ("TempNet", "dro"))
    ]
    fine_tuned = study(
        scale,
        "fine-tuned",
        with_base(scale, *tuned),
        PaperTable(columns=TABLE_2_COLUMNS, rows={"τ = 1": (35.42, 35.37, 28.12), "TempNet": (36.48, 34.16, 27.06)}),
        small=[below("TempNet", "τ = 1", "perplexity")],
        full=full_pair("TempNet", "τ = 1"),
    )
    return from_scratch, fine_tuned, _frozen_llama(scale, "LLaMA-2", _LLAMA_2, with_falling_wikitext=False)


def _frozen_llama(
    scale: Scale, family: str, paper: Mapping[str, tuple[tuple[float, ...], ...]], *, with_falling_wikitext: bool
) -> Study:
    """Returns a study of TempNets on frozen bases; the bases' own scores are those of the same exports at τ = 1."""
    presets = distinct(scale, paper)
    columns = [f"{column}{at}" for at in (" at τ = 1", "") for column in TABLE_2_COLUMNS]
    return study(
        scale,
        f"{family}, frozen",
        with_base(scale, *(frozen(scale, preset, preset) for preset in presets)),
        PaperTable(
            columns=tuple(columns), rows={preset: (*at_one, *at_own) for preset, (at_one, at_own) in paper.items()}
        ),
        small=[own_against_one(preset, "perplexity", " at 1", is_lower=with_falling_wikitext) for preset in presets],
        full=[
            statement
            for preset in presets
            for statement in (
                own_against_one(preset, "average", " at one", is_lower=False),
                own_against_one(preset, "LAMBADA", " at one", is_lower=True),
                own_against_one(preset, "WikiText", " at one", is_lower=with_falling_wikitext),
            )
        ],
        small_measures=(PERPLEXITY_ONE, PERPLEXITY, TAU),
        full_measures=(
            average(at=" at one"),
            score("LAMBADA at one", "LAMBADA ppl at τ = 1", "lambada/perplexity at one"),
            score("WikiText at one", "WikiText ppl at τ = 1", "wikitext/word_perplexity at one"),
            *FULL_MEASURES,
        ),
        scoring=Language(temperatures=("tempnet", "one")),
        notes=("In the paper WikiText's perplexity rises here, so this is what is tested.",),
    )


def _table_10(scale: Scale) -> tuple[Study, ...]:
    return (_frozen_llama(scale, "LLaMA-1", _LLAMA_1, with_falling_wikitext=False),)


def _table_4(scale: Scale) -> tuple[Study, ...]:
    names = ("ce", "dro_newton", "ts_ce", "dro")
    arms = [scratch(name, name) for name in names]
    rows = {
        "ce": (31.44, 62.49, 49.86), "dro_newton": (31.78, 62.17, 49.13),
        "ts_ce": (31.76, 61.48, 48.61), "dro": (32.24, 60.13, 47.32),
    }  # fmt: skip
    return (
        study(
            scale,
            "GPT-2 from scratch",
            arms,
            PaperTable(columns=TABLE_2_COLUMNS, rows=rows),
            small=falling(names, "perplexity"),
            full=(
                *falling(names, "WikiText"),
                above("dro_newton", "ce", "average"),
                equal("ts_ce", "dro_newton", "average", within=0.5),
                above("dro", "ts_ce", "average"),
                above("dro", "dro_newton", "average"),
            ),
        ),
    )


def _curves(scale: Scale) -> tuple[Study, ...]:
    points = range(1, 5)
    measures = [
        perplexity(f"perplexity {point}/4", f"perplexity after {point}/4", f"cross_entropy_tau@{point}")
        for point in points
    ]
    lower = [below("TempNet", "τ = 1", measure.name) for measure in measures]
    after = BASE.name if scale == "small" else ""
    tuned = [Arm(name=arm.name, preset="gpt2-finetune", changes=arm.changes, after=after) for arm in (CE, TEMPNET)]
    return tuple(
        Study(
            title=title,
            arms=arms,
            changes=SMALL_CHANGES if scale == "small" else {},
            measures=tuple(measures),
            statements=tuple(lower),
            scoring=History(score="cross_entropy_tau", num_points=len(points)),
            notes=("The paper has curves only. They show the training text, ours show the validation text.",),
        )
        for title, arms in (("from scratch", (CE, TEMPNET)), ("fine-tuned", with_base(scale, *tuned)))
    )


def _table_16(scale: Scale) -> tuple[Study, ...]:
    zero = Arm(name="ρ = 0", preset="gpt2-scratch", changes={"temperature.loss": "dro", **rho(0.0)})
    tuned = scratch("ρ tuned", "dro")
    # We computed the averages over the five tasks from the paper's columns.
    rows = {"τ = 1": (31.44, 62.49, 49.86), "ρ = 0": (31.34, 62.66, 49.61), "ρ tuned": (32.24, 60.13, 47.32)}
    ends = between("ρ = 0", "tau_mean", 1.95, 2.05)
    return (
        study(
            scale,
            "GPT-2 from scratch",
            [CE, zero, tuned],
            PaperTable(columns=TABLE_2_COLUMNS, rows=rows),
            small=[ends, below("ρ tuned", "ρ = 0", "perplexity")],
            full=[ends, *full_pair("ρ tuned", "ρ = 0")],
        ),
    )


def _figure_2(scale: Scale) -> tuple[Study, ...]:
    spearman = score("Spearman", "Spearman(τ, entropy)", "validation/tau_entropy_spearman")
    arm = frozen(scale, "TempNet", "llama2-7b-frozen")
    return (
        Study(
            title="τ against the entropy of the prediction",
            arms=with_base(scale, arm),
            changes=SMALL_CHANGES if scale == "small" else {},
            measures=(spearman, TAU),
            statements=(between("TempNet", "Spearman", 0.0, 1.0),),
            notes=(
                "If τ is high where many continuations are possible, the correlation is positive. That of the converged "
                "optimum is negative. The page with a coloured passage is `report/tokens.html` of the run.",
            ),
        ),
    )


EXPERIMENTS = (
    experiment(
        "T2",
        "Language models",
        "Table 2",
        "TempNet improves all, but for WikiText of frozen models",
        _table_2,
    ),
    experiment(
        "T4", "Robust loss and TempNet apart", "Table 4", "ce > dro_newton > ts_ce > dro in perplexity", _table_4
    ),
    experiment("T10", "LLaMA-1 7B", "Table 10", "as Table 2, frozen", _table_10),
    experiment("T16", "ρ = 0", "Table 16", "τ climbs to τ_max and stays there", _table_16),
    experiment(
        "F2", "τ of every token", "Figures 2 and 10", "τ is high where many continuations are possible", _figure_2
    ),
    experiment("F4", "Training curves", "Figures 4 and 7", "TempNet is below τ = 1 all along the training", _curves),
)
