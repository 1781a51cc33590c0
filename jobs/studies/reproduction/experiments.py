"""The papers' tables and figures as experiments by their id, read from `experiments.yaml`.

An entry has `title`, `source` (the paper, and the table or figure in it), `claim`, and `studies`, each of which takes what
it does not say from its `kind`:

    title, columns      of the table, and of the paper's figures
    arms                name → preset (or that of the study), paper (the paper's figures), row (its name in the paper),
                        only (the only scale), and fields of the preset with other values; those below `small` or `full`
                        at that scale only
    base                the arm that all start from at small scale; at full scale their presets name a public model
    measures, scoring   columns of our table (`MEASURES`), and how exports are scored (`jobs.studies.reproduction.scoring`)
    claims              statements as the table shows them; `|` separates alternatives that are stated one by one, and
                        a chain `a > b > c` states b < a, c < b. `*` is the mean recall at small scale, and at full scale
                        every figure of retrieval, or also of classification (`over`). Others give the text, the weights
                        of the sum, and its bounds (`Statement`)
    changes             fields with other values in all arms
    direct              what measures without training (`jobs.studies.reproduction.direct`)
    axis                title of the horizontal axis, if the measures are points of a curve
    notes, commands     for the reader

`measures`, `scoring`, `claims` and `changes` may have a value for each scale.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from jobs.studies.reproduction import direct, scoring
from jobs.studies.reproduction.scoring import Scoring

Scale = Literal["small", "full"]
SCALES: tuple[Scale, Scale] = ("small", "full")

Scores = Mapping[str, float]
"""Figures of one run: those of its outcome, such as `validation/<score>`, and those that its export was scored with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A row of the table: a preset with some fields changed, run once for every seed."""

    name: str
    preset: str = ""
    """Name of the preset in `jobs.tasks.presets`, without `-small`. Empty: nothing is trained."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """`section.field` → value that replaces the preset's."""
    paper: tuple[float, ...] = ()
    """The paper's figures, NaN where it has none. Empty: it has no such row."""
    row: str = ""
    """Name of the row in the paper's table. Empty: the same as the name of this arm."""
    after: str = ""
    """Name of the arm from whose export of the same seed this arm starts. Empty: it starts from no other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A column of our table, computed from the scores of a run."""

    name: str
    title: str
    value: Callable[[Scores], float]
    digits: int = 2
    is_exact: bool = False
    """Whether the measure is not random, so that one seed is enough."""
    place: float = math.nan
    """Place on the horizontal axis, if the measures of a study are points of a curve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """A statement of a claim: low < Σ weight·value < high, where the values are of one seed."""

    text: str
    weights: Mapping[tuple[str, str], float]
    """(arm, measure) → weight."""
    low: float = -math.inf
    high: float = math.inf


def difference(more: str, less: str, measure: str) -> dict[tuple[str, str], float]:
    """Returns the weights of the difference of a measure between two arms."""
    return {(more, measure): 1.0, (less, measure): -1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """One table of an experiment at one scale."""

    title: str
    arms: tuple[Arm, ...]
    measures: tuple[Measure, ...]
    statements: tuple[Statement, ...] = ()
    """Statements that must all hold for the claim to hold. Empty: nothing is claimed, or nothing can be measured."""
    columns: tuple[str, ...] = ()
    """Titles of the paper's figures (`Arm.paper`)."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """`section.field` → value, for all arms; an arm's own changes take precedence."""
    scoring: Scoring | None = None
    """How exports are scored, in addition to the validation of their training; None: they are not."""
    direct: Callable[[Scale, int], Mapping[str, Scores]] | None = None
    """Measures figures without training: (scale, number of a seed) → arm → figures. None: the arms are trained."""
    axis: str = ""
    """Title of the horizontal axis of a curve that the measures are points of. Empty: they are no curve."""
    notes: tuple[str, ...] = ()
    """Notes for the reader of the table, including commands for what is not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One of the papers' tables or figures, with its claim."""

    id: str
    title: str
    source: str
    """The paper, and the table or figure in it."""
    claim: str
    """The paper's claim, in one line."""
    studies: Mapping[Scale, list[Study]]


