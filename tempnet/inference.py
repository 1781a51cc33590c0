"""Use a TempNet in `generate()`: the logits of every step are divided by the temperature that it predicts for them.

There are three ways, which give the same τ:

    generate(base, tempnet, input_ids=…, max_new_tokens=…)                checks the settings, uses the fastest way

    processor = TemperatureLogitsProcessor(tempnet)                       reads the scores that it receives
    with attach(base, tempnet) as attached:                               reads the model's own outputs with a hook,
        base.generate(…, do_sample=True, logits_processor=[attached.processor()])       and checks the settings

A hook sees the original logits of the model, even if other processors that ban or penalise tokens run before. If the logits
are W h with h the hidden state, the hook reads h instead of the logits (`CachedFold`), which costs (d + d1)·d products per
token instead of V·d1.

Shapes: B sequences, T tokens, d hidden size, V effective vocabulary, d1 width of TempNet's first layer.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import GenerationMode

from tempnet.devices import run_device
from tempnet.models.output_head import find_output_head, output_scale, output_weight
from tempnet.network import TempNet
from tempnet.softmax.fold import FoldCache, can_fold_network

logger = logging.getLogger(__name__)

# Rows whose probabilities add up to 1 within this share are taken for log-probabilities: those of logits that a model
# makes never do for a whole batch.
_LOG_PROBABILITIES = 1e-4


class TemperatureLogitsProcessor(LogitsProcessor):
    """Logits processor that divides the scores of each step by τ, and records the τ of every step.

    It is useful only for sampling, and with `temperature` 1. :func:`generate` and :func:`attach` check the settings of a
    generation, which a processor by itself does not learn. What it can tell from the scores, it refuses: logits that were
    masked, and log-probabilities, which beam search passes.

    Args:
        tempnet: the temperature network, which is put into eval mode, so that `tau_max_eval` applies.
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
        """Return the scores (B, V or more) of the next token divided by τ, with −inf for padding beyond V."""
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
    """Return whether τ can be computed from the hidden state: the logits must be W h, and `can_fold_network` holds."""
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
        base, tempnet: the base model, and its temperature network, on the device that tokens are given on.
        fold: result of `CachedFold.of(base, tempnet)`, for many calls. By default it is computed here if possible.
        options: options of `base.generate`. The defaults differ: tokens are sampled, the temperature is 1, and
            Transformers' default top_k = 50 is disabled (but a top_k or top_p in the model's generation configuration
            applies). Prompts of a batch must be padded on the left.

    Unsuitable settings (:func:`check_generation`) and prompts (:func:`check_prompts`) raise ValueError.
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
    options["generation_config"] = config
    check_call(base, None, options)
    with attach(base, tempnet, fold) as attached:
        processor = attached.processor()
        options["logits_processor"] = [*(options.get("logits_processor") or []), processor]
        output = base.generate(**options)  # type: ignore[operator]
    sequences = output if isinstance(output, Tensor) else output.sequences
    return Generation(sequences=sequences, temperatures=processor.temperatures)


class CachedFold:
    """Computes τ from the hidden state with W1·W and WᵀW, which are built once; the weights must not change afterwards.

    With L = W h: W1 L = (W1 W) h and ‖L‖² = hᵀ(WᵀW)h (see `tempnet.softmax.fold`). The matrices are built in float32 from
    the output weight (V or more, d) in any dtype, whose rows beyond V are ignored. The logits must be W h (`can_fold`). The
    TempNet is put into eval mode; one without a transform, or that reads L − max L, raises ValueError.
    """

    def __init__(self, weight: Tensor, tempnet: TempNet) -> None:
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
    def of(cls, base: PreTrainedModel, tempnet: TempNet) -> CachedFold | None:
        """Build the fold of a model's output weight; None where τ needs the logits (:func:`can_fold`)."""
        return cls(output_weight(base)[0], tempnet) if can_fold(base, tempnet) else None


@dataclass(slots=True, eq=False)
class Attached:
    """What :func:`attach` gives: the τ of the last position of the last forward pass."""

    tempnet: TempNet
    last: Tensor | None = None

    def processor(self) -> TemperatureLogitsProcessor:
        """Return a logits processor for one call of `generate()`."""
        return TemperatureLogitsProcessor(self.tempnet, self._read_last)

    def _read_last(self) -> Tensor:
        assert self.last is not None, "nothing went through the model that the TempNet is attached to"
        return self.last


