"""The bench: choose the parameters of every decoder on one half of text and prompts, report on the other half.

    1. train     the learned decoders learn from the choosing documents
    2. text      every candidate scores the choosing documents; of each decoder the one with the least smoothed NLL scores
                 the reporting documents
    3. prompts   every candidate continues the choosing prompts; of each decoder the best one continues the reporting prompts

A candidate is best for prompts if most of its texts are different correct answers, where there is a verifier. Without one it
is the candidate whose texts the model itself finds about as probable as real text (Holtzman et al., arXiv 1904.09751, §5:
generated text should have the perplexity of human text); among such texts diversity can be compared. Controls are made of the
learned rule that was chosen, so nothing is chosen for them.

Documents and prompts with an even number choose, the others report.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
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

from jobs.scoring.decoders.learned import ROBUST, control_rules, learned_rules, train_networks
from jobs.scoring.decoders.model import FrozenModel, MeasuredText, SampledText
from jobs.scoring.decoders.quality import PromptFigures, measure_prompts, text_loss
from tempnet.decoders.autodeco import AutoDecoHeads
from tempnet.decoders.measures import LikelihoodSums, score_tokens
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
from tempnet.network import TempNet

ONE, CONSTANT = "τ = 1", "best constant τ"

Families = Mapping[str, Sequence[Rule]]
"""Decoder → its candidates."""
Verifier = Callable[[int, SampledText], tuple[Hashable | None, bool]]
"""(place of the prompt, text) → the text's answer, and whether it is correct."""


def published_rules() -> dict[str, list[Rule]]:
    """Return the decoders that learn nothing, with the parameters that are tried."""
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


@dataclass(frozen=True, slots=True)
class Choice:
    """The rule that was chosen for a decoder."""

    rule: Rule
    score: float
    """What it was chosen by, the less the better."""


@dataclass(slots=True, kw_only=True)
class Comparison:
    """Results of the bench."""

    num_tokens: int
    """Number of tokens of the reporting documents."""
    human_loss: float
    """NLL of the choosing documents at τ = 1, in nats per token."""
    sums: LikelihoodSums
    """Scores on the reporting documents, by decoder."""
    for_text: dict[str, Choice]
    """Decoder → its rule on text."""
    for_prompts: dict[str, Choice] = field(default_factory=dict)
    """Decoder → its rule on prompts."""
    prompts: dict[str, PromptFigures] = field(default_factory=dict)
    """Decoder → figures on the reporting prompts."""
    tried: list[tuple[str, str, PromptFigures]] = field(default_factory=list)
    """Decoder, rule and figures of every candidate on the choosing prompts."""
    has_verifier: bool = False
    """Whether answers were checked."""


def split_text(text: MeasuredText) -> tuple[MeasuredText, MeasuredText]:
    """Return the choosing and the reporting documents.

    Raises:
        ValueError: if there are fewer than two documents in a half, so that no interval can be given.
    """
    num_documents = len(torch.unique(text.documents))
    if num_documents < 4:
        raise ValueError(f"text has {num_documents} documents that can be used, and two halves of 2 are needed")
    return text.part(text.documents % 2 == 0), text.part(text.documents % 2 == 1)


def make_families(
    model: FrozenModel, text: MeasuredText, tempnets: Mapping[str, TempNet], *, num_steps: int, seed: int
) -> dict[str, Sequence[Rule]]:
    """Return all decoders with their candidates; the learned ones are trained on the given text.

    Args:
        model: the frozen model.
        text: the choosing documents.
        tempnets: networks that were trained elsewhere, by name.
        num_steps: number of training steps of each network.
        seed: seed of the training.
    """
    networks: dict[str, TempNet | AutoDecoHeads] = dict(train_networks(model, text, num_steps=num_steps, seed=seed))
    assert ROBUST in networks, "the papers' objective belongs into every comparison"
    learned = {name: learned_rules(name, network) for name, network in [*networks.items(), *tempnets.items()]}
    return {**published_rules(), **learned}


