"""Generation of a batch of texts, with τ and entropy for every token; a row does not depend on the rest of its batch.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    MinPLogitsWarper,
    PreTrainedTokenizerFast,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from jobs.scoring.generation.config import GenerateConfig
from jobs.scoring.generation.processors import (
    EffectiveVocabulary,
    EntropyRecorder,
    RuleTemperature,
    SeededDraw,
    StopStrings,
    TemperatureRule,
)
from jobs.scoring.generation.records import Key
from pipelines.local_copy import local_copy
from tempnet.base_model import load_base
from tempnet.devices import input_device, loading_options, move_base
from tempnet.inference import CachedFold, attach, can_fold, end_ids
from tempnet.loading import check_vocabulary
from tempnet.network import TempNet


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One text to generate."""

    key: Key
    """Identifies the text; together with the job's seed it seeds the draws."""
    prompt: str
    """The prompt's text, as it is stored in the record."""
    ids: list[int]
    """Token ids of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """The result of a request.

    The lists have one entry for every token that was drawn, including the end-of-text token.
    """

    text: str
    """The generated text without special tokens, cut before the stop string that ended it."""
    ids: list[int]
    """Ids of the generated tokens."""
    tau: list[float] | None
    """The temperature that each token was drawn with; None for greedy decoding, which draws nothing."""
    entropy: list[float] | None
    """The entropy of each prediction at τ = 1, in nats; None if it was not recorded."""
    finish_reason: str
    """stop: the model or a stop string ended the text; length: it reached `max_new_tokens`."""


class Sampler:
    """A model on its device, ready to generate batches of texts.

    Of the generation settings that are shipped with the model, only its end-of-text tokens are used (`end_ids`).
    """

    def __init__(
        self,
        config: GenerateConfig,
        tokenizer: PreTrainedTokenizerFast,
        temperature: TempNet | TemperatureRule | float | None,
        stop: Sequence[str] = (),
    ) -> None:
        """Load the model.

        Args:
            config: the configuration of the job.
            tokenizer: the model's tokenizer.
            temperature: a TempNet, a rule, a constant temperature, or None for greedy decoding.
            stop: strings that end a text.

        Raises:
            ValueError: if the device is a CUDA device and there is none, or the model does not fit the TempNet.
        """
        device = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError(f"device = {device}: torch finds no CUDA device here; cpu is one")
        base = load_base(
            local_copy(config.model),
            fetch=local_copy,
            trust_remote_code=config.trust_remote_code,
            device_map=config.device_map,
            **loading_options(config.dtype),
        )
        self.base = move_base(base, device).eval()
        self.config, self.tokenizer, self.stop = config, tokenizer, stop
        self.set_temperature(temperature)
        self.ends = set(end_ids(self.base, tokenizer))
        self.padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.base.generation_config = GenerationConfig(eos_token_id=sorted(self.ends), pad_token_id=self.padding)

    def set_temperature(self, temperature: TempNet | TemperatureRule | float | None) -> None:
        """Use another temperature from now on, or a TempNet whose weights have changed.

        Raises:
            ValueError: if the model does not fit the TempNet.
        """
        self.temperature = temperature
        self.fold: CachedFold | None = None
        if isinstance(temperature, TempNet):
            check_vocabulary(self.base, temperature)
            temperature.to(input_device(self.base))
            if can_fold(self.base, temperature):
                self.fold = CachedFold.of(self.base, temperature)

    @torch.no_grad()
    def __call__(self, requests: Sequence[Request]) -> list[Generated]:
        """Generate the texts of one batch."""
        config = self.config
        width = max(len(request.ids) for request in requests)
        inputs = {"input_ids": [], "attention_mask": []}  # type: dict[str, list[list[int]]]
        for request in requests:
            num_padding = width - len(request.ids)
            inputs["input_ids"].append([self.padding] * num_padding + request.ids)
            inputs["attention_mask"].append([0] * num_padding + [1] * len(request.ids))
        entropy = EntropyRecorder(len(self.tokenizer))
        stop = StopStrings(self.tokenizer, self.stop, len(requests), width) if self.stop else None
        with contextlib.ExitStack() as stack:
            processors: list[LogitsProcessor] = [entropy] if config.entropy else []
            processors.append(EffectiveVocabulary(len(self.tokenizer)))
            tau: list[Tensor] | None = None
            if isinstance(self.temperature, TempNet):
                processor = stack.enter_context(attach(self.base, self.temperature, self.fold)).processor()
                processors.append(processor)
                tau = processor.steps
            elif isinstance(self.temperature, TemperatureRule):
                keys = [_seed(config.seed, request.key) for request in requests]
                rule = RuleTemperature(self.temperature, keys, width)
                processors.append(rule)
                tau = rule.steps
            elif self.temperature is not None:
                processors.append(TemperatureLogitsWarper(self.temperature))
            if self.temperature is not None:
                # These are not options of generate(), because its own warpers run after all the given processors, and
                # the draw must come last.
                processors += [TopKLogitsWarper(config.top_k)] if config.top_k else []
                processors += [TopPLogitsWarper(config.top_p)] if config.top_p < 1.0 else []
                processors += [MinPLogitsWarper(config.min_p)] if config.min_p else []
                processors.append(SeededDraw([_seed(config.seed, request.key) for request in requests]))
            sequences: Tensor = self.base.generate(
                **{name: torch.tensor(rows, device=input_device(self.base)) for name, rows in inputs.items()},
                max_new_tokens=config.max_new_tokens,
                logits_processor=processors,
                stopping_criteria=[stop] if stop else [],
                **({"do_sample": False} if self.temperature is None else {"do_sample": True, "top_k": 0}),
            )
        new = sequences[:, width:].tolist()
        if isinstance(self.temperature, float):
            tau = [torch.full((len(requests),), self.temperature)] * len(new[0])
        taus = _rows(tau) if tau is not None else None
        entropies = _rows(entropy.steps) if config.entropy else None
        return [
            self._finish(
                ids,
                stop.ends[row] if stop else None,
                taus[row] if taus else None,
                entropies[row] if entropies else None,
            )
            for row, ids in enumerate(new)
        ]

    def _finish(
        self, ids: list[int], stopped: int | None, tau: list[float] | None, entropy: list[float] | None
    ) -> Generated:
        """Cut a row after its end; only padding follows."""
        ended = next((number for number, token in enumerate(ids, 1) if token in self.ends), None)
        end = min(number for number in (ended, stopped, len(ids)) if number is not None)
        text = str(self.tokenizer.decode(ids[:end], skip_special_tokens=True))
        return Generated(
            text=text[: min([text.find(string) for string in self.stop if string in text], default=len(text))],
            ids=ids[:end],
            tau=tau[:end] if tau is not None else None,
            entropy=entropy[:end] if entropy is not None else None,
            finish_reason="length" if ended is None and stopped is None else "stop",
        )


def _seed(seed: int, key: Key) -> str:
    return "/".join(map(str, (seed, *key)))


def _rows(steps: Sequence[Tensor]) -> list[list[float]]:
    """Turns a (B,) tensor per step into B lists, with values rounded to six significant digits."""
    return [[float(f"{value:.6g}") for value in row] for row in torch.stack(list(steps), dim=-1).tolist()]
