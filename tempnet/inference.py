"""Use a TempNet in `generate()`: the logits of every step are divided by the temperature that it predicts for them.

There are three ways:

    generate(base, tempnet, input_ids=…, max_new_tokens=…)                checks the settings, uses the fastest way

    processor = TemperatureLogitsProcessor(tempnet)                       reads the scores that it receives
    with attach(base, tempnet) as attached:                               reads the model's own outputs with a hook,
        base.generate(…, do_sample=True, logits_processor=[attached.processor()])       and checks the settings

All three give the same τ. A hook sees the original logits of the model, even if other processors that ban or penalise
tokens run before. If the logits are W h with h the hidden state, the hook reads h instead of the logits
(`CachedFold`), which costs (d + d1)·d products per token instead of V·d1.

Shapes: B sequences, T tokens, d hidden size, V effective vocabulary, d1 width of TempNet's first layer.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel

from tempnet.devices import run_device
from tempnet.generation_checks import check_call, check_generation, check_prompts
from tempnet.models.output_head import find_output_head, output_weight
from tempnet.network import TempNet
from tempnet.softmax.fold import FoldCache, can_fold_network

# Rows whose probabilities add up to 1 within this share are taken for log-probabilities: those of logits that a model
# makes never do for a whole batch.
_LOG_PROBABILITIES = 1e-4


class TemperatureLogitsProcessor(LogitsProcessor):
    """Logits processor that divides the scores of each step by τ, and records the τ of every step.

    It is useful only for sampling, since a division by a positive number does not change the argmax. `temperature`
    must be 1, or the scores would be divided a second time. A processor by itself does not learn the settings of
    the generation that it is part of; :func:`generate` and :func:`attach` check them before a generation starts. What
    it can tell from the scores, it refuses: logits that were masked, and log-probabilities, which beam search passes.

    Args:
        tempnet: the temperature network. It is put into eval mode, so that `tau_max_eval` applies.
        temperatures: function that returns τ (B,) of the current step. By default the TempNet reads the scores, which
            must then be the original logits of the model.
        predict: function that returns τ (B,) of scores (B, V), in the place of the TempNet. One that reads hidden states is
            served by `tempnet.serving.hidden_from_logits.HiddenFromLogits(tempnet, base).temperatures`.
    """

    def __init__(
        self,
        tempnet: TempNet,
        temperatures: Callable[[], Tensor] | None = None,
        *,
        predict: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.tempnet = tempnet.eval()
        self._predict = predict or self.tempnet
        self.vocab_size = tempnet.config.input_size
        self.steps: list[Tensor] = []
        self._temperatures = temperatures

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores/τ, with −inf for padding beyond V.

        Args:
            input_ids: (B, T) tokens so far.
            scores: (B, V or more) scores of the next token.
        """
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
        if not self.steps and bool(scores.float().logsumexp(-1).abs().amax() < _LOG_PROBABILITIES):
            raise ValueError(
                "the scores are log-probabilities, as beam search passes them, and not the logits that τ is predicted for. "
                "Use plain sampling: do_sample=True, one beam"
            )
        return self._predict(scores)

    @property
    def temperatures(self) -> Tensor:
        """Temperatures of all steps so far: (B, number of new tokens)."""
        return torch.stack(self.steps, dim=-1)


