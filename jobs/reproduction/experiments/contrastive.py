"""Experiments on images with captions: TempNet (arXiv 2404.04575 §6.2, Appendix D) and temperature-free (arXiv 2501.17683).

At full scale figures are zero-shot retrieval on Flickr30K and COCO and zero-shot classification; at small scale the mean
recall of the best model of a run (by validation) on the test split of the sample images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jobs.reproduction.experiment import (
    NO_TABLE,
    Arm,
    Experiment,
    Measure,
    PaperTable,
    Scale,
    Statement,
    Study,
    above,
    below,
    equal,
    score,
)
from jobs.reproduction.scoring import History, NoisyCaptions, Retrieval

RETRIEVAL = {"Flickr30K": ("flickr30k", "data/flickr30k/images"), "COCO": ("coco", "data/coco/val2014")}
CLASSIFICATION = {"CIFAR-10": "cifar10", "CIFAR-100": "cifar100", "ImageNet": "imagenet"}

TEST = Retrieval(retrieval={"test": "data/sample/images/test"}, captions={"test": ""})
KARPATHY = Retrieval(
    retrieval=dict(RETRIEVAL.values()),
    captions={"flickr30k": "data/flickr30k/dataset_flickr30k.json", "coco": "data/coco/dataset_coco.json"},
    zero_shot={name: f"data/{name}" for name in CLASSIFICATION.values()},
)

RECALL = score("mean recall", "mean recall, %", "test/mean_recall", factor=100.0)
TAU = score("tau_mean", "mean τ", "validation/tau_mean", digits=4)
TAU_STD = score("tau_std", "spread of τ", "validation/tau_std", digits=4)
RETRIEVAL_MEASURES = tuple(
    score(f"{title} {short}@1", f"{title} {short}@1", f"{name}/{kind}_recall@1", factor=100.0)
    for title, (name, _) in RETRIEVAL.items()
    for short, kind in (("IR", "image"), ("TR", "text"))
)
CLASSIFICATION_MEASURES = tuple(
    score(title, f"{title} top-1", f"{name}/top@1", factor=100.0) for title, name in CLASSIFICATION.items()
)
FULL_MEASURES = (*RETRIEVAL_MEASURES, *CLASSIFICATION_MEASURES)
COLUMNS = tuple(measure.title for measure in FULL_MEASURES)
RETRIEVAL_COLUMNS = COLUMNS[:4]

LARGE = 1.0
"""Points of recall that are taken for no difference."""


def arm(name: str, loss: str, /, *, noise: float = 0.0, **temperature: Any) -> Arm:
    """The preset of a loss on CC3M, with fields of `temperature` changed."""
    changes = {f"temperature.{field}": value for field, value in temperature.items()}
    if noise:
        changes["data.caption_noise"] = noise
    return Arm(name=name, preset=f"clip-cc3m-{loss.replace('_', '-')}", changes=changes)


def study(
    scale: Scale,
    title: str,
    arms: Sequence[Arm],
    table: PaperTable,
    *,
    small: Sequence[Statement],
    full: Sequence[Statement],
    notes: Sequence[str] = (),
) -> Study:
    """A table of dual encoders."""
    is_small = scale == "small"
    return Study(
        title=title,
        arms=tuple(arms),
        table=table,
        measures=(RECALL, TAU, TAU_STD) if is_small else (*FULL_MEASURES, TAU),
        statements=tuple(small if is_small else full),
        scoring=TEST if is_small else KARPATHY,
        notes=tuple(notes),
    )


def best(name: str, others: Sequence[str], measures: Sequence[Measure]) -> list[Statement]:
    """One arm above all others in every measure."""
    return [above(name, other, measure.name) for measure in measures for other in others]


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


_NOISE = (0.0, 0.05, 0.10, 0.15)


def _noisy(name: str, share: float) -> str:
    return f"{name}, {share:.0%}"


def _figure_5_left(scale: Scale) -> tuple[Study, ...]:
    arms = [arm(_noisy(name, share), name.lower(), noise=share) for name in ("TempNet", "iSogCLR") for share in _NOISE]

    def loses_less(measure: Measure, share: float) -> Statement:
        signs = {("iSogCLR", 0.0): 1.0, ("iSogCLR", share): -1.0, ("TempNet", 0.0): -1.0, ("TempNet", share): 1.0}
        return Statement(
            text=f"{measure.name}: with noise in {share:.0%} iSogCLR loses more than TempNet",
            weights={(_noisy(name, at), measure.name): sign for (name, at), sign in signs.items()},
            low=0.0,
        )

    return (
        study(
            scale,
            "noise in the captions",
            arms,
            NO_TABLE,
            small=[loses_less(RECALL, 0.15)],
            full=[loses_less(measure, 0.15) for measure in RETRIEVAL_MEASURES],
            notes=("The paper has a figure only.",),
        ),
    )


def _figure_8(scale: Scale) -> tuple[Study, ...]:
    difference = score("noisy τ", "τ of noisy captions against others, %", "noisy_tau")
    without, with_noise = _NOISE[0], _NOISE[-1]
    arms = tuple(
        arm(_noisy(name, share), name.lower(), noise=share)
        for name in ("iSogCLR", "TempNet")
        for share in (without, with_noise)
    )
    lowered = {
        (_noisy("iSogCLR", without), difference.name): 1.0,
        (_noisy("iSogCLR", with_noise), difference.name): -1.0,
    }
    return (
        Study(
            title="temperatures of noisy captions",
            arms=arms,
            measures=(difference, TAU, TAU_STD),
            statements=(
                Statement(text="noise lowers iSogCLR's τ of the noisy pairs", weights=lowered, low=0.0),
                above(_noisy("TempNet", with_noise), _noisy("iSogCLR", with_noise), difference.name),
            ),
            scoring=NoisyCaptions(share=with_noise),
            notes=(
                "The paper has histograms only, and looks at noisy pairs of frequent meaning; here at all. Histograms of τ "
                "are `report/histogram.png` of every run.",
            ),
        ),
    )


def _figure_5_right(scale: Scale) -> tuple[Study, ...]:
    arms = [
        arm("SogCLR, τ = .01", "sogclr"),
        arm("iSogCLR", "isogclr"),
        Arm(name="given by CC12M's TempNets", preset="clip-cc3m-sogclr-given"),
    ]
    others = [one.name for one in arms[:-1]]
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
                "The sign is a matter of ρ, and no single claim is held against it. The curve of rank correlations with the "
                "true frequency, beside the oracle: `python -m benchmarks.concept_frequency --base … --tempnets 1=…`",
            ),
        ),
    )


_PARTS: Mapping[str, dict[str, Any]] = {
    "no transform": {"transform": False},
    "no projection": {"projection": False},
    "final linear layer": {"pooling": "linear"},
    "whole": {},
}


def _table_19(scale: Scale) -> tuple[Study, ...]:
    figures = (
        (43.58, 59.37, 22.75, 31.66), (45.06, 61.77, 23.48, 33.97),
        (46.20, 62.38, 24.39, 34.22), (46.17, 62.51, 24.83, 34.50),
    )  # fmt: skip
    others = list(_PARTS)[:-1]
    return (
        study(
            scale,
            "parts of the networks",
            [arm(name, "tempnet", **fields) for name, fields in _PARTS.items()],
            PaperTable(columns=RETRIEVAL_COLUMNS, rows=dict(zip(_PARTS, figures, strict=True))),
            small=best("whole", others, [RECALL]),
            full=best("whole", others, RETRIEVAL_MEASURES),
            notes=("The marks of the paper's rows are lost in our copy of it; their order is taken to be this.",),
        ),
    )


def _table_21(scale: Scale) -> tuple[Study, ...]:
    sizes: dict[str, dict[str, Any]] = {
        "width 64": {"hidden_size": 64, "num_prototypes": 64},
        "width 512": {"hidden_size": 512, "num_prototypes": 512},
        "depth 4": {"depth": 4},
        "width 256": {},
    }
    figures = (
        (45.84, 62.41, 24.10, 34.43, 61.21, 34.60, 42.13), (46.08, 62.84, 24.77, 34.34, 62.29, 34.26, 42.05),
        (45.73, 62.40, 24.33, 34.32, 61.32, 34.73, 41.46), (46.17, 62.51, 24.83, 34.50, 61.77, 34.69, 42.28),
    )  # fmt: skip
    measures = [RECALL] if scale == "small" else RETRIEVAL_MEASURES
    statements = [
        statement
        for measure in measures
        for statement in (
            equal("width 64", "width 256", measure.name, within=LARGE),
            equal("width 512", "width 256", measure.name, within=LARGE),
            below("depth 4", "width 256", measure.name),
        )
    ]
    return (
        study(
            scale,
            "sizes of the networks",
            [arm(name, "tempnet", **fields) for name, fields in sizes.items()],
            PaperTable(columns=COLUMNS, rows=dict(zip(sizes, figures, strict=True))),
            small=statements,
            full=statements,
            notes=(f"Flat is taken as {LARGE:g} point of recall.",),
        ),
    )


def table_18(scale: Scale) -> tuple[Study, ...]:
    """The last block of Table 18."""
    names = {
        "CL, no stop-gradient": ("tempnet_in_batch", False),
        "CL": ("tempnet_in_batch", True),
        "DRO, no stop-gradient": ("tempnet", False),
        "DRO": ("tempnet", True),
    }
    figures = (
        (41.49, 56.33, 21.57, 28.83, 59.52, 31.91, 36.93), (43.43, 56.62, 22.17, 29.68, 60.65, 33.22, 37.07),
        (42.07, 56.44, 21.76, 29.13, 60.22, 32.12, 37.21), (46.17, 62.51, 24.83, 34.50, 61.77, 34.69, 42.28),
    )  # fmt: skip
    others = list(names)[:-1]
    return (
        study(
            scale,
            "CLIP",
            [arm(name, loss, stop_gradient=stop) for name, (loss, stop) in names.items()],
            PaperTable(columns=COLUMNS, rows=dict(zip(names, figures, strict=True))),
            small=best("DRO", others, [RECALL]),
            full=best("DRO", others, FULL_MEASURES),
        ),
    )


_FIXED_TAU = (0.01, 0.03, 0.07, 0.15, 0.5)


def _temperature_free(scale: Scale) -> tuple[Study, ...]:
    fixed = [arm(f"τ = {tau:g}", "clip", loss="clip_fixed", tau=tau) for tau in _FIXED_TAU]
    measures = [RECALL] if scale == "small" else RETRIEVAL_MEASURES
    statements = [above("temperature-free", one.name, measure.name, by=-LARGE) for measure in measures for one in fixed]
    return (
        study(
            scale,
            "no temperature against tuned ones",
            [arm("temperature-free", "temperature_free"), *fixed],
            NO_TABLE,
            small=statements,
            full=statements,
            notes=(
                f"Not worse is taken as less than {LARGE:g} point below every temperature of the sweep; our copy of the "
                "paper has no table.",
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
    Experiment(id="F5", title="Caption noise", source="TempNet Figure 5, left",
               claim="TempNet's recall falls less than iSogCLR's", studies=_figure_5_left),
    Experiment(id="F5-right", title="Transfer", source="TempNet Figure 5, right",
               claim="SogCLR at the τ of CC12M's TempNets is above SogCLR and iSogCLR", studies=_figure_5_right),
    Experiment(id="F8", title="Temperatures of noisy captions", source="TempNet Figure 8",
               claim="iSogCLR gives noisy pairs too low a τ, TempNet does not", studies=_figure_8),
    Experiment(id="T19", title="Parts of CLIP's networks", source="TempNet Table 19", claim="each removal loses",
               studies=_table_19),
    Experiment(id="T21", title="Size of CLIP's networks", source="TempNet Table 21",
               claim="width makes no difference, depth 4 loses slightly", studies=_table_21),
    Experiment(id="TF", title="Temperature-free", source="arXiv 2501.17683",
               claim="no temperature is not worse than a tuned one, without a sweep", studies=_temperature_free),
)  # fmt: skip
