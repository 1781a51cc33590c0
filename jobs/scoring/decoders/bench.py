"""The bench: choose the parameters of every decoder on one half of text and prompts, report on the other half.

    1. train     the learned decoders learn from the choosing documents
    2. text      every candidate scores the choosing documents; of each decoder the one with the least smoothed NLL scores
                 the reporting documents
    3. prompts   every candidate continues the choosing prompts; of each decoder the best one continues the reporting prompts

A candidate is best for prompts if most of its texts are different correct answers, where there is a verifier. Without one it
is the candidate whose texts the model itself finds about as probable as real text (Holtzman et al., arXiv 1904.09751, §5:
generated text should have the perplexity of human text); among such texts diversity can be compared.

    TempNet, robust loss    the papers' objective, for the mean entropy of the model's predictions at τ = 1
    TempNet, proper score   the calibrating objective
    AutoDeco                temperature and top-p heads by their published objective (`tempnet.decoders.autodeco`)

Every learned rule that is chosen has two controls, made from what it predicts on the choosing half: the constant that equals
its mean (MeanShift), and its own predictions in random order.

Documents and prompts with an even number choose, the others report. The driver decides what is done next (`run_bench`);
workers only train, score and sample. So the bench runs in the same way with a pool of Ray's workers and in one process.

Shapes: B texts, P tokens of a prompt, N tokens, d hidden size, V effective vocabulary.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
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
from jobs.scoring.generation.formats import FORMATS, Prompt
from jobs.scoring.generation.gsm8k import majority_score
from jobs.scoring.generation.sampling import StopStrings, cut, draw
from jobs.scoring.units import Finished
from pipelines.local_copy import local_copy
from pipelines.text.tokenization import document_start_id, load_tokenizer
from tempnet.base_model import load_base
from tempnet.decoders.autodeco import AutoDeco, AutoDecoHeads, autodeco_loss
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
    PredictedTemperature,
    Rule,
    Shuffled,
    TopNSigma,
    Warped,
    entropy,
    teacher_forced,
    temper,
)
from tempnet.devices import loading_options
from tempnet.inference import end_ids
from tempnet.loading import load_tempnet
from tempnet.models.output_head import find_output_head
from tempnet.network import TempNet
from tempnet.network_config import TempNetConfig
from tempnet.softmax.config import TemperatureLossConfig
from tempnet.softmax.reference import language_model_loss

ONE, CONSTANT = "τ = 1", "best constant τ"
ROBUST, PROPER, AUTODECO = "TempNet, robust loss", "TempNet, proper score", "AutoDeco"
SCALES = (0.1, 0.15, 0.25, 0.35, 0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 2.0, 3.0)
"""Levels of learned temperatures to choose from, as factors; the choice of τ_max at inference is such a factor."""
PLAIN = ("log_probability", "distinct", "self_bleu")
CHECKED = ("correct", "distinct_correct", "pass_at_k", "maj_at_k")
"""Figures of the texts for prompts: those of all texts, and those that need a verifier."""
_DISTINCT_ORDER = 2  # n of distinct-n
_BATCH_SIZE, _RATE = 512, 3e-3
_NUM_LOGITS_AT_ONCE = 1 << 24

Candidates = Sequence[tuple[str, Rule]]
"""Decoders with rules to choose from, those of one decoder after one another."""


def published_rules() -> dict[str, list[Rule]]:
    """Return the candidates of every published decoder; the first of all is τ = 1."""
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


class MeasuredText(NamedTuple):
    """The tokens of documents, document after document."""

    hidden: Tensor
    """Hidden state that each token is predicted from, as TempNets read it: (N, d), float32."""
    targets: Tensor
    documents: Tensor
    """Number of each token's document, ascending: (N,)."""

    def part(self, inside: Tensor) -> MeasuredText:
        return MeasuredText(self.hidden[inside], self.targets[inside], self.documents[inside])

    def halves(self) -> tuple[MeasuredText, MeasuredText]:
        """Return the choosing and the reporting documents."""
        return self.part(self.documents % 2 == 0), self.part(self.documents % 2 == 1)


