"""Experiments on losses of dual encoders: TempNet (Tables 3, 7 to 9, §6.2, Figures 5 and 7) and temperature-free."""

from __future__ import annotations

from jobs.studies.reproduction.experiment import NO_TABLE, Arm, Experiment, PaperTable, Scale, Study, above, score
from jobs.studies.reproduction.experiments.contrastive import (
    COLUMNS,
    FULL_MEASURES,
    LARGE,
    RECALL,
    RETRIEVAL_MEASURES,
    TAU,
    TAU_STD,
    arm,
    best,
    study,
)
from jobs.studies.reproduction.scoring import History


def _table_3(scale: Scale) -> tuple[Study, ...]:
    rows = {
        "CLIP": (40.98, 50.90, 21.32, 26.98, 60.63, 30.70, 36.27),
        "CyCLIP": (42.46, 51.70, 21.58, 26.18, 57.19, 33.11, 36.75),
        "SogCLR": (43.32, 57.18, 22.43, 30.08, 61.09, 33.26, 37.46),
        "iSogCLR": (44.36, 60.20, 23.27, 32.72, 58.91, 33.81, 40.72),
        "TempNet": (46.17, 62.51, 24.83, 34.50, 61.77, 34.69, 42.28),
    }
    others = list(rows)[:-1]
    return (
        study(
            scale,
            "losses on CC3M",
            [arm(name, name.lower()) for name in rows],
            PaperTable(columns=COLUMNS, rows=rows),
            small=best("TempNet", others, [RECALL]),
            full=best("TempNet", others, FULL_MEASURES),
            notes=("Tables 7 to 9 are further columns: `results.json` of the evaluation in this directory has them.",),
        ),
    )


def _curves(scale: Scale) -> tuple[Study, ...]:
    points = range(1, 5)
    measures = tuple(
        score(f"recall {point}/4", f"mean recall after {point}/4, %", f"mean_recall@{point}", factor=100.0)
        for point in points
    )
    return (
        Study(
            title="validation recall in the course of training",
            arms=(arm("CLIP", "clip"), arm("TempNet", "tempnet")),
            measures=measures,
            statements=tuple(best("TempNet", ["CLIP"], measures)),
            scoring=History(score="mean_recall", num_points=len(points)),
        ),
    )


def _figure_5_right(scale: Scale) -> tuple[Study, ...]:
    arms = [
        arm("SogCLR, τ = .01", "sogclr"),
        arm("iSogCLR", "isogclr"),
        Arm(name="given by CC12M's TempNets", preset="clip-cc3m-sogclr-given"),
    ]
    others = [baseline.name for baseline in arms[:-1]]
    return (
        study(
            scale,
            "temperatures given",
            arms,
            NO_TABLE,
            small=best(arms[-1].name, others, [RECALL]),
            full=best(arms[-1].name, others, RETRIEVAL_MEASURES),
            notes=(
                "The table of temperatures is made first, by `jobs.train_clip clip-cc12m-tempnet-frozen` and "
                "`jobs.predict_temperatures --images` (README); another by --change temperature.table=TABLE --arms "
                "'given by CC12M's TempNets'. The paper has a figure only.",
            ),
        ),
    )


def _frequency(scale: Scale) -> tuple[Study, ...]:
    base = arm("base", "clip")
    arms = [
        Arm(
            name=f"ρ = {rho}",
            preset="clip-cc12m-tempnet-frozen",
            changes={"temperature.rho": float(rho), "temperature.tau_max": 0.3},
            after=base.name if scale == "small" else "",
        )
        for rho in range(1, 10)
    ]
    return (
        Study(
            title="TempNets on a frozen model over ρ",
            arms=(base, *arms) if scale == "small" else tuple(arms),
            measures=(TAU, TAU_STD),
            notes=(
                "The sign depends on ρ, so that no single claim is tested. The curve of rank correlations with the "
                "true frequency, beside the oracle: `python -m benchmarks.concept_frequency --base … --tempnets 1=…`",
            ),
        ),
    )


_FIXED_TAU = (0.01, 0.03, 0.07, 0.15, 0.5)


def _temperature_free(scale: Scale) -> tuple[Study, ...]:
    fixed = [arm(f"τ = {tau:g}", "clip", loss="clip_fixed", tau=tau) for tau in _FIXED_TAU]
    measures = [RECALL] if scale == "small" else RETRIEVAL_MEASURES
    statements = [
        above("temperature-free", tuned.name, measure.name, by=-LARGE) for measure in measures for tuned in fixed
    ]
    return (
        study(
            scale,
            "no temperature against tuned ones",
            [arm("temperature-free", "temperature_free"), *fixed],
            NO_TABLE,
            small=statements,
            full=statements,
            notes=(
                f"Not worse is taken to mean less than {LARGE:g} point below every temperature of the sweep; our copy of "
                "the paper has no table.",
            ),
        ),
    )


EXPERIMENTS = (
    Experiment(id="T3", title="Losses of image-text models", source="TempNet Tables 3, 7, 8 and 9",
               claim="TempNet is first in every column", studies=_table_3),
    Experiment(id="F7", title="Training curves of CLIP", source="TempNet Figure 7",
               claim="TempNet is above CLIP all along the training", studies=_curves),
    Experiment(id="frequency", title="Frequent and rare meanings", source="TempNet §6.2, after arXiv 2305.11965",
               claim="frequent meanings have a high τ, rare ones a low one", studies=_frequency),
    Experiment(id="F5-right", title="Transfer", source="TempNet Figure 5, right",
               claim="SogCLR at the τ of CC12M's TempNets is above SogCLR and iSogCLR", studies=_figure_5_right),
    Experiment(id="TF", title="Temperature-free", source="arXiv 2501.17683",
               claim="no temperature is not worse than a tuned one, without a sweep", studies=_temperature_free),
)  # fmt: skip
