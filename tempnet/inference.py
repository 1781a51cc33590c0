"""Using a TempNet in `generate()`: the logits of every step are divided by the temperature that it predicts for them.

    generate(base, tempnet, input_ids=…, max_new_tokens=…)                checks the settings, takes the fastest way

    processor = TemperatureLogitsProcessor(tempnet)                       reads the scores it is given
    with attach(base, tempnet) as attached:                               listens to the model
        base.generate(…, do_sample=True, logits_processor=[attached.processor()])

All give the same τ. What listens sees the logits as the model made them even when processors that ban or penalise tokens
come first, and reads the hidden state (`CachedFold`, (d + d1)·d products a token instead of V·d1) where the logits are W h.

Shapes: B sequences, T tokens, d hidden size, V effective vocabulary, d1 TempNet's first layer.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel
from transformers.generation import GenerationMode

from tempnet.models.output_head import find_output_head
from tempnet.network import TempNet
from tempnet.softmax.fold import FoldCache, folds


class TemperatureLogitsProcessor(LogitsProcessor):
    """Divides the scores of a step by τ, and keeps the τ of every step.

    Only for sampling: a division by a positive number changes no argmax, and `temperature` ≠ 1 would divide a second time
    (`check_generation` says so before a generation starts).

    Args:
        tempnet: the network; `tau_max_eval` applies, as it is put into eval mode.
        temperatures: where τ (B,) of a step comes from; default: the TempNet on the scores, which must then be the
            logits as the model made them.
    """

    def __init__(self, tempnet: TempNet, temperatures: Callable[[], Tensor] | None = None) -> None:
        self.tempnet = tempnet.eval()
        self.vocab_size = tempnet.config.input_size
        self.steps: list[Tensor] = []
        self._temperatures = temperatures

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, T) tokens so far, (B, V or more) scores → scores/τ; scores of padding beyond V become −inf."""
        tau = self._read(scores[:, : self.vocab_size]) if self._temperatures is None else self._temperatures()
        self.steps.append(tau)
        scores = scores / tau.to(scores.dtype).unsqueeze(-1)
        scores[:, self.vocab_size :] = -math.inf
        return scores

    def _read(self, scores: Tensor) -> Tensor:
        if bool(scores.amin().isneginf()):
            raise ValueError(
                "a TempNet reads the logits as the model made them, but an earlier logits processor has put −inf into "
                "them: place this processor first, or use attach(base, tempnet), which listens to the model"
            )
        return self.tempnet(scores)

    @property
    def temperatures(self) -> Tensor:
        """(B, number of new tokens): τ of every step so far."""
        return torch.stack(self.steps, dim=-1)


def check_generation(config: GenerationConfig, assistant_model: PreTrainedModel | None = None) -> None:
    """Refuse settings of `generate()` under which a TempNet does nothing, or something else than it says.

    Raises:
        ValueError: naming the setting, its value and what to do.
    """
    if not config.do_sample:
        raise ValueError(
            f"do_sample = {config.do_sample}: greedy decoding takes the largest logit whatever τ is, a TempNet changes "
            "nothing. Set do_sample=True, or leave the TempNet out"
        )
    if config.temperature not in (None, 1.0):
        raise ValueError(
            f"temperature = {config.temperature:g} would divide the logits a second time, after the TempNet. "
            "Set temperature=1.0; to sharpen or soften all temperatures, set tau_max_eval of the TempNet"
        )
    if (mode := config.get_generation_mode(assistant_model)) != GenerationMode.SAMPLE:
        raise ValueError(
            f"generation mode {mode.value!r}: its scores are not the logits of one step of one sequence, which is what τ is "
            "predicted for. Use plain sampling: one beam, no assistant model, no prompt lookup"
        )
    if config.guidance_scale not in (None, 1.0):
        raise ValueError(
            f"guidance_scale = {config.guidance_scale:g} mixes the logits of two contexts, and a TempNet predicts τ for one. "
            "Set guidance_scale=1.0"
        )


