"""Using a TempNet in `generate()`: the logits of every step are divided by the temperature that it predicts for them.

    generate(base, tempnet, input_ids=…, max_new_tokens=…)                checks the settings, takes the faster way

    processor = TemperatureLogitsProcessor(tempnet)                       reads the logits: V·d1 products a token
    with CachedFold.attach(base, tempnet) as fold:                        reads the hidden state: (d + d1)·d products
        base.generate(…, do_sample=True, logits_processor=[fold.processor()])

Both give the same τ. The second also sees the logits as the model made them when processors that ban tokens come first.

Shapes: B sequences (times beams), T tokens, d hidden size, V effective vocabulary, d1 TempNet's first layer.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel

from tempnet.network import TempNet
from tempnet.softmax.fold import FoldCache


class TemperatureLogitsProcessor(LogitsProcessor):
    """Divides the scores of a step by τ, and keeps the τ of every step.

    Only for sampling: a division by a positive number changes no argmax, and `temperature` ≠ 1 would divide a second time
    (`check_generation` says so before a generation starts).

    Args:
        tempnet: the network; `tau_max_eval` applies, as it is put into eval mode.
        temperatures: where τ (B,) of a step comes from; default: the TempNet on the scores.
    """

    def __init__(self, tempnet: TempNet, temperatures: Callable[[Tensor], Tensor] | None = None) -> None:
        self.tempnet = tempnet.eval()
        self.vocab_size = tempnet.config.input_size
        self.steps: list[Tensor] = []
        self._temperatures = temperatures or self.tempnet

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, T) tokens so far, (B, V or more) scores → scores/τ; scores of padding beyond V become −inf."""
        with torch.no_grad():
            tau = self._temperatures(scores[:, : self.vocab_size])
        if not bool(torch.isfinite(tau).all()):
            raise ValueError(
                "a TempNet reads the logits as the model made them, but an earlier logits processor has put −inf into "
                "them: use CachedFold, or place this processor first"
            )
        self.steps.append(tau)
        scores = scores / tau.to(scores.dtype).unsqueeze(-1)
        scores[:, self.vocab_size :] = -math.inf
        return scores

    @property
    def temperatures(self) -> Tensor:
        """(B, number of new tokens): τ of every step so far."""
        return torch.stack(self.steps, dim=-1)


def check_generation(config: GenerationConfig) -> None:
    """Refuse settings of `generate()` under which a TempNet does nothing, or something else than it says.

    Raises:
        ValueError: naming the setting, its value and what to do.
    """
    if not config.do_sample:
        raise ValueError(
            "do_sample = False: greedy decoding takes the largest logit whatever τ is, a TempNet changes nothing. "
            "Set do_sample=True, or leave the TempNet out"
        )
    if config.temperature not in (None, 1.0):
        raise ValueError(
            f"temperature = {config.temperature:g} would divide the logits a second time, after the TempNet. "
            "Set temperature=1.0; to sharpen or soften all temperatures, set tau_max_eval of the TempNet"
        )