_TASKS = ("piqa", "hellaswag", "arc_easy", "arc_challenge", "openbookqa")
_ELEVEN_TASKS = (*_TASKS, "mathqa", "winogrande", "sciq", "boolq", "swag", "logiqa")
_TAU_MAX = ("0.8", "1", "1.2", "1.4", "1.6", "2")
_RETRIEVAL = {
    f"{title} {short}@1": f"{name}/{kind}_recall@1"
    for title, name in (("Flickr30K", "flickr30k"), ("COCO", "coco"))
    for short, kind in (("IR", "image"), ("TR", "text"))
}
_CLASSIFICATION = {"CIFAR-10": "cifar10/top@1", "CIFAR-100": "cifar100/top@1", "ImageNet": "imagenet/top@1"}


def _score(name: str, title: str, key: str, factor: float = 1.0, **fields: Any) -> Measure:
    """Returns a measure that is one of the scores times a factor; NaN if the run lacks the score."""
    return Measure(name=name, title=title, value=lambda scores: factor * scores.get(key, math.nan), **fields)


def _perplexity(name: str, title: str, key: str) -> Measure:
    return Measure(name=name, title=title, value=lambda scores: math.exp(min(scores.get(key, math.nan), 700.0)))


def _average(name: str = "average", at: str = "", tasks: Sequence[str] = _TASKS) -> Measure:
    """Returns the measure of the mean accuracy over tasks, in %."""
    return Measure(
        name=name,
        title=f"average{at}, %",
        value=lambda scores: 100 * math.fsum(scores.get(f"{task}/acc{at}", math.nan) for task in tasks) / len(tasks),
    )


_UNIQUE = (
    _score("tau_mean", "mean τ", "validation/tau_mean", digits=3),
    _score("tau_std", "spread of τ", "validation/tau_std", digits=4),
    _score("Spearman", "Spearman(τ, entropy)", "validation/tau_entropy_spearman"),
    _score("noisy τ", "τ of noisy captions against others, %", "noisy_tau"),
    _score("frequency", "Spearman(τ, frequency)", "label_spearman"),
    _perplexity("perplexity", "perplexity", "validation/cross_entropy_tau"),
    _perplexity("perplexity at 1", "perplexity at τ = 1", "validation/cross_entropy"),
    _score("cross-entropy", "cross-entropy, nats", "validation/cross_entropy_tau", digits=4),
    _average(),
    _average("average at one", " at one"),
    _score("LAMBADA", "LAMBADA ppl", "lambada/perplexity"),
    _score("LAMBADA at one", "LAMBADA ppl at τ = 1", "lambada/perplexity at one"),
    _score("WikiText", "WikiText ppl", "wikitext/word_perplexity"),
    _score("WikiText at one", "WikiText ppl at τ = 1", "wikitext/word_perplexity at one"),
    *(_perplexity(f"perplexity {n}/4", f"perplexity after {n}/4", f"cross_entropy_tau@{n}") for n in range(1, 5)),
    *(_score(f"recall {n}/4", f"mean recall after {n}/4, %", f"mean_recall@{n}", 100.0) for n in range(1, 5)),
    *(_average(f"average at {tau}", f" at tempnet:{tau}") for tau in _TAU_MAX),
    *(
        _score(f"{name} at {tau}", f"{title} at {tau}", f"wikitext/{key} at tempnet:{tau}", digits=3)
        for name, title, key in (("bits a byte", "bits a byte", "bits_per_byte"), ("tau", "mean τ", "tau_mean"))
        for tau in _TAU_MAX
    ),
    _score("mean recall", "mean recall, %", "test/mean_recall", 100.0),
    *(_score(name, name, key, 100.0) for name, key in _RETRIEVAL.items()),
    *(_score(name, f"{name} top-1", key, 100.0) for name, key in _CLASSIFICATION.items()),
    _score("accuracy", "mean accuracy, %", "mean_accuracy", 100.0),
    _score("probe", "linear probe, %", "validation/probe_accuracy", 100.0),
    _score("probing", "probing tasks, %", "mean_probing", 100.0),
    _score("millions", "millions", "parameters", 1e-6, is_exact=True),
    _score("parameters", "counted", "parameters", digits=0, is_exact=True),
    _score("formula", "formula", "formula", digits=0, is_exact=True),
    *(_score(name, name, name, digits=3) for name in ("training", "generation")),
    *(
        _score(f"at {at:g}", f"C = {at:g}", f"slope at {at:g}", digits=4, is_exact=True, place=at)
        for at in direct.COSINES
    ),
    *(
        _score(f"{name}_speed", f"{name}, tokens or pairs/s", f"{name}_speed", digits=0)
        for name in ("training", "generation")
    ),
)
MEASURES: dict[str, Measure] = {
    **{measure.name: measure for measure in _UNIQUE},
    "tau_mean of pairs": _score("tau_mean", "mean τ", "validation/tau_mean", digits=4),
    "average of 11": _average(tasks=_ELEVEN_TASKS),
    "accuracy of a cell": _score("accuracy", "accuracy, %", "validation/accuracy", 100.0),
}
"""Name of a measure in `experiments.yaml` → the measure."""

