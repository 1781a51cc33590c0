"""The bench: choose the parameters of every decoder on one half of text and prompts, report on the other half.

    1. train     the learned decoders learn from the choosing documents
    2. text      every candidate scores the choosing documents; of each decoder the one with the least smoothed NLL scores
                 the reporting documents
    3. prompts   every candidate continues the choosing prompts; of each decoder the best one continues the reporting prompts

A candidate is best for prompts if most of its texts are different correct answers, where there is a verifier. Without one it
is the candidate whose texts the model itself finds about as probable as real text (Holtzman et al., arXiv 1904.09751, §5:
generated text should have the perplexity of human text); among such texts diversity can be compared. Controls are made of the
learned rule that was chosen, so nothing is chosen for them.

Documents and prompts with an even number choose, the others report. The driver decides what is done next (`run_bench`);
workers only train, score and sample. So the bench runs in the same way with a pool of Ray's workers and in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from transformers import (
    EpsilonLogitsWarper,
    LogitsProcessor,
    MinPLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from jobs.scoring.analyses.config import Decoders
from jobs.scoring.decoders.model import (
    FrozenModel,
    MeasuredText,
    SampledText,
    control_rules,
    learned_rules,
    on_device,
    train_networks,
)
from jobs.scoring.generation.gsm8k import majority_score
from jobs.scoring.units import Finished
from pipelines.local_copy import local_copy
from tempnet.decoders.autodeco import AutoDecoHeads
from tempnet.decoders.measures import (
    LikelihoodSums,
    distinct_correct,
    distinct_n,
    mean_interval,
    pass_at_k,
    samples_at_equal_cost,
    score_tokens,
    self_bleu,
)
from tempnet.decoders.rules import (
    ConstantTemperature,
    EntropyRange,
    EntropyTemperature,
    Mirostat,
    Rule,
    TopNSigma,
    Warped,
    teacher_forced,
)
from tempnet.intervals import Interval
from tempnet.loading import load_tempnet
from tempnet.network import TempNet

ONE, CONSTANT = "τ = 1", "best constant τ"
DISTINCT_ORDER = 2
"""n of the distinct-n that is reported."""

Families = Mapping[str, Sequence[Rule]]
"""Decoder → its candidates."""
Verifier = Callable[[int, SampledText], tuple[Hashable | None, bool]]
"""(place of the prompt, text) → the text's answer, and whether it is correct."""


def published_rules() -> dict[str, list[Rule]]:
    constants = (2, 3, 4, 6, 8, 10, 12, 14, 16, 18, 19, 20, 21, 22, 24, 28, 32)
    taus = (1.0, 1.5, 2.0, 3.0)
    ranges = ((0.5, 0.25), (0.5, 0.5), (1.0, 0.25), (1.0, 0.5), (1.0, 1.0), (1.5, 1.5))
    return {
        ONE: [ConstantTemperature(1.0)],
        CONSTANT: [ConstantTemperature(0.05 * step) for step in constants],
        "EDT": [
            EntropyTemperature(high, theta)
            for high in (0.3, 0.5, 0.8, 1.0, 1.2, 1.5, 2.0, 3.0)
            for theta in (0.1, 0.5, 2.0, 4.0)
        ],
        "dynatemp": [
            EntropyRange(middle - spread, middle + spread, exponent)
            for middle, spread in ranges
            for exponent in (0.5, 1.0, 2.0, 4.0)
        ],
        "min-p": warped("min-p", MinPLogitsWarper, (0.02, 0.05, 0.1, 0.2, 0.3, 0.5), taus),
        "top-p": warped("top-p", TopPLogitsWarper, (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98), (0.7, 1.0, 1.5)),
        "top-k": warped("top-k", TopKLogitsWarper, (2, 5, 10, 20, 50), (0.7, 1.0, 1.5)),
        "typical": warped("typical", TypicalLogitsWarper, (0.2, 0.5, 0.9), (1.0,)),
        "ε": warped("ε", EpsilonLogitsWarper, (0.001, 0.003, 0.01), (1.0,)),
        "top-H": warped("top-H", TopHLogitsWarper, (0.2, 0.4, 0.6), taus),
        "top-nσ": [TopNSigma(number, tau) for tau in taus for number in (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)],
        "mirostat 2": [Mirostat(bits) for bits in (0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 7.0)],
    }


def warped(
    name: str, warper: Callable[[Any], LogitsProcessor], values: Sequence[float], taus: Sequence[float]
) -> list[Rule]:
    """Return the rules of a warper of Transformers, for each of its parameter's values at each temperature."""
    return [Warped(f"{name} {value:.3g}", warper(value), tau) for tau in taus for value in values]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFigures:
    """Figures of the texts of one rule; those that need a verifier are None without one."""

    log_probability: Interval
    """Log-probability of a token under the model at τ = 1, in nats: the higher, the safer the text."""
    distinct: Interval
    self_bleu: Interval
    length: float
    """Mean number of tokens drawn for a text."""
    num_counted: int | None = None
    """Number of texts that cost as much as k texts of τ = 1."""
    correct: Interval | None = None
    distinct_correct: Interval | None = None
    """Number of different correct answers in texts that cost no more than all those of τ = 1, over the latter's number."""
    pass_at_k: Interval | None = None
    maj_at_k: Interval | None = None
    """maj@k at equal tokens: the most frequent answer of a group of texts is correct."""


