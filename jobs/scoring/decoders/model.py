"""The frozen model of the bench, what it measures and samples, and the learned decoders, trained on the choosing half.

    TempNet, robust loss    the papers' objective, for the mean entropy of the model's predictions at τ = 1
    TempNet, proper score   the calibrating objective
    AutoDeco                temperature and top-p heads by their published objective (`tempnet.decoders.autodeco`)

Every learned rule has two controls, made from what it predicts on the choosing half: the constant that equals its mean
(MeanShift), and its own predictions in random order.

Shapes: B texts, P tokens of a prompt, N tokens, d hidden size, V effective vocabulary.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import TopPLogitsWarper

from jobs.scoring.analyses.config import Decoders
from jobs.scoring.generation.formats import FORMATS
from jobs.scoring.generation.sampling import StopStrings, draw
from pipelines.local_copy import local_copy
from pipelines.text.tokenization import load_tokenizer
from tempnet.base_model import load_base
from tempnet.decoders.autodeco import AutoDeco, AutoDecoHeads, autodeco_loss
from tempnet.decoders.rules import ConstantTemperature, PredictedTemperature, Rule, Shuffled, Warped, entropy, temper
from tempnet.inference import end_ids
from tempnet.models.output_head import find_output_head
from tempnet.network import TempNet
from tempnet.network_config import TempNetConfig
from tempnet.softmax.config import TemperatureLossConfig
from tempnet.softmax.reference import language_model_loss

ROBUST, PROPER, AUTODECO = "TempNet, robust loss", "TempNet, proper score", "AutoDeco"
SCALES = (0.1, 0.15, 0.25, 0.35, 0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 2.0, 3.0)
"""Levels of learned temperatures to choose from, as factors; the choice of τ_max at inference is such a factor."""
_BATCH_SIZE = 512
_RATE = 3e-3
_NUM_LOGITS_AT_ONCE = 1 << 24


class MeasuredText(NamedTuple):
    """The tokens of documents, document after document."""

    hidden: Tensor
    """Hidden state that each token is predicted from, as TempNets read it: (N, d), float32."""
    targets: Tensor
    documents: Tensor
    """Number of each token's document, ascending: (N,)."""

    def part(self, inside: Tensor) -> MeasuredText:
        return MeasuredText(self.hidden[inside], self.targets[inside], self.documents[inside])


@dataclass(frozen=True, slots=True)
class SampledText:
    tokens: list[int]
    """Its tokens, without an end-of-text token; the last one may hold a string that ends the text."""
    num_drawn: int
    """Number of tokens drawn, with the one that ends it."""
    log_probability: float
    """Σ log softmax(z) of the tokens drawn: how probable the model itself, at τ = 1, finds the text, in nats."""


