"""Experiments with noisy captions, which belong to other images (TempNet Figures 5 and 8)."""

from __future__ import annotations

from jobs.studies.reproduction.experiment import NO_TABLE, Experiment, Measure, Scale, Statement, Study, above, score
from jobs.studies.reproduction.experiments.contrastive import RECALL, RETRIEVAL_MEASURES, TAU, TAU_STD, arm, study
from jobs.studies.reproduction.noisy_captions import NoisyCaptions

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
                "The paper has histograms only, of noisy pairs with a frequent meaning; here all noisy pairs count. "
                "Histograms of τ are `report/histogram.png` of every run.",
            ),
        ),
    )


EXPERIMENTS = (
    Experiment(id="F5", title="Caption noise", source="TempNet Figure 5, left",
               claim="TempNet's recall falls less than iSogCLR's", studies=_figure_5_left),
    Experiment(id="F8", title="Temperatures of noisy captions", source="TempNet Figure 8",
               claim="iSogCLR gives noisy pairs too low a τ, TempNet does not", studies=_figure_8),
)  # fmt: skip
