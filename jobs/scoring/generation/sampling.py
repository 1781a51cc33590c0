"""Generation of a batch of texts, with τ and entropy for every token; a row does not depend on the rest of its batch.

Shapes: B rows, T tokens, V effective vocabulary (the size of the tokenizer's vocabulary).
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    MinPLogitsWarper,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from jobs.scoring.generation.config import GenerateConfig, LocalModel
from jobs.tasks.base import naming_field
from pipelines.local_copy import local_copy
from tempnet.base_model import load_base
from tempnet.devices import input_device, loading_options, move_base
from tempnet.inference import CachedFold, attach, end_ids
from tempnet.loading import check_vocabulary
from tempnet.network import TempNet

Key = tuple[int | str, int, int]
"""(id of the prompt, number of the sample, number of the turn), the numbers counted from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemperatureRule:
    """Temperatures that depend on little, as rivals and bounds of learned ones."""

    kind: Literal["phases", "entropy", "shuffled"]
    """phases: the first value before token number `bound` of a text, then the second. entropy: the first value where the
    entropy at τ = 1 is below `bound` in nats, else the second. shuffled: one of the values at random for every token."""
    values: tuple[float, ...]
    bound: float = 0.0


Temperature = TempNet | TemperatureRule | float | None
"""None: greedy decoding."""


class EffectiveVocabulary(LogitsProcessor):
    """Bans the tokens beyond the tokenizer's vocabulary, which only pad the output layer.

    With `records_entropy`, `entropies` gets the entropy (B,) of softmax(logits) of every step, in nats. It must be the first
    processor, so that it sees the model's own logits.
    """

    def __init__(self, vocab_size: int, *, records_entropy: bool = False) -> None:
        self.vocab_size, self.records_entropy = vocab_size, records_entropy
        self.entropies: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, V or more) logits → a copy with −inf beyond the first V columns."""
        if self.records_entropy:
            log_probs = torch.log_softmax(scores[:, : self.vocab_size].float(), dim=-1)
            self.entropies.append(-(log_probs.exp() * log_probs).sum(-1))
        scores = scores.clone()
        scores[:, self.vocab_size :] = -math.inf
        return scores


class RuleTemperature(LogitsProcessor):
    """Divides the logits by the temperatures of a rule, and records them; every row has a random stream of its own."""

    def __init__(self, rule: TemperatureRule, keys: Sequence[str], width: int) -> None:
        self.rule, self.width = rule, width
        self.steps: list[Tensor] = []
        self._streams = [random.Random(f"tau/{key}") for key in keys]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, V) logits → logits divided by the temperatures (B,) of this step."""
        values = torch.tensor(self.rule.values, dtype=torch.float32, device=scores.device)
        if self.rule.kind == "shuffled":
            tau = values[[stream.randrange(len(values)) for stream in self._streams]]
        elif self.rule.kind == "phases":
            tau = values[int(input_ids.shape[1] - self.width >= self.rule.bound)].expand(len(scores))
        else:
            entropy = torch.special.entr(scores.float().softmax(-1)).sum(-1)
            tau = values[(entropy >= self.rule.bound).long()]
        self.steps.append(tau)
        return scores / tau.unsqueeze(-1)


class SeededDraw(LogitsProcessor):
    """Draws one token per row from that row's own random stream, seeded by its key, and masks all others.

    `generate()` draws all rows of a batch from one global generator, so that a text depends on the other texts in its
    batch. The token drawn here is the only one that `generate()` can still draw, so this must be the last processor.
    Python guarantees that a string gives the same stream in every version.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._streams = [random.Random(key) for key in keys]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, V) scores → 0 for the token drawn, −inf for all others."""
        token = draw(torch.softmax(scores.double(), dim=-1), [stream.random() for stream in self._streams])
        return torch.full_like(scores, -math.inf).scatter_(1, token.unsqueeze(-1), 0.0)


def draw(probabilities: Tensor, numbers: Sequence[float]) -> Tensor:
    """Return one token (B,) per row of probabilities (B, V): the first at which their sum exceeds the row's number."""
    cumulative = probabilities.double().cumsum(-1)
    passed = torch.tensor(numbers, dtype=torch.float64, device=cumulative.device).unsqueeze(-1) * cumulative[:, -1:]
    # right=True: the first token whose cumulative probability exceeds the number, so never one of probability 0.
    return torch.searchsorted(cumulative, passed, right=True).squeeze(-1)


