"""A batch of prompts → texts, with the τ and the entropy of every token; a row does not depend on its batch.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from jobs.scoring.generation.config import GenerateConfig
from jobs.scoring.generation.processors import EffectiveVocabulary, EntropyRecorder, SeededDraw, StopStrings
from jobs.scoring.generation.records import Key
from tempnet.inference import CachedFold, attach, can_fold
from tempnet.loading import check_vocabulary
from tempnet.network import TempNet
from tempnet.weights import check_weight_files, check_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One text to generate."""

    key: Key
    """It seeds the draws, with the job's seed."""
    prompt: str
    """As the record shows it."""
    ids: list[int]
    """Its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What became of a request; lists have an entry for every token that was drawn, the end-of-text token included."""

    text: str
    """Without special tokens, and cut before the string that ended it."""
    ids: list[int]
    """The tokens."""
    tau: list[float] | None
    """The temperature that each was drawn with; None where nothing was drawn (greedy)."""
    entropy: list[float] | None
    """The entropy of each prediction at τ = 1, in nats; None if it is not recorded."""
    finish_reason: str
    """stop: the model (or a stop string) ended the text; length: `max_new_tokens` did."""


class Sampler:
    """A model on its device, ready for batches.

    Of the generation settings that a model is shipped with only its end-of-text tokens are used.
    """

    def __init__(
        self,
        config: GenerateConfig,
        tokenizer: PreTrainedTokenizerFast,
        temperature: TempNet | float | None,
        stop: Sequence[str] = (),
    ) -> None:
        """`temperature` is a network, one number, or None for the largest logit; `stop` are strings that end a text."""
        device = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError(f"device = {device}: torch finds no CUDA device here; cpu is one")
        check_weight_files(config.model)
        base: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            config.model, dtype=getattr(torch, config.dtype), trust_remote_code=config.trust_remote_code
        )
        check_weights(base, config.model)
        self.base = base.to(device).eval()  # type: ignore[arg-type]
        self.config, self.tokenizer, self.temperature, self.stop = config, tokenizer, temperature, stop
        self.fold: CachedFold | None = None
        if isinstance(temperature, TempNet):
            check_vocabulary(self.base, temperature)
            temperature.to(device)
            if can_fold(self.base, temperature):
                self.fold = CachedFold(self.base.get_output_embeddings().weight, temperature)
        ends = self.base.generation_config.eos_token_id
        ends = tokenizer.eos_token_id if ends is None else ends
        self.ends = set(ends if isinstance(ends, list) else [ends])
        self.padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.base.generation_config = GenerationConfig(eos_token_id=sorted(self.ends), pad_token_id=self.padding)

    @torch.no_grad()
    def __call__(self, requests: Sequence[Request]) -> list[Generated]:
        """The texts of one batch."""
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
            elif self.temperature is not None:
                processors.append(TemperatureLogitsWarper(self.temperature))
            if self.temperature is not None:
                # Before the draw, so not as options of generate(), whose warpers come after all that it is given.
                processors += [TopKLogitsWarper(config.top_k)] if config.top_k else []
                processors += [TopPLogitsWarper(config.top_p)] if config.top_p < 1.0 else []
                processors.append(SeededDraw([_seed(config.seed, request.key) for request in requests]))
            sequences: Tensor = self.base.generate(
                **{name: torch.tensor(rows, device=self.base.device) for name, rows in inputs.items()},
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
        """Cut a row after its end, behind which there is only padding."""
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
    """(B,) a step → B lists, to six digits."""
    return [[float(f"{value:.6g}") for value in row] for row in torch.stack(list(steps), dim=-1).tolist()]
