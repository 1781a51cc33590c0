"""What the experiments on dual encoders share.

Their papers are TempNet (arXiv 2404.04575 §6.2, Appendix D) and temperature-free (arXiv 2501.17683). At full scale the
figures are zero-shot retrieval on Flickr30K and COCO and zero-shot classification. At small scale they are the mean
recall on the test split of the sample images, with the best model of a run (by validation).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jobs.studies.reproduction.experiment import Arm, Measure, PaperTable, Scale, Statement, Study, above, score
from jobs.studies.reproduction.scoring import Retrieval

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
"""Difference in recall, in points, that counts as no difference."""


def arm(name: str, loss: str, /, *, noise: float = 0.0, **temperature: Any) -> Arm:
    """Returns an arm with the preset of a loss on CC3M, and with changed fields of `temperature`.

    Args:
        name: name of the arm.
        loss: name of the loss.
        noise: share of captions with noise.
        temperature: changed fields.
    """
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
    """Returns a study whose arms are dual encoders."""
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
    """Returns the statements that one arm is above all others in every measure."""
    return [above(name, other, measure.name) for measure in measures for other in others]