def measure_prompts(
    texts: Sequence[Sequence[SampledText]],
    places: Sequence[int],
    *,
    k: int,
    reference_length: float,
    verify: Verifier | None,
) -> PromptFigures:
    """Return the figures of a rule: of its texts for prompts at given places, each with the same number of texts.

    `k` of pass@k and maj@k counts texts of τ = 1, whose mean number of tokens is the reference length.
    """
    num_samples, length = len(texts[0]), text_length(texts)
    plain = PromptFigures(
        log_probability=mean_interval([-text_loss([samples]) for samples in texts]),
        distinct=mean_interval([distinct_n([text.tokens for text in samples], DISTINCT_ORDER) for samples in texts]),
        self_bleu=mean_interval([self_bleu([text.tokens for text in samples]) for samples in texts]),
        length=length,
    )
    if verify is None:
        return plain
    checked = [[verify(place, text) for text in samples] for place, samples in zip(places, texts, strict=True)]
    counted = samples_at_equal_cost(k, length, reference_length, num_samples)
    within = samples_at_equal_cost(num_samples, length, reference_length, num_samples)
    right = [[is_right for _, is_right in samples] for samples in checked]
    return replace(
        plain,
        num_counted=counted,
        correct=mean_interval([sum(row) / num_samples for row in right]),
        distinct_correct=mean_interval(
            [distinct_correct(*zip(*samples[:within], strict=True)) / num_samples for samples in checked]
        ),
        pass_at_k=mean_interval([pass_at_k(num_samples, sum(row), counted) for row in right]),
        maj_at_k=mean_interval([majority_score(samples, counted) for samples in checked]),
    )


def text_loss(texts: Sequence[Sequence[SampledText]]) -> float:
    """Return the NLL of a token of all texts under the model at τ = 1, in nats."""
    drawn = [text for samples in texts for text in samples]
    return -sum(text.log_probability for text in drawn) / max(1, sum(text.num_drawn for text in drawn))


def text_length(texts: Sequence[Sequence[SampledText]]) -> float:
    lengths = [text.num_drawn for samples in texts for text in samples]
    return sum(lengths) / len(lengths)


@dataclass(slots=True, kw_only=True)
class Comparison:
    num_tokens: int
    human_loss: float
    """NLL of the choosing documents at τ = 1, in nats per token."""
    sums: LikelihoodSums
    """Scores on the reporting documents, by decoder."""
    for_text: dict[str, Rule]
    for_prompts: dict[str, Rule] = field(default_factory=dict)
    prompts: dict[str, PromptFigures] = field(default_factory=dict)
    tried: list[tuple[str, str, PromptFigures]] = field(default_factory=list)
    """Decoder, rule and figures of every candidate on the choosing prompts."""
    has_verifier: bool = False


def split_text(text: MeasuredText) -> tuple[MeasuredText, MeasuredText]:
    """Return the choosing and the reporting documents."""
    return text.part(text.documents % 2 == 0), text.part(text.documents % 2 == 1)


def score_rules(model: FrozenModel, text: MeasuredText, rules: Mapping[str, Rule], *, seed: int) -> LikelihoodSums:
    sums = LikelihoodSums(int(text.documents.max()) + 1)
    for document in torch.unique(text.documents).tolist():
        hidden, targets, _ = text.part(text.documents == document)
        hidden, targets = hidden.to(model.device), targets.to(model.device)
        logits, places = model.logits(hidden), torch.full((len(targets),), document)
        for name, rule in rules.items():
            # A rule with memory reads a document in order, so documents are scored one at a time.
            log_q = teacher_forced(rule, logits, targets, hidden, seed=seed + document)
            sums.add(name, places, score_tokens(log_q, targets))
    return sums


def compare_on_text(model: FrozenModel, text: MeasuredText, families: Families, *, seed: int) -> Comparison:
    choosing, reporting = split_text(text)
    rules = {f"{name}\t{place}": rule for name, family in families.items() for place, rule in enumerate(family)}
    tried = score_rules(model, choosing, rules, seed=seed)
    chosen: dict[str, Rule] = {}
    for name, family in families.items():
        losses = [tried.mean(f"{name}\t{place}", "smoothed").mean for place in range(len(family))]
        chosen[name] = family[losses.index(min(losses))]
    chosen = with_controls(model, choosing, chosen)
    sums = score_rules(model, reporting, chosen, seed=seed)
    return Comparison(
        num_tokens=len(reporting.targets),
        human_loss=tried.loss(f"{ONE}\t0").mean,
        sums=sums,
        for_text=chosen,
    )