@contextmanager
def attach(base: PreTrainedModel, tempnet: TempNet, fold: CachedFold | None = None) -> Iterator[Attached]:
    """Context in which a TempNet is attached to a model by hooks.

    They read the hidden state if τ can be computed from it (with a fold, which is built if none is given), else the logits
    (and the hidden state, if the network reads it). Inside the context `base.generate` refuses settings and prompts that do
    not go with a TempNet, if its processor is among the logits processors of the call.
    """
    fold = fold or CachedFold.of(base, tempnet)
    attached, hidden = Attached(tempnet), list[Tensor]()

    def read_hidden(head: nn.Module, inputs: tuple[Any, ...]) -> None:
        hidden[:] = [inputs[0][:, -1] * output_scale(base)]
        if fold is not None:
            attached.last = fold.temperatures(hidden[0])

    @torch.no_grad()
    def read_logits(model: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        logits = output.logits[:, -1, : tempnet.config.input_size]
        attached.last = tempnet(logits, hidden[0].to(logits.device) if hidden else None)

    own: Any = base.generate
    replaced = vars(base).get("generate")

    def checked(inputs: Tensor | None = None, *others: Any, **options: Any) -> Any:
        named = dict(zip(("generation_config", "logits_processor"), others, strict=False)) | options
        if any(isinstance(one, TemperatureLogitsProcessor) for one in named.get("logits_processor") or []):
            check_call(base, inputs, named)
        return own(inputs, *others, **options)

    handles = []
    if fold is not None or tempnet.config.reads_state:
        handles.append(base.get_output_embeddings().register_forward_pre_hook(read_hidden))
    if fold is None:
        tempnet.eval()
        handles.append(base.register_forward_hook(read_logits))
    base.generate = checked  # type: ignore[assignment]
    try:
        yield attached
    finally:
        for handle in handles:
            handle.remove()
        del base.generate
        if replaced is not None:  # that of another TempNet that is attached to the model
            base.generate = replaced


@contextmanager
def record_hidden_states(base: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Put the hidden states (B, T, d) of every forward pass, as TempNets read them, into the list that is given."""
    seen: list[Tensor] = []

    def read(head: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0] * output_scale(base))

    handle = base.get_output_embeddings().register_forward_pre_hook(read)
    try:
        yield seen
    finally:
        handle.remove()


def end_ids(base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens after which a text of a model ends, ascending.

    They are the tokenizer's end of text, those of the generation configuration (chat models list the end of a turn there)
    and those of the configuration. What a configuration alone names counts only if it is one of the tokenizer's added
    tokens: its default is a number that may be any word. The token that begins a document ends a text, too, for models that
    separate documents by it.
    """
    ends, added = _as_set(tokenizer.eos_token_id), set(tokenizer.added_tokens_decoder)
    generation = base.generation_config
    if generation is not None and not generation._from_model_config:
        ends |= _as_set(generation.eos_token_id)
    named = _as_set(base.config.get_text_config().eos_token_id) | _as_set(getattr(base.config, "eos_token_id", None))
    if generation is not None:
        named |= _as_set(generation.eos_token_id)
    ends |= (named | _as_set(tokenizer.bos_token_id)) & added
    found = sorted(token for token in ends if 0 <= token < len(tokenizer))
    if others := named.difference(found):
        logger.warning(
            "the model's configuration names %s as ends of a text, which the tokenizer does not: texts end at %s",
            ", ".join(map(str, sorted(others))), ", ".join(map(str, found)) or "no token",
        )  # fmt: skip
    return found


def _as_set(ids: int | list[int] | None) -> set[int]:
    return set() if ids is None else {ids} if isinstance(ids, int) else set(ids)


def check_generation(config: GenerationConfig, assistant_model: PreTrainedModel | None = None) -> None:
    """Raise ValueError for settings of `generate()` under which a TempNet would have no effect or a wrong one.

    The message names the setting, its value and what to do.
    """
    if not config.do_sample:
        raise ValueError(
            f"do_sample = {config.do_sample}: greedy decoding takes the largest logit whatever τ is, so a TempNet would "
            "change nothing. Set do_sample=True, or leave the TempNet out"
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


def check_prompts(
    base: PreTrainedModel, input_ids: Tensor | None, attention_mask: Tensor | None, num_new: int | None
) -> None:
    """Reject prompts that are empty or padded on the right, or that do not fit into the context with the tokens to generate.

    Tokens are (B, T), None if the caller gives something else, and so is the mask, 1 for tokens and 0 for padding; None if
    nothing is padding. `num_new` is the maximum number of new tokens, or None. The context is `max_position_embeddings` of
    the configuration, if it has this field. The ValueError names the prompt by its place in the batch, or the lengths.
    """
    if input_ids is None:
        return
    length, generation = input_ids.shape[-1], base.generation_config
    pad = None if generation is None else generation.pad_token_id
    # Transformers takes these for padding, too, unless the token also ends a text.
    if attention_mask is None and pad is not None and pad not in _as_set(generation.eos_token_id):
        attention_mask = (input_ids != pad).long()
    empty = [0] if length == 0 else []
    if attention_mask is not None and attention_mask.ndim == 2:
        empty = (attention_mask.sum(-1) == 0).nonzero().flatten().tolist()
    if empty:
        raise ValueError(
            f"prompt {empty[0]} of {len(input_ids)} is empty: τ is predicted from the logits after a token. "
            "Give every prompt at least one, such as the token that begins a document"
        )
    if attention_mask is not None and attention_mask.ndim == 2 and bool((attention_mask[:, -1] == 0).any()):
        row = int((attention_mask[:, -1] == 0).nonzero()[0, 0])
        raise ValueError(
            f"prompt {row} of {len(input_ids)} is padded on the right: the next token would follow padding. Pad on "
            'the left, with tokenizer.padding_side = "left"'
        )
    context = getattr(base.config.get_text_config(), "max_position_embeddings", None)
    if context and length + (num_new or 0) > context:
        new = f" and max_new_tokens = {num_new}" if num_new else ""
        raise ValueError(f"the longest prompt of {length} tokens{new} do not fit into the context of {context} tokens")


def check_call(base: PreTrainedModel, inputs: Tensor | None, options: dict[str, Any]) -> None:
    """Check a call `base.generate(inputs, **options)` in the form in which `generate()` will see it."""
    options = dict(options)
    config: GenerationConfig = copy.deepcopy(options.pop("generation_config", None) or base.generation_config)
    config.update(**base.generation_config.to_dict(), defaults_only=True, allow_custom_entries=True)
    rest = config.update(**options)
    check_generation(config, rest.get("assistant_model"))
    tokens = rest.get("input_ids") if inputs is None else inputs
    check_prompts(base, tokens, rest.get("attention_mask"), config.max_new_tokens)