def can_fold(base: PreTrainedModel, tempnet: TempNet) -> bool:
    """Whether τ can be had from the hidden state: logits that are W h and nothing else, and a network that folds into W."""
    head = find_output_head(base) if folds(tempnet) else None
    return head is not None and head.is_product(base)


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
        tempnet: its network, on the device of the model's output weight.
        fold: made once by `CachedFold.of(base, tempnet)` for many calls. Default: made in this call where possible.
        options: as of `base.generate`, but by default tokens are drawn, at temperature 1, and top_k = 50, Transformers' own
            default, is off (a top_k or top_p of the model's generation configuration stays). Prompts of a batch are
            padded on the left.

    Raises:
        ValueError: for greedy decoding, a `temperature` other than 1, and the like (:func:`check_generation`).
    """
    given: GenerationConfig | None = options.pop("generation_config", None)
    config = copy.deepcopy(base.generation_config if given is None else given)
    defaults: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0}
    for name, value in defaults.items():
        # What a model is shipped with for decoding without a TempNet does not bind; what the caller says does.
        overridden = given is None and name != "top_k"
        if overridden or getattr(config, name) is None:
            setattr(config, name, value)
    # As generate() will do; what is checked must be what runs.
    config.update(**base.generation_config.to_dict(), defaults_only=True, allow_custom_entries=True)
    rest = config.update(**options)
    check_generation(config, rest.get("assistant_model"))
    with attach(base, tempnet, fold) as attached:
        processor = attached.processor()
        processors = [*rest.pop("logits_processor", []), processor]
        output = base.generate(generation_config=config, logits_processor=processors, **rest)  # type: ignore[operator]
    sequences = output if isinstance(output, Tensor) else output.sequences
    return Generation(sequences=sequences, temperatures=processor.temperatures)


class CachedFold:
    """τ from the hidden state, with W1·W and WᵀW made once: for a model whose weights no longer change.

    With L = W h: W1 L = (W1 W) h and ‖L‖² = hᵀ(WᵀW)h (method §3), with the rows of W centred for the input shift `mean`.
    Built in float32 from weights of any dtype.

    Raises:
        ValueError: if the TempNet has no transform, or reads L − max L. That the model's logits are W h is the caller's to
            know (`can_fold`).
    """

    def __init__(self, weight: Tensor, tempnet: TempNet) -> None:
        """`weight` (V or more, d) is the output weight; rows beyond the effective vocabulary are left out."""
        if not folds(tempnet):
            raise ValueError(
                "this TempNet has no transform layer, or input_shift = 'max': nothing folds, use TemperatureLogitsProcessor"
            )
        self.tempnet = tempnet.eval()
        cache, weight = FoldCache(), weight[: tempnet.config.input_size]
        centred = tempnet.config.input_shift == "mean"
        first = cache.first(tempnet.first_layer.weight, weight, centred=centred)
        # One below the other: a step is one product.
        normalizes = tempnet.config.normalize_input
        self.weight = torch.cat([first, cache.gram(weight, centred=centred)]) if normalizes else first
        self.num_first = len(first)

    @torch.no_grad()
    def temperatures(self, hidden: Tensor) -> Tensor:
        """(…, d) hidden states before the output weight → (…,) τ."""
        hidden = hidden.float()
        product = hidden @ self.weight.T
        if self.tempnet.config.normalize_input:
            product, gram = product.tensor_split([self.num_first], dim=-1)
            square = torch.linalg.vecdot(gram, hidden).unsqueeze(-1)
            product = product / square.clamp(min=1e-24).sqrt()
        return self.tempnet.from_first_product(product)

    @classmethod
    def of(cls, base: PreTrainedModel, tempnet: TempNet) -> CachedFold:
        """The fold of a model's output weight.

        Raises:
            ValueError: if it does not fold (:func:`can_fold`).
        """
        if not can_fold(base, tempnet):
            raise ValueError(
                "τ cannot be had from the hidden state: the logits of this model are not W h (an output bias, a soft-cap, a "
                "scale), or the TempNet has no transform or input_shift = 'max'. Use TemperatureLogitsProcessor, or "
                "attach(base, tempnet)"
            )
        return cls(base.get_output_embeddings().weight, tempnet)

    @classmethod
    def attach(cls, base: PreTrainedModel, tempnet: TempNet) -> Attached:
        """A fold that listens to the model's output layer; a context manager that lets go at its end."""
        return attach(base, tempnet, cls.of(base, tempnet))


class Attached:
    """A TempNet that listens to a model and remembers the τ of the last position that went through it."""

    def __init__(self, tempnet: TempNet) -> None:
        self.tempnet = tempnet
        self.last: Tensor | None = None
        self.handle: RemovableHandle | None = None

    def processor(self) -> TemperatureLogitsProcessor:
        """For one call of `generate()`."""
        return TemperatureLogitsProcessor(self.tempnet, self._take)

    def _take(self) -> Tensor:
        assert self.last is not None, "nothing went through the model that the TempNet is attached to"
        return self.last

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *exception: object) -> None:
        assert self.handle is not None
        self.handle.remove()


def attach(base: PreTrainedModel, tempnet: TempNet, fold: CachedFold | None = None) -> Attached:
    """The TempNet listening to the model: to its hidden state where τ can be had from it, else to its logits.

    Args:
        base: the model.
        tempnet: its network.
        fold: one that was made before. Default: made here where possible.
    """
    if fold is None and can_fold(base, tempnet):
        fold = CachedFold(base.get_output_embeddings().weight, tempnet)
    attached = Attached(tempnet)

    def hear_hidden(head: nn.Module, inputs: tuple[Any, ...]) -> None:
        assert fold is not None
        attached.last = fold.temperatures(inputs[0][:, -1])

    @torch.no_grad()
    def hear_logits(model: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        attached.last = tempnet(output.logits[:, -1, : tempnet.config.input_size])

    if fold is not None:
        attached.handle = base.get_output_embeddings().register_forward_pre_hook(hear_hidden)
    else:
        tempnet.eval()
        attached.handle = base.register_forward_hook(hear_logits)
    return attached