@dataclass(frozen=True, slots=True)
class SampledText:
    text: str
    """Without what ends it."""
    tokens: list[int]
    """Its tokens, without an end-of-text token; the last one may hold a string that ends the text."""
    num_drawn: int
    """Number of tokens drawn, with the one that ends it."""
    log_probability: float
    """Σ log softmax(z) of the tokens drawn: how probable the model itself, at τ = 1, finds the text, in nats."""


class FrozenModel:
    """The model, what it measures and what it samples."""

    def __init__(self, config: Decoders) -> None:
        self.config = config
        base = load_base(local_copy(config.model), fetch=local_copy, **loading_options(config.precision)).eval()
        self.device = torch.device("cuda" if config.workers.use_gpu else "cpu")
        self.base: Any = base.to(self.device)
        head = find_output_head(base)
        if head is None:
            raise ValueError(
                f"model = {config.model}: its logits are not computed from the last hidden state in a way that is known, and "
                "learned decoders read that state"
            )
        self._head, self._tokenizer = head, load_tokenizer(config.model, needs_eos=False)
        self.vocab_size, self._stop = len(self._tokenizer), FORMATS[config.format].stop
        self._ends = set(end_ids(base, self._tokenizer))

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits (…, V) in float32 of hidden states (…, d), as TempNets read them."""
        return self._head.logits(self.base, hidden.to(self.device) / self._head.scale, self.vocab_size).float()

    def logits_in_parts(self, hidden: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield logits (n, V) and hidden states (n, d) of some tokens at a time, so that memory does not grow with N."""
        for part in hidden.split(max(1, _NUM_LOGITS_AT_ONCE // self.vocab_size)):
            yield self.logits(part), part.to(self.device)

    @torch.no_grad()
    def measure(self, documents: Sequence[Sequence[int]]) -> MeasuredText:
        """Return the tokens of documents, none longer than the context, with the states that they are predicted from."""
        found, start_id = list[Tensor](), document_start_id(self._tokenizer)
        for start in range(0, len(documents), self.config.batch_size):
            batch = documents[start : start + self.config.batch_size]
            # Padding is on the right, so that a causal model never attends to it.
            ids = pad_sequence([torch.tensor([start_id, *tokens[:-1]]) for tokens in batch], batch_first=True)
            hidden = self.base.base_model(input_ids=ids.to(self.device), use_cache=False)[0]
            states = self._head.scaled(hidden.float()).cpu()
            found += [state[: len(tokens)] for state, tokens in zip(states, batch, strict=True)]
        lengths = torch.tensor([len(tokens) for tokens in documents])
        return MeasuredText(
            torch.cat(found),
            torch.tensor([token for tokens in documents for token in tokens]),
            torch.repeat_interleave(torch.arange(len(documents)), lengths),
        )

    @torch.no_grad()
    def sample(self, rule: Rule, prompts: Sequence[Sequence[int]]) -> list[list[SampledText]]:
        """Return the texts that a rule samples for every prompt.

        The random numbers of a text are fixed by the seed, the place of its prompt and its own number. They are the same
        for all rules, and a text does not depend on the others of its batch.
        """
        seed, numbers = self.config.seed, range(self.config.num_samples)
        texts: list[list[SampledText]] = [[] for _ in prompts]
        for places in _equal_lengths(prompts, self.config.batch_size):
            rows = [(place, number) for place in places for number in numbers]
            streams = [random.Random(f"{seed}/{place}/{number}") for place, number in rows]
            seeds = [random.Random(f"state/{seed}/{place}").getrandbits(62) for place in places]
            states = [state for start in seeds if (state := rule.start(len(numbers), start)) is not None]
            ids = torch.tensor([list(prompts[place]) for place, _ in rows], device=self.device)
            made = self._continue(rule, ids, streams, torch.cat(states).to(self.device) if states else None)
            for (place, _), text in zip(rows, made, strict=True):
                texts[place].append(text)
        return texts

    def _continue(
        self, rule: Rule, ids: Tensor, streams: list[random.Random], state: Tensor | None
    ) -> list[SampledText]:
        drawn, scores, cache = list[Tensor](), list[Tensor](), None
        stop = StopStrings(self._tokenizer, self._stop, len(ids), 0) if self._stop else None
        ended = torch.zeros(len(ids), dtype=torch.bool)
        for _ in range(self.config.max_new_tokens):
            output = self.base.base_model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache, hidden = output.past_key_values, self._head.scaled(output[0][:, -1].float())
            logits = self.logits(hidden)
            log_q = rule.log_probabilities(logits, hidden, state)
            tokens = draw(log_q.double().exp(), [stream.random() for stream in streams])
            scores.append(temper(logits, 1.0).gather(-1, tokens.unsqueeze(-1)).squeeze(-1).cpu())
            drawn.append(tokens.cpu())
            state = rule.advance(state, log_q, tokens)
            ids = tokens.unsqueeze(-1)
            ended |= torch.tensor([token in self._ends for token in drawn[-1].tolist()])
            if stop is not None:
                ended |= stop(torch.stack(drawn, dim=-1), None)
            if bool(ended.all()):
                break
        stopped: Sequence[int | None] = [None] * len(ids) if stop is None else stop.ends
        rows = zip(torch.stack(drawn, dim=-1).tolist(), torch.stack(scores, dim=-1), stopped, strict=True)
        return [self._finish(*row) for row in rows]

    def _finish(self, tokens: list[int], scores: Tensor, stopped: int | None) -> SampledText:
        end = next((place for place, token in enumerate(tokens) if token in self._ends), len(tokens))
        num_drawn = min(end + 1, stopped or len(tokens))
        tokens, score = tokens[: min(end, num_drawn)], scores[:num_drawn].double().sum().item()
        text = cut(str(self._tokenizer.decode(tokens, skip_special_tokens=True)), self._stop)
        return SampledText(text, tokens, num_drawn, score)


def _equal_lengths(prompts: Sequence[Sequence[int]], batch_size: int) -> Iterator[list[int]]:
    """Yield the places of prompts of the same length, in batches: no padding, whose treatment differs between models."""
    by_length: dict[int, list[int]] = {}
    for place, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(place)
    for places in by_length.values():
        for start in range(0, len(places), batch_size):
            yield places[start : start + batch_size]


def train_networks(model: FrozenModel, text: MeasuredText) -> dict[str, TempNet | AutoDecoHeads]:
    num_steps, seed = model.config.num_steps, model.config.seed

    def train(network: nn.Module, loss_of: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        """Minimise a loss of logits, hidden states and targets with AdamW, whose rate falls to 0 linearly."""
        generator = torch.Generator().manual_seed(seed)
        optimizer = torch.optim.AdamW(network.parameters(), lr=_RATE, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1 - number / num_steps)
        network.train()
        for _ in range(num_steps):
            rows = torch.randint(len(text.targets), (_BATCH_SIZE,), generator=generator)
            hidden, targets = text.hidden[rows].to(model.device), text.targets[rows].to(model.device)
            loss = loss_of(model.logits(hidden), hidden, targets)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()

    made: dict[str, TempNet | AutoDecoHeads] = {}
    entropies = (entropy(temper(logits, 1.0)).double().sum().item() for logits, _ in model.logits_in_parts(text.hidden))
    rho = math.log(model.vocab_size) - sum(entropies) / len(text.targets)
    for name, kind in ((ROBUST, "dro"), (PROPER, "proper")):
        torch.manual_seed(seed)
        config = TempNetConfig.for_logits(model.vocab_size, input_shift="mean", rho=rho if kind == "dro" else 0.0)
        network, settings = TempNet(config).to(model.device), TemperatureLossConfig(name=kind, rho=rho)
        train(network, lambda logits, _, targets: language_model_loss(logits, targets, settings, network)[0])  # noqa: B023
        made[name] = network
    torch.manual_seed(seed)
    heads = AutoDecoHeads(text.hidden.shape[-1]).to(model.device)
    generator = torch.Generator().manual_seed(seed)
    train(heads, lambda logits, hidden, targets: autodeco_loss(heads, logits, hidden, targets, generator=generator))
    made[AUTODECO] = heads
    return {name: network.eval().requires_grad_(False).cpu() for name, network in made.items()}


def learned_rules(name: str, network: TempNet | AutoDecoHeads) -> list[Rule]:
    """Return the rules to choose from for a network: temperatures at several levels; AutoDeco has no parameter."""
    if isinstance(network, AutoDecoHeads):
        return [AutoDeco(network, name)]
    return [PredictedTemperature(network.eval(), name, scale) for scale in SCALES]


def with_controls(model: FrozenModel, text: MeasuredText, chosen: Mapping[str, Rule]) -> dict[str, Rule]:
    """Return the chosen rules, each learned one followed by its two controls."""
    found: dict[str, Rule] = {}
    for name, rule in chosen.items():
        found[name] = rule
        if isinstance(rule, AutoDeco):
            predicted = [rule.predict(*part) for part in model.logits_in_parts(text.hidden)]
            pool, shares = (torch.cat(values).cpu() for values in zip(*predicted, strict=True))
            share = shares.mean().item()
            found[f"{name}: MeanShift"] = Warped(f"top-p {share:.3g}", TopPLogitsWarper(share), pool.mean().item())
            found[f"{name}: shuffled"] = Shuffled(pool, rule.label, shares)
        elif isinstance(rule, PredictedTemperature):
            pool = torch.cat([rule.temperatures(*part).cpu() for part in model.logits_in_parts(text.hidden)])
            found[f"{name}: MeanShift"] = ConstantTemperature(pool.mean().item())
            found[f"{name}: shuffled"] = Shuffled(pool, rule.label)
    return found


@contextmanager
def on_device(rules: Collection[Rule], device: torch.device) -> Iterator[None]:
    """Have the networks of learned rules on a device within the block, and on the CPU after it."""
    networks: list[nn.Module] = [rule.network for rule in rules if isinstance(rule, PredictedTemperature)]
    networks += [rule.heads for rule in rules if isinstance(rule, AutoDeco)]
    for network in networks:
        network.to(device)
    yield
    for network in networks:
        network.cpu()


def score_rules(model: FrozenModel, text: MeasuredText, rules: Mapping[str, Rule]) -> LikelihoodSums:
    sums = LikelihoodSums(int(text.documents.max()) + 1)
    for document in torch.unique(text.documents).tolist():
        hidden, targets, _ = text.part(text.documents == document)
        hidden, targets = hidden.to(model.device), targets.to(model.device)
        logits, places = model.logits(hidden), torch.full((len(targets),), document)
        for name, rule in rules.items():
            # A rule with memory reads a document in order, so documents are scored one at a time.
            log_q = teacher_forced(rule, logits, targets, hidden, seed=model.config.seed + document)
            sums.add(name, places, score_tokens(log_q, targets))
    return sums


@dataclass(frozen=True, slots=True)
class Comparison:
    values: dict[str, Any]
    """What results.json holds: losses and gains in nats per token, shares as numbers from 0 to 1. Every figure is a pair of
    mean and half-width of its 95 % interval; NaN and infinity are None. `human_loss` is the NLL of the choosing documents at
    τ = 1."""
    for_text: dict[str, Rule]
    for_prompts: dict[str, Rule] = field(default_factory=dict)


def best_rules(candidates: Candidates, scores: Sequence[float]) -> dict[str, Rule]:
    """Return the rule of each decoder with the least score; of equally good ones the first."""
    best: dict[str, tuple[float, Rule]] = {}
    for (name, rule), score in zip(candidates, scores, strict=True):
        if name not in best or score < best[name][0]:
            best[name] = score, rule
    return {name: rule for name, (_, rule) in best.items()}


def compare_on_text(model: FrozenModel, text: MeasuredText, candidates: Candidates) -> Comparison:
    choosing, reporting = text.halves()
    tried = score_rules(model, choosing, {str(place): rule for place, (_, rule) in enumerate(candidates)})
    losses = [tried.mean(str(place), "smoothed").mean for place in range(len(candidates))]
    chosen = with_controls(model, choosing, best_rules(candidates, losses))
    sums = score_rules(model, reporting, chosen)
    decoders: dict[str, Any] = {}
    for name, rule in chosen.items():
        intervals = {
            "loss": sums.loss(name),
            "gain": sums.gain(name, CONSTANT),
            "brier": sums.mean(name, "brier"),
            "ece": sums.calibration_error(name),
            "excluded": sums.mean(name, "excluded"),
        }
        if f"{name}: MeanShift" in chosen:
            intervals["gain_over_mean_shift"] = sums.gain(name, f"{name}: MeanShift")
        figures = {measure: interval.as_json() for measure, interval in intervals.items()}
        decoders[name] = {"text": {"rule": rule.label, **figures}}
    human_loss = tried.loss("0").mean
    return Comparison({"num_tokens": len(reporting.targets), "human_loss": human_loss, "decoders": decoders}, chosen)


def measure_prompts(
    texts: Sequence[Sequence[SampledText]],
    prompts: Sequence[Prompt],
    *,
    k: int,
    reference_length: float,
    grade: Callable[[Prompt, str], Mapping[str, Any]] | None,
) -> dict[str, Any]:
    """Return the figures of a rule, from its texts for prompts, each with the same number of texts.

    `grade` is the verifier: that of a format of prompts, or None; without it the last five figures are None. `k` of pass@k
    and maj@k counts texts of τ = 1, whose mean number of tokens is the reference length. Intervals are over prompts.

        log_probability       of a token under the model at τ = 1, in nats: the higher, the safer the text
        distinct, self_bleu   diversity (`tempnet.decoders.measures`)
        length                mean number of tokens drawn for a text
        num_counted           number of texts that cost as much as k texts of τ = 1
        correct               share of correct texts
        distinct_correct      different correct answers in texts that cost no more than all those of τ = 1, over their number
        pass_at_k, maj_at_k   at equal tokens: a text, or the most frequent answer, of a group of texts is correct
    """
    num_samples, length = len(texts[0]), text_length(texts)
    values = {
        "log_probability": [-text_loss([samples]) for samples in texts],
        "distinct": [distinct_n([text.tokens for text in samples], _DISTINCT_ORDER) for samples in texts],
        "self_bleu": [self_bleu([text.tokens for text in samples]) for samples in texts],
    }
    others: dict[str, Any] = {"length": length, "num_counted": None, **dict.fromkeys(CHECKED)}
    if grade is not None:
        grades = [[grade(prompt, text.text) for text in made] for prompt, made in zip(prompts, texts, strict=True)]
        checked = [[(one["answer"], one["is_correct"]) for one in made] for made in grades]
        counted = samples_at_equal_cost(k, length, reference_length, num_samples)
        within = samples_at_equal_cost(num_samples, length, reference_length, num_samples)
        right = [sum(is_right for _, is_right in samples) for samples in checked]
        others["num_counted"] = counted
        values |= {
            "correct": [number / num_samples for number in right],
            "distinct_correct": [
                distinct_correct(*zip(*samples[:within], strict=True)) / num_samples for samples in checked
            ],
            "pass_at_k": [pass_at_k(num_samples, number, counted) for number in right],
            "maj_at_k": [majority_score(samples, counted) for samples in checked],
        }
    return others | {name: mean_interval(found).as_json() for name, found in values.items()}


def text_loss(texts: Sequence[Sequence[SampledText]]) -> float:
    """Return the NLL of a token of all texts under the model at τ = 1, in nats."""
    drawn = [text for samples in texts for text in samples]
    return -sum(text.log_probability for text in drawn) / max(1, sum(text.num_drawn for text in drawn))


def text_length(texts: Sequence[Sequence[SampledText]]) -> float:
    lengths = [text.num_drawn for samples in texts for text in samples]
    return sum(lengths) / len(lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """What a worker needs, which has a working directory of its own; documents and prompts are token ids."""

    config: Decoders
    documents: tuple[tuple[int, ...], ...]
    prompts: tuple[tuple[int, ...], ...]
    asked: tuple[Prompt, ...]
    """The same prompts, with what they are graded by."""
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
        self._settings, self._model = settings, FrozenModel(settings.config)

    @cached_property
    def text(self) -> MeasuredText:
        return self._model.measure(self._settings.documents)

    def __call__(self, unit: BenchUnit) -> Finished:
        return Finished(value=getattr(self, unit.method)(*unit.arguments))

    def compare(self) -> tuple[Candidates, Comparison]:
        """Train the learned decoders and compare all of them on text."""
        networks: dict[str, TempNet | AutoDecoHeads] = {
            **train_networks(self._model, self.text.halves()[0]),
            **{name: load_tempnet(local_copy(place)) for name, place in self._settings.tempnets.items()},
        }
        families = published_rules() | {name: learned_rules(name, network) for name, network in networks.items()}
        candidates = [(name, rule) for name, family in families.items() for rule in family]
        with on_device([rule for _, rule in candidates], self._model.device):
            return candidates, compare_on_text(self._model, self.text, candidates)

    def control(self, chosen: Mapping[str, Rule]) -> dict[str, Rule]:
        """Return the chosen rules with the controls of the learned ones."""
        with on_device(chosen.values(), self._model.device):
            return with_controls(self._model, self.text.halves()[0], chosen)

    def sample(self, rule: Rule, places: Sequence[int]) -> list[list[SampledText]]:
        """Return the texts that a rule samples for some prompts."""
        with on_device([rule], self._model.device):
            return self._model.sample(rule, [self._settings.prompts[place] for place in places])


def run_bench(settings: BenchSettings, run: Callable[[Sequence[BenchUnit]], list[Any]]) -> Comparison:
    """Run the bench from start to end; `run` does units of work and returns their results in order."""
    candidates: Candidates
    comparison: Comparison
    candidates, comparison = run([BenchUnit("text", "compare")])[0]
    choosing, reporting = range(0, len(settings.prompts), 2), range(1, len(settings.prompts), 2)
    grade = FORMATS[settings.config.format].grade if settings.config.format == "gsm8k" else None
    measure = partial(measure_prompts, k=settings.config.k, grade=grade)

    def sample(rules: Sequence[Rule], places: Sequence[int]) -> list[list[list[SampledText]]]:
        return run(
            [BenchUnit(f"{number}: {rule.label}", "sample", (rule, places)) for number, rule in enumerate(rules)]
        )

    texts = sample([rule for _, rule in candidates], choosing)
    reference = text_length(texts[0])
    values, scores = comparison.values | {"has_verifier": grade is not None, "k": settings.config.k, "tried": []}, []
    for (name, rule), made in zip(candidates, texts, strict=True):
        figures = measure(made, settings.asked[::2], reference_length=reference)
        values["tried"].append({"decoder": name, "rule": rule.label, **figures})
        right = figures["distinct_correct"]
        scores.append(abs(text_loss(made) - values["human_loss"]) if right is None else -right["mean"])
    best = best_rules(candidates, scores)
    best = run([BenchUnit("controls", "control", (best,))])[0]
    found = dict(zip(best, sample(list(best.values()), reporting), strict=True))
    reference = text_length(found[ONE])
    for name, texts in found.items():
        figures = measure(texts, settings.asked[1::2], reference_length=reference)
        values["decoders"][name]["prompts"] = {"rule": best[name].label, **figures}
    return Comparison(values, comparison.for_text, best)