_ALL = {"small": ["mean recall"], "full": [*_RETRIEVAL, *_CLASSIFICATION]}


def _at(value: Any, scale: Scale) -> Any:
    """Returns the value of a scale, of a value that may be the same at both."""
    return value[scale] if isinstance(value, Mapping) and set(value) == set(SCALES) else value


def _arms(entry: Mapping[str, Any], scale: Scale) -> list[Arm]:
    arms = []
    for name, fields in entry["arms"].items():
        changes = {"preset": entry.get("preset", ""), "only": entry.get("only"), **fields}
        changes |= {scale: changes.get(scale, {}) for scale in SCALES}
        of_scale = {one: changes.pop(one) for one in SCALES}[scale]
        preset, only, row = changes.pop("preset"), changes.pop("only"), changes.pop("row", "")
        paper = tuple(changes.pop("paper", ()))
        if only in (None, scale):
            arms.append(Arm(name=name, preset=preset, row=row, paper=paper, changes={**changes, **of_scale}))
    if arms and scale == "small" and "base" in entry:
        changes = dict(entry["base"])
        base = Arm(name=changes.pop("name"), preset=changes.pop("preset"), changes=changes)
        return [base, *(dataclasses.replace(arm, after=base.name) for arm in arms)]
    return arms


def read_claim(claim: str | Mapping[str, Any], arms: Sequence[str], measures: Sequence[str]) -> Iterator[Statement]:
    """Yields the statements of a claim."""
    if not isinstance(claim, str):
        weights = {(arm, name): float(one) for arm, row in claim["sum"].items() for name, one in row.items()}
        yield Statement(text=claim["text"], weights=weights, low=float(claim.get("low", -math.inf)))
        return
    arm = f"({'|'.join(map(re.escape, sorted(arms, key=len, reverse=True)))})"
    head, _, rest = claim.partition(": ")

    def match(pattern: str, text: str = rest) -> re.Match[str] | None:
        return re.fullmatch(pattern.replace("ARM", arm).replace("NUMBER", r"([\d.,]+)"), text)

    if found := match(r"at its temperatures ([<>]) at τ = 1"):
        name, _, own = head.partition(" of ")
        one = next(f"{name} {at}" for at in ("at 1", "at one") if f"{name} {at}" in measures)
        sign = -1.0 if found[1] == "<" else 1.0
        yield Statement(text=claim, weights={(own, name): sign, (own, one): -sign}, low=0.0)
    elif found := match(r"better at τ_max (.+) than at (.+)"):
        sign = -1.0 if head == "bits a byte" else 1.0
        for inside, outside in itertools.product(*(group.split(" | ") for group in found.groups())):
            weights = {(arms[-1], f"{head} at {inside}"): sign, (arms[-1], f"{head} at {outside}"): -sign}
            yield Statement(text=f"{head}: better at τ_max {inside} than at {outside}", weights=weights, low=0.0)
    elif found := match(r"NUMBER parameters"):
        count = int(found[1].replace(",", ""))
        yield Statement(text=claim, weights={(head, "parameters"): 1.0}, low=count - 0.5, high=count + 0.5)
    elif match(r"counted = .+"):
        yield Statement(text=claim, weights={(head, "parameters"): 1.0, (head, "formula"): -1.0}, low=-0.5, high=0.5)
    elif head == "mean over the tasks":
        better, worse = rest.split(" > ")
        ends = {f", {better}": 1.0, f", {worse}": -1.0}
        signs = {name: sign for name in arms for end, sign in ends.items() if name.endswith(end)}
        num_tasks = len(signs) / 2
        yield Statement(
            text=claim, weights={(name, "accuracy"): sign / num_tasks for name, sign in signs.items()}, low=0.0
        )
    elif found := match(r"ARM(?: > ARM){2,}"):
        names = [one[0] for one in re.finditer(arm, rest)]
        for before, after in itertools.pairwise(names):
            yield Statement(text=f"{head}: {after} < {before}", weights=difference(before, after, head), low=0.0)
    elif found := match(r"NUMBER < ARM < NUMBER"):
        yield Statement(text=claim, weights={(found[2], head): 1.0}, low=float(found[1]), high=float(found[3]))
    elif found := match(r"ARM = ARM ± NUMBER"):
        within = float(found[3])
        yield Statement(text=claim, weights=difference(found[1], found[2], head), low=-within, high=within)
    elif found := match(r"ARM ([<>]) (.+?)(?: − NUMBER)?"):
        own, order, margin = found[1], found[2], float(found[4] or 0.0)
        for name, other in itertools.product(head.split(" | "), found[3].split(" | ")):
            text = f"{name}: {own} {order} {other}" + (f" − {margin:g}" if margin else "")
            more, less, low = (own, other, 0.0 - margin) if order == ">" else (other, own, margin)
            yield Statement(text=text, weights=difference(more, less, name), low=low)
    else:
        raise ValueError(f"experiments.yaml: no known form of a claim: {claim!r}")