class FrozenModel:
    def __init__(self, config: Decoders, *, vocab_size: int, bos_id: int) -> None:
        use_gpu = config.workers.use_gpu
        if use_gpu and not torch.cuda.is_available():
            raise ValueError("workers.use_gpu = True: torch finds no CUDA device here")
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[config.precision]
        base = load_base(local_copy(config.model), fetch=local_copy, dtype=dtype).eval()
        self.device = torch.device("cuda" if use_gpu else "cpu")
        self.base: Any = base.to(self.device)
        head = find_output_head(base)
        if head is None:
            raise ValueError(
                f"model = {config.model}: its logits are not computed from the last hidden state in a way that is known, and "
                "learned decoders read that state"
            )
        self._head, self.vocab_size, self._bos_id = head, vocab_size, bos_id
        self._tokenizer, self._stop = load_tokenizer(config.model, needs_eos=False), FORMATS[config.format].stop
        self._ends = set(end_ids(base, self._tokenizer))

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits (…, V) in float32 of hidden states (…, d), as TempNets read them."""
        return self._head.logits(self.base, hidden.to(self.device) / self._head.scale, self.vocab_size).float()

    @torch.no_grad()
    def measure(self, documents: Sequence[Sequence[int]], batch_size: int) -> MeasuredText:
        """Return the tokens of documents, none longer than the context, with the states that they are predicted from."""
        found: list[Tensor] = []
        for start in range(0, len(documents), batch_size):
            batch = documents[start : start + batch_size]
            # Padding is on the right, so that a causal model never attends to it.
            ids = pad_sequence([torch.tensor([self._bos_id, *tokens[:-1]]) for tokens in batch], batch_first=True)
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
    def sample(
        self,
        rule: Rule,
        prompts: Sequence[Sequence[int]],
        *,
        num_samples: int,
        num_tokens: int,
        seed: int,
        batch_size: int,
    ) -> list[list[SampledText]]:
        """Return the texts that a rule samples for every prompt.

        The random numbers of a text are fixed by the seed, the place of its prompt and its own number. They are the same
        for all rules, and a text does not depend on the others of its batch.
        """
        texts: list[list[SampledText]] = [[] for _ in prompts]
        for places in _equal_lengths(prompts, batch_size):
            rows = [(place, number) for place in places for number in range(num_samples)]
            streams = [random.Random(f"{seed}/{place}/{number}") for place, number in rows]
            seeds = [random.Random(f"state/{seed}/{place}").getrandbits(62) for place in places]
            states = [rule.start(num_samples, start) for start in seeds]
            known = [state for state in states if state is not None]
            ids = torch.tensor([list(prompts[place]) for place, _ in rows], device=self.device)
            state = torch.cat(known).to(self.device) if known else None
            made = self._continue(rule, ids, streams, state, num_tokens)
            for (place, _), text in zip(rows, made, strict=True):
                texts[place].append(text)
        return texts

    def _continue(
        self, rule: Rule, ids: Tensor, streams: list[random.Random], state: Tensor | None, num_tokens: int
    ) -> list[SampledText]:
        drawn, scores, cache = list[Tensor](), list[Tensor](), None
        stop = StopStrings(self._tokenizer, self._stop, len(ids), 0) if self._stop else None
        ended = torch.zeros(len(ids), dtype=torch.bool)
        for _ in range(num_tokens):
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
        return SampledText(tokens[: min(end, num_drawn)], num_drawn, scores[:num_drawn].double().sum().item())


def _equal_lengths(prompts: Sequence[Sequence[int]], batch_size: int) -> Iterator[list[int]]:
    """Yield the places of prompts of the same length, in batches: no padding, whose treatment differs between models."""
    by_length: dict[int, list[int]] = {}
    for place, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(place)
    for places in by_length.values():
        for start in range(0, len(places), batch_size):
            yield places[start : start + batch_size]


def train_networks(
    model: FrozenModel, text: MeasuredText, *, num_steps: int, seed: int
) -> dict[str, TempNet | AutoDecoHeads]:
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
    rho = math.log(model.vocab_size) - mean_entropy(model, text)
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


def mean_entropy(model: FrozenModel, text: MeasuredText) -> float:
    """Return the mean entropy of the model's predictions at τ = 1, in nats."""
    total = sum(entropy(temper(model.logits(part), 1.0)).double().sum().item() for part in _parts(model, text.hidden))
    return total / len(text.targets)


def learned_rules(name: str, network: TempNet | AutoDecoHeads) -> list[Rule]:
    """Return the rules to choose from for a network: temperatures at several levels; AutoDeco has no parameter."""
    if isinstance(network, AutoDecoHeads):
        return [AutoDeco(network, name)]
    return [PredictedTemperature(network.eval(), name, scale) for scale in SCALES]


def control_rules(model: FrozenModel, text: MeasuredText, rule: Rule) -> tuple[Rule, Rule] | None:
    """Return the controls of a learned rule, MeanShift and shuffled; None for a rule that is not learned."""
    taus, shares = [], []
    for part in _parts(model, text.hidden):
        if isinstance(rule, AutoDeco):
            tau, share = rule.predict(model.logits(part), part.to(model.device))
            shares.append(share.cpu())
        elif isinstance(rule, PredictedTemperature):
            tau = rule.temperatures(model.logits(part), part.to(model.device))
        else:
            return None
        taus.append(tau.cpu())
    pool, truncated = torch.cat(taus), torch.cat(shares) if shares else None
    mean = pool.mean().item()
    shift: Rule = ConstantTemperature(mean)
    if truncated is not None:
        mean_share = truncated.mean().item()
        shift = Warped(f"top-p {mean_share:.3g}", TopPLogitsWarper(mean_share), mean)
    return shift, Shuffled(pool, rule.label, truncated)


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


def _parts(model: FrozenModel, hidden: Tensor) -> tuple[Tensor, ...]:
    return hidden.split(max(1, _NUM_LOGITS_AT_ONCE // model.vocab_size))