class StopStrings(StoppingCriteria):
    """Ends a row once its new text, after a prompt of `width` tokens, contains one of the stop strings.

    `ends` holds, for every row, the number of new tokens after which that happened, or None if it has not.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, strings: Sequence[str], num_rows: int, width: int) -> None:
        self.tokenizer, self.strings, self.width = tokenizer, strings, width
        self.ends: list[int | None] = [None] * num_rows
        # A stop string that ends in the newest token began at most this many tokens ago.
        self._num_looked_at = max(map(len, strings)) + 1

    def __call__(self, input_ids: Tensor, scores: Tensor | None, **options: object) -> Tensor:
        """(B, T) token ids → (B,) booleans: whether each row is finished."""
        start = max(self.width, input_ids.shape[1] - self._num_looked_at)
        for row, tail in enumerate(self.tokenizer.batch_decode(input_ids[:, start:])):
            if self.ends[row] is None and any(string in tail for string in self.strings):
                self.ends[row] = input_ids.shape[1] - self.width
        return torch.tensor([end is not None for end in self.ends], device=input_ids.device)


def cut(text: str, stop: Sequence[str]) -> str:
    return text[: min([text.find(string) for string in stop if string in text], default=len(text))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """A text; lists have an entry for every token that was drawn, including the end-of-text token."""

    text: str
    ids: list[int]
    tau: list[float] | None
    """The temperature that each token was drawn with; None for greedy decoding, which draws nothing."""
    entropy: list[float] | None
    """The entropy of each prediction at τ = 1, in nats; None if it was not recorded."""
    finish_reason: str
    """stop: the model or a stop string ended the text; length: it reached `max_new_tokens`."""


def load_model(config: LocalModel) -> Any:
    """Load the model of a configuration on its device; `auto` is a GPU if there is one."""
    device = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device = {device}: torch finds no CUDA device here; cpu is one")
    with naming_field("model = "):
        base = load_base(
            local_copy(config.model),
            fetch=local_copy,
            trust_remote_code=config.trust_remote_code,
            device_map=config.device_map,
            **loading_options(config.dtype),
        )
    return move_base(base, device).eval()


class Sampler:
    """A model on its device, ready to generate batches of texts.

    Of the generation settings that are shipped with the model, only its end-of-text tokens are used (`end_ids`).
    """

    def __init__(
        self,
        config: GenerateConfig,
        tokenizer: PreTrainedTokenizerFast,
        temperature: Temperature,
        stop: Sequence[str] = (),
    ) -> None:
        self.base = load_model(config)
        self.config, self.tokenizer, self.stop = config, tokenizer, stop
        self.set_temperature(temperature)
        self.ends = set(end_ids(self.base, tokenizer))
        self.padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.base.generation_config = GenerationConfig(eos_token_id=sorted(self.ends), pad_token_id=self.padding)

    def set_temperature(self, temperature: Temperature) -> None:
        """Use another temperature from now on, or a TempNet whose weights have changed."""
        self.temperature = temperature
        self.fold: CachedFold | None = None
        if isinstance(temperature, TempNet):
            check_vocabulary(self.base, temperature)
            temperature.to(input_device(self.base))
            self.fold = CachedFold.of(self.base, temperature)

    @torch.no_grad()
    def __call__(self, keys: Sequence[Key], prompts: Sequence[Sequence[int]]) -> list[Generated]:
        """Continue prompts, given as tokens; the seed of the configuration and its key fix the random stream of a text."""
        config, device = self.config, input_device(self.base)
        width = max(map(len, prompts))
        ids = [[self.padding] * (width - len(prompt)) + [*prompt] for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        streams = ["/".join(map(str, (config.seed, *key))) for key in keys]
        vocabulary = EffectiveVocabulary(len(self.tokenizer), records_entropy=config.entropy)
        processors: list[Any] = [vocabulary]
        stop = StopStrings(self.tokenizer, self.stop, len(prompts), width) if self.stop else None
        tau: list[Tensor] | None = None
        with contextlib.ExitStack() as stack:
            if isinstance(self.temperature, TempNet):
                processors.append(stack.enter_context(attach(self.base, self.temperature, self.fold)).processor())
                tau = processors[-1].steps
            elif isinstance(self.temperature, TemperatureRule):
                processors.append(RuleTemperature(self.temperature, streams, width))
                tau = processors[-1].steps
            elif self.temperature is not None:
                processors.append(TemperatureLogitsWarper(self.temperature))
            if self.temperature is not None:
                # These are not options of generate(), because its own warpers run after all the given processors, and
                # the draw must come last.
                processors += [TopKLogitsWarper(config.top_k)] if config.top_k else []
                processors += [TopPLogitsWarper(config.top_p)] if config.top_p < 1.0 else []
                processors += [MinPLogitsWarper(config.min_p)] if config.min_p else []
                processors.append(SeededDraw(streams))
            sequences: Tensor = self.base.generate(
                input_ids=torch.tensor(ids, device=device),
                attention_mask=torch.tensor(mask, device=device),
                max_new_tokens=config.max_new_tokens,
                logits_processor=processors,
                stopping_criteria=[stop] if stop else [],
                **({"do_sample": False} if self.temperature is None else {"do_sample": True, "top_k": 0}),
            )
        new = sequences[:, width:].tolist()
        if isinstance(self.temperature, float):
            tau = [torch.full((len(prompts),), self.temperature)] * len(new[0])
        missing: list[Any] = [None] * len(new)
        taus = missing if tau is None else _rows(tau)
        entropies = _rows(vocabulary.entropies) if config.entropy else missing
        ends = stop.ends if stop else missing
        return [self._finish(*row) for row in zip(new, ends, taus, entropies, strict=True)]

    def _finish(
        self, ids: list[int], stopped: int | None, tau: list[float] | None, entropy: list[float] | None
    ) -> Generated:
        """Cut a row after its end; only padding follows."""
        ended = next((number for number, token in enumerate(ids, 1) if token in self.ends), None)
        end = min(number for number in (ended, stopped, len(ids)) if number is not None)
        return Generated(
            text=cut(str(self.tokenizer.decode(ids[:end], skip_special_tokens=True)), self.stop),
            ids=ids[:end],
            tau=tau and tau[:end],
            entropy=entropy and entropy[:end],
            finish_reason="length" if ended is None and stopped is None else "stop",
        )


def _rows(steps: Sequence[Tensor]) -> list[list[float]]:
    """Turn a (B,) tensor per step into B lists, with values rounded to six significant digits."""
    return [[float(f"{value:.6g}") for value in row] for row in torch.stack(list(steps), dim=-1).tolist()]