def score_rules(model: FrozenModel, text: MeasuredText, rules: Mapping[str, Rule], *, seed: int) -> LikelihoodSums:
    """Return the scores of rules on every token of documents, by name."""
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
    """Choose the parameters of every decoder on the choosing documents and score them on the reporting ones."""
    choosing, reporting = split_text(text)
    rules = {f"{name}\t{place}": rule for name, family in families.items() for place, rule in enumerate(family)}
    tried = score_rules(model, choosing, rules, seed=seed)
    chosen: dict[str, Choice] = {}
    for name, family in families.items():
        losses = [tried.mean(f"{name}\t{place}", "smoothed").mean for place in range(len(family))]
        best = min(range(len(family)), key=losses.__getitem__)
        chosen[name] = Choice(family[best], losses[best])
    chosen = with_controls(model, choosing, chosen)
    sums = score_rules(model, reporting, {name: choice.rule for name, choice in chosen.items()}, seed=seed)
    return Comparison(
        num_tokens=len(reporting.targets),
        human_loss=tried.loss(f"{ONE}\t0").mean,
        sums=sums,
        for_text=chosen,
    )


def with_controls(model: FrozenModel, text: MeasuredText, chosen: Mapping[str, Choice]) -> dict[str, Choice]:
    """Return the chosen rules, each learned one followed by its two controls."""
    found: dict[str, Choice] = {}
    for name, choice in chosen.items():
        found[name] = choice
        if (controls := control_rules(model, text, choice.rule)) is not None:
            found[f"{name}: MeanShift"] = Choice(controls[0], math.nan)
            found[f"{name}: shuffled"] = Choice(controls[1], math.nan)
    return found


Sample = Callable[[Sequence[Rule], Sequence[int]], list[list[list[SampledText]]]]
"""(rules, places of prompts) → for every rule and prompt, its texts."""


def compare_on_prompts(
    comparison: Comparison,
    families: Families,
    sample: Sample,
    num_prompts: int,
    add_controls: Callable[[Mapping[str, Choice]], dict[str, Choice]],
    *,
    k: int,
    verify: Verifier | None = None,
) -> None:
    """Choose the parameters of every decoder on the choosing prompts, and add the figures on the reporting ones.

    Args:
        comparison: the results so far, to which those on prompts are added.
        families: the decoders.
        sample: samples texts.
        num_prompts: number of prompts.
        add_controls: see :func:`with_controls`.
        k: k of pass@k and maj@k in texts of τ = 1.
        verify: checks answers.

    Raises:
        ValueError: if a half has fewer than two prompts.
    """
    if num_prompts < 4:
        raise ValueError(f"there are {num_prompts} prompts that fit into the context, and two halves of 2 are needed")
    choosing, reporting = range(0, num_prompts, 2), range(1, num_prompts, 2)
    rules = [rule for family in families.values() for rule in family]
    owners = [name for name, family in families.items() for _ in family]
    texts = sample(rules, choosing)
    measure = partial(measure_prompts, k=k, verify=verify)
    reference = text_length(texts[owners.index(ONE)])
    chosen: dict[str, Choice] = {}
    for name, rule, made in zip(owners, rules, texts, strict=True):
        figures = measure(made, choosing, reference_length=reference)
        comparison.tried.append((name, rule.label, figures))
        right = figures.distinct_correct
        score = abs(text_loss(made) - comparison.human_loss) if right is None else -right.mean
        if name not in chosen or score < chosen[name].score:
            chosen[name] = Choice(rule, score)
    comparison.for_prompts = add_controls(chosen)
    found = sample([choice.rule for choice in comparison.for_prompts.values()], reporting)
    by_name = dict(zip(comparison.for_prompts, found, strict=True))
    reference = text_length(by_name[ONE])
    comparison.prompts = {
        name: measure(texts, reporting, reference_length=reference) for name, texts in by_name.items()
    }
    comparison.has_verifier = verify is not None


def text_length(texts: Sequence[Sequence[SampledText]]) -> float:
    """Return the mean number of tokens drawn for a text."""
    lengths = [text.num_drawn for samples in texts for text in samples]
    return sum(lengths) / len(lengths)