def _claims(entry: Mapping[str, Any], scale: Scale) -> list[str | Mapping[str, Any]]:
    """Returns the claims of a scale, those about `*` for every measure."""
    claims: list[Any] = _at(entry.get("claims", ()), scale)
    over = _ALL[scale] if "over" in entry else _ALL[scale][: len(_RETRIEVAL)]
    with_star = [claim for claim in claims if "*" in str(claim)]
    read = [yaml.safe_load(yaml.safe_dump(with_star).replace("*", name)) for name in over if with_star]
    return [*itertools.chain(*read), *(claim for claim in claims if claim not in with_star)]


def _make_study(entry: Mapping[str, Any], scale: Scale) -> Study | None:
    arms = _arms(entry, scale)
    if not arms:
        return None
    names = [arm.name for arm in arms]
    measures = tuple(MEASURES[name] for name in _at(entry["measures"], scale))
    of_measures = [measure.name for measure in measures]
    statements = [one for claim in _claims(entry, scale) for one in read_claim(claim, names, of_measures)]
    scored = _at(entry.get("scoring"), scale)
    ((kind, options),) = scored.items() if scored else ((None, {}),)
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    return Study(
        title=entry["title"],
        arms=tuple(arms),
        measures=measures,
        statements=tuple(statements),
        columns=tuple(entry.get("columns", ())[: max(len(arm.paper) for arm in arms)]),
        changes=_at(entry.get("changes", {}), scale),
        scoring=getattr(scoring, kind)(**fields) if kind else None,
        direct=getattr(direct, entry["direct"]) if "direct" in entry else None,
        axis=entry.get("axis", ""),
        notes=(*entry.get("notes", ()), *entry.get("commands", ())),
    )


def _read() -> Iterator[Experiment]:
    content = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    kinds = content.pop("kinds")
    for id, entry in content.items():
        whole = [{**kinds.get(study.get("kind"), {}), **study} for study in entry.pop("studies")]
        studies = {scale: [study for one in whole if (study := _make_study(one, scale))] for scale in SCALES}
        yield Experiment(id=id, studies=studies, **entry)


EXPERIMENTS: dict[str, Experiment] = {experiment.id: experiment for experiment in _read()}
"""Id → experiment, in the order in which the help lists them."""

ALIASES = {
    "T7": "T3",
    "T8": "T3",
    "T9": "T3",
    "F10": "F2",
    "F5-left": "F5",
    **{f"TF-F{number}": "TF-F1" for number in range(2, 6)},
}
"""Id of a table or figure → id of the experiment that it is a part of."""


def find(name: str) -> Experiment:
    """Returns the experiment with an id or alias, in upper or lower case."""
    ids = {id.lower(): id for id in (*EXPERIMENTS, *ALIASES)}
    if name.lower() not in ids:
        near = [ids[key] for key in difflib.get_close_matches(name.lower(), ids, n=3, cutoff=0.4)]
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(EXPERIMENTS)}"
        raise ValueError(f"experiment {name!r} is unknown: {hint}")
    id = ids[name.lower()]
    return EXPERIMENTS[ALIASES.get(id, id)]