def with_controls(model: FrozenModel, text: MeasuredText, chosen: Mapping[str, Rule]) -> dict[str, Rule]:
    """Return the chosen rules, each learned one followed by its two controls."""
    found: dict[str, Rule] = {}
    for name, rule in chosen.items():
        found[name] = rule
        if (controls := control_rules(model, text, rule)) is not None:
            found[f"{name}: MeanShift"], found[f"{name}: shuffled"] = controls
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """What a worker needs, which has a working directory of its own; documents and prompts are token ids."""

    config: Decoders
    vocab_size: int
    bos_id: int
    documents: tuple[tuple[int, ...], ...]
    prompts: tuple[tuple[int, ...], ...]
    tempnets: Mapping[str, str]
    """Name → directory, URI or hub name of a TempNet that was trained elsewhere."""


@dataclass(frozen=True, slots=True)
class BenchUnit:
    """A method of `BenchWorker` to call, with its arguments."""

    title: str
    method: str
    arguments: tuple[Any, ...] = ()


class BenchWorker:
    def __init__(self, settings: BenchSettings) -> None:
        self._settings = settings
        self._model = FrozenModel(settings.config, vocab_size=settings.vocab_size, bos_id=settings.bos_id)

    @cached_property
    def text(self) -> MeasuredText:
        return self._model.measure(self._settings.documents, self._settings.config.batch_size)

    def __call__(self, unit: BenchUnit) -> Finished:
        return Finished(value=getattr(self, unit.method)(*unit.arguments))

    def compare(self) -> tuple[Families, Comparison]:
        """Train the learned decoders and compare all of them on text."""
        settings, config, model = self._settings, self._settings.config, self._model
        networks: dict[str, TempNet | AutoDecoHeads] = {
            **train_networks(model, split_text(self.text)[0], num_steps=config.num_steps, seed=config.seed),
            **{name: load_tempnet(local_copy(place)) for name, place in settings.tempnets.items()},
        }
        learned = {name: learned_rules(name, network) for name, network in networks.items()}
        families = {**published_rules(), **learned}
        with on_device([rule for family in families.values() for rule in family], model.device):
            return families, compare_on_text(model, self.text, families, seed=config.seed)

    def control(self, chosen: Mapping[str, Rule]) -> dict[str, Rule]:
        """Return the chosen rules with the controls of the learned ones."""
        with on_device(chosen.values(), self._model.device):
            return with_controls(self._model, split_text(self.text)[0], chosen)

    def sample(self, rule: Rule, places: Sequence[int]) -> list[list[SampledText]]:
        """Return the texts that a rule samples for some prompts."""
        config, model = self._settings.config, self._model
        with on_device([rule], model.device):
            return model.sample(
                rule,
                [self._settings.prompts[place] for place in places],
                num_samples=config.num_samples,
                num_tokens=config.max_new_tokens,
                seed=config.seed,
                batch_size=config.batch_size,
            )


def run_bench(
    settings: BenchSettings, run: Callable[[Sequence[BenchUnit]], list[Any]], verify: Verifier | None = None
) -> Comparison:
    """Run the bench from start to end; `run` does units of work and returns their results in order."""
    families: Families
    comparison: Comparison
    families, comparison = run([BenchUnit("text", "compare")])[0]
    choosing, reporting = range(0, len(settings.prompts), 2), range(1, len(settings.prompts), 2)
    measure = partial(measure_prompts, k=settings.config.k, verify=verify)

    def sample(rules: Sequence[Rule], places: Sequence[int]) -> list[list[list[SampledText]]]:
        return run(
            [BenchUnit(f"{number}: {rule.label}", "sample", (rule, places)) for number, rule in enumerate(rules)]
        )

    rules = [rule for family in families.values() for rule in family]
    owners = [name for name, family in families.items() for _ in family]
    texts = sample(rules, choosing)
    reference = text_length(texts[owners.index(ONE)])
    chosen: dict[str, tuple[float, Rule]] = {}
    for name, rule, made in zip(owners, rules, texts, strict=True):
        figures = measure(made, choosing, reference_length=reference)
        comparison.tried.append((name, rule.label, figures))
        right = figures.distinct_correct
        score = abs(text_loss(made) - comparison.human_loss) if right is None else -right.mean
        if name not in chosen or score < chosen[name][0]:
            chosen[name] = score, rule
    rules_by_name = {name: rule for name, (_, rule) in chosen.items()}
    comparison.for_prompts = run([BenchUnit("controls", "control", (rules_by_name,))])[0]
    found = sample(list(comparison.for_prompts.values()), reporting)
    by_name = dict(zip(comparison.for_prompts, found, strict=True))
    reference = text_length(by_name[ONE])
    comparison.prompts = {
        name: measure(texts, reporting, reference_length=reference) for name, texts in by_name.items()
    }
    comparison.has_verifier = verify is not None
    return comparison