def can_fold(base: PreTrainedModel, tempnet: TempNet) -> bool:
    """Return whether τ can be computed from the hidden state: the logits must be exactly W h and the network must fold.

    See `tempnet.softmax.fold` for the conditions on the network.
    """
    head = find_output_head(base) if can_fold_network(tempnet) else None
    return head is not None and head.is_product(base)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Result of :func:`generate`."""

    sequences: Tensor
    """Prompts and generated tokens, padded: (B, T + new)."""
    temperatures: Tensor
    """The τ at which each new token was sampled: (B, new); values after the end of a sequence have no meaning."""


@torch.no_grad()
def generate(base: PreTrainedModel, tempnet: TempNet, *, fold: CachedFold | None = None, **options: Any) -> Generation:
    """Run `base.generate(**options)` and sample every token at the temperature that the TempNet predicts.

    Args:
        base: the base model, which may be spread over devices.
        tempnet: its temperature network, on the device that tokens are given on.
        fold: result of `CachedFold.of(base, tempnet)`, which can be reused for many calls. By default it is computed
            in this call if possible.
        options: options of `base.generate`. The defaults differ: tokens are sampled, the temperature is 1, and
            Transformers' default top_k = 50 is disabled (but a top_k or top_p in the model's generation configuration
            applies). Prompts of a batch must be padded on the left.

    Raises:
        ValueError: if the settings are unsuitable, such as greedy decoding or a `temperature` other than 1
            (see :func:`check_generation`), or a prompt is empty or too long (:func:`check_prompts`).
    """
    given: GenerationConfig | None = options.pop("generation_config", None)
    config = copy.deepcopy(base.generation_config if given is None else given)
    defaults: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0}
    for name, value in defaults.items():
        # Sampling settings that the model is shipped with are meant for decoding without a TempNet, so they are
        # overridden. Settings that the caller gives are kept.
        overridden = given is None and name != "top_k"
        if overridden or getattr(config, name) is None:
            setattr(config, name, value)
    # generate() will apply the same defaults; they are applied here so that the settings that are checked are those
    # used.
    config.update(**base.generation_config.to_dict(), defaults_only=True, allow_custom_entries=True)
    rest = config.update(**options)
    check_generation(config, rest.get("assistant_model"))
    check_prompts(base, rest.get("input_ids"), rest.get("attention_mask"), config.max_new_tokens)
    with attach(base, tempnet, fold) as attached:
        processor = attached.processor()
        processors = [*rest.pop("logits_processor", []), processor]
        output = base.generate(generation_config=config, logits_processor=processors, **rest)  # type: ignore[operator]
    sequences = output if isinstance(output, Tensor) else output.sequences
    return Generation(sequences=sequences, temperatures=processor.temperatures)


class CachedFold:
    """Computes τ from the hidden state with W1·W and WᵀW, which are built once; the weights must not change afterwards.

    With L = W h: W1 L = (W1 W) h and ‖L‖² = hᵀ(WᵀW)h (see `tempnet.softmax.fold`); for the input shift `mean`, the
    mean row of W is subtracted first. The matrices are built in float32 from weights of any dtype. The caller must
    make sure that the model's logits are W h (`can_fold`).

    Raises:
        ValueError: if the TempNet has no transform, or reads L − max L.
    """

    def __init__(self, weight: Tensor, tempnet: TempNet) -> None:
        """Build the matrices.

        Args:
            weight: output weight (V or more, d); rows beyond the effective vocabulary are ignored.
            tempnet: the temperature network, which is put into eval mode.
        """
        if not can_fold_network(tempnet):
            raise ValueError(
                "this TempNet has no transform layer, or input_shift = 'max': it cannot be folded; use "
                "TemperatureLogitsProcessor"
            )
        self.tempnet = tempnet.eval()
        self.num_first = tempnet.config.hidden_size
        if not tempnet.config.reads_logits:
            return
        # The output layer of a model that is spread over devices may be on another one than its TempNet.
        cache, weight = FoldCache(), weight[: tempnet.config.input_size].to(run_device(tempnet))
        if centred := tempnet.config.input_shift == "mean":
            weight = cache.centre(weight, torch.float32)
        first = cache.first(tempnet.first_layer.weight, weight, centred=centred)
        # The two matrices are concatenated, so that each step needs only one matrix product.
        normalizes = tempnet.config.normalize_input
        self.weight = torch.cat([first, cache.gram(weight, centred=centred)]) if normalizes else first

    @torch.no_grad()
    def temperatures(self, hidden: Tensor) -> Tensor:
        """Return τ (…,) of hidden states (…, d), which are the inputs of the output layer."""
        hidden, config = hidden.to(run_device(self.tempnet), torch.float32), self.tempnet.config
        state = self.tempnet.state_product(self.tempnet.normalize_state(hidden)) if config.reads_state else None
        if not config.reads_logits:
            assert state is not None
            return self.tempnet.from_first_product(state)
        product = hidden @ self.weight.T
        if config.normalize_input:
            product, gram = product.tensor_split([self.num_first], dim=-1)
            square = torch.linalg.vecdot(gram, hidden).unsqueeze(-1)
            product = product / square.clamp(min=1e-24).sqrt()
        return self.tempnet.from_first_product(product if state is None else product + state)

    @classmethod
    def of(cls, base: PreTrainedModel, tempnet: TempNet) -> CachedFold:
        """Build the fold of a model's output weight.

        Raises:
            ValueError: if τ cannot be computed from the hidden state (see :func:`can_fold`).
        """
        if not can_fold(base, tempnet):
            raise ValueError(
                "τ cannot be computed from the hidden state: the logits of this model are not W h (an output bias, a "
                "soft-cap, a scale), or the TempNet has no transform or input_shift = 'max'. Use TemperatureLogitsProcessor, "
                "or attach(base, tempnet)"
            )
        return cls(output_weight(base)[0], tempnet)


class Attached:
    """TempNet that is attached to a model by hooks and remembers the τ of the last position of the last forward pass.

    It is a context manager; leaving the context removes the hooks. Inside the context `base.generate` refuses settings
    and prompts that do not go with a TempNet, if its processor is among the logits processors of the call.
    """

    def __init__(self, base: PreTrainedModel, tempnet: TempNet) -> None:
        self.base = base
        self.tempnet = tempnet
        self.last: Tensor | None = None
        self.handles: list[RemovableHandle] = []
        self._generate: Any = base.generate
        self._replaced = vars(base).get("generate")

    def processor(self) -> TemperatureLogitsProcessor:
        """Return a logits processor for one call of `generate()`."""
        return TemperatureLogitsProcessor(self.tempnet, self._read_last)

    def _read_last(self) -> Tensor:
        assert self.last is not None, "nothing went through the model that the TempNet is attached to"
        return self.last

    def _checked_generate(self, inputs: Tensor | None = None, *others: Any, **options: Any) -> Any:
        processors = options.get("logits_processor") or []
        if any(isinstance(one, TemperatureLogitsProcessor) for one in processors):
            named = dict(zip(("generation_config", "logits_processor"), others, strict=False))
            check_call(self.base, inputs, named | options)
        return self._generate(inputs, *others, **options)

    def __enter__(self) -> Attached:
        self.base.generate = self._checked_generate  # type: ignore[assignment]
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self.handles:
            handle.remove()
        del self.base.generate
        if self._replaced is not None:  # that of another TempNet that is attached to the model
            self.base.generate = self._replaced


def attach(base: PreTrainedModel, tempnet: TempNet, fold: CachedFold | None = None) -> Attached:
    """Attach a TempNet to a model by hooks: on the hidden state if τ can be computed from it, else on the logits (and on the
    hidden state, if the network reads it).

    Args:
        base: the base model.
        tempnet: its temperature network.
        fold: a fold that was built before; by default it is built here if possible.
    """
    if fold is None and can_fold(base, tempnet):
        fold = CachedFold(output_weight(base)[0], tempnet)
    attached, hidden = Attached(base, tempnet), list[Tensor]()

    def read_hidden(head: nn.Module, inputs: tuple[Any, ...]) -> None:
        hidden[:] = [inputs[0][:, -1]]
        if fold is not None:
            attached.last = fold.temperatures(hidden[0])

    @torch.no_grad()
    def read_logits(model: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        logits = output.logits[:, -1, : tempnet.config.input_size]
        attached.last = tempnet(logits, hidden[0].to(logits.device) if hidden else None)

    if fold is not None or tempnet.config.reads_state:
        attached.handles.append(base.get_output_embeddings().register_forward_pre_hook(read_hidden))
    if fold is None:
        tempnet.eval()
        attached.handles.append(base.register_forward_hook(read_logits))
    return attached


@contextmanager
def record_hidden_states(base: PreTrainedModel, *, passes_all: bool = True) -> Iterator[list[Tensor]]:
    """Put what the output layer reads in every forward pass, the hidden states (B, T, d), into the list that is given.

    Without `passes_all` the output layer gets the last position only, where the logits are not needed.
    """
    seen: list[Tensor] = []

    def read(head: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        seen.append(inputs[0])
        return None if passes_all else (inputs[0][:, -1:],)

    handle = base.get_output_embeddings().register_forward_pre_hook(read)
    try:
        yield seen
    finally:
        handle.remove()