def can_fold(base: PreTrainedModel, tempnet: TempNet) -> bool:
    """Whether τ can be had from the hidden state: logits that are W h and nothing else, and a transform to fold into."""
    head, config = base.get_output_embeddings(), base.config
    changes = [getattr(config, name, None) for name in ("final_logit_softcapping", "logit_scale", "logits_scaling")]
    is_linear = getattr(head, "bias", None) is None and all(change in (None, 1.0) for change in changes)
    return is_linear and tempnet.transform is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What :func:`generate` returns."""

    sequences: Tensor
    """(B, T + new): prompts and what was generated, padded."""
    temperatures: Tensor
    """(B, new): the τ that each new token was drawn with; meaningless after the end of a sequence."""


@torch.no_grad()
def generate(base: PreTrainedModel, tempnet: TempNet, *, fold: CachedFold | None = None, **options: Any) -> Generation:
    """`base.generate(**options)` with every token drawn at the temperature that the TempNet predicts.

    Args:
        base: the model.
        tempnet: its network.
        fold: made once by `CachedFold.of(base, tempnet)` for many calls. Default: made in this call where possible.
        options: as of `base.generate`; `do_sample` is on unless turned off. Prompts of a batch are padded on the left.

    Raises:
        ValueError: for greedy decoding, a `temperature` other than 1, and the like (:func:`check_generation`).
    """
    config: GenerationConfig = copy.deepcopy(options.pop("generation_config", None) or base.generation_config)
    rest = config.update(**{"do_sample": True, "temperature": 1.0, **options})
    check_generation(config)
    with contextlib.ExitStack() as stack:
        if fold is None and can_fold(base, tempnet):
            fold = CachedFold.of(base, tempnet)
        if fold is None:
            processor = TemperatureLogitsProcessor(tempnet)
        else:
            processor = stack.enter_context(AttachedFold(fold, base.get_output_embeddings())).processor()
        processors = [*rest.pop("logits_processor", []), processor]
        output = base.generate(generation_config=config, logits_processor=processors, **rest)  # type: ignore[operator]
    sequences = output if isinstance(output, Tensor) else output.sequences
    return Generation(sequences=sequences, temperatures=processor.temperatures)


class CachedFold:
    """τ from the hidden state, with W1·W and WᵀW made once: for a model whose weights no longer change.

    With L = W h: W1 L = (W1 W) h and ‖L‖² = hᵀ(WᵀW)h (method §3). Built in float32 from weights of any dtype.

    Raises:
        ValueError: if the model's logits are not W h (an output bias, a soft-cap), or the TempNet has no transform.
    """

    def __init__(self, weight: Tensor, tempnet: TempNet) -> None:
        """`weight` (V or more, d) is the output weight; rows beyond the effective vocabulary are left out."""
        if tempnet.transform is None:
            raise ValueError("this TempNet has no transform layer, so nothing folds: use TemperatureLogitsProcessor")
        self.tempnet = tempnet.eval()
        folds, weight = FoldCache(), weight[: tempnet.config.input_size]
        self.first = folds.first(tempnet.first_layer.weight, weight)
        self.gram = folds.gram(weight)

    @torch.no_grad()
    def temperatures(self, hidden: Tensor) -> Tensor:
        """(…, d) hidden states before the output weight → (…,) τ."""
        hidden = hidden.float()
        product = hidden @ self.first.T
        if self.tempnet.config.normalize_input:
            square = torch.linalg.vecdot(hidden @ self.gram, hidden).clamp(min=0.0)
            product = product / square.sqrt().clamp(min=1e-12).unsqueeze(-1)
        return self.tempnet.from_first_product(product)

    @classmethod
    def of(cls, base: PreTrainedModel, tempnet: TempNet) -> CachedFold:
        """The fold of a model's output weight."""
        return cls(base.get_output_embeddings().weight, tempnet)

    @classmethod
    def attach(cls, base: PreTrainedModel, tempnet: TempNet) -> AttachedFold:
        """A fold that listens to the model's output layer; a context manager that lets go at its end."""
        head = base.get_output_embeddings()
        if not can_fold(base, tempnet):
            raise ValueError(
                "the logits of this model are not W h (output bias or soft-cap): use TemperatureLogitsProcessor"
            )
        return AttachedFold(cls(head.weight, tempnet), head)


class AttachedFold:
    """A `CachedFold` that remembers the τ of the last position that went through the model's output layer."""

    def __init__(self, fold: CachedFold, head: nn.Module) -> None:
        self.fold = fold
        self.last: Tensor | None = None
        self._handle = head.register_forward_pre_hook(self._listen)

    def _listen(self, head: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.last = self.fold.temperatures(inputs[0][:, -1])

    def processor(self) -> TemperatureLogitsProcessor:
        """For one call of `generate()`."""
        return TemperatureLogitsProcessor(self.fold.tempnet, self._take)

    def _take(self, scores: Tensor) -> Tensor:
        assert self.last is not None, "the logits did not come through the model's output layer"
        return self.last

    def __enter__(self) -> AttachedFold:
        return self

    def __exit__(self, *exception: object) -> None:
        self._handle.remove()
