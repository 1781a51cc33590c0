"""Builds the module to train from a configuration: a Transformers base model, its TempNet and the loss."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.func import functional_call
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import is_flash_attn_3_available

from jobs.engine.hardware import training_memory
from jobs.engine.task import whole_shape
from jobs.tasks.base import autocast_dtype, naming_field
from jobs.tasks.language_model.config import DistillationSection, LanguageModelConfig
from pipelines.local_copy import checked_copy, local_copy
from pipelines.text.tokenization import document_start_id, load_tokenizer, tokenizer_digest
from tempnet.base_model import find_base, load_base, read_config
from tempnet.devices import bytes_saved, constant_weights, hold_constant, loading_options
from tempnet.distillation import DistilledCausalLM, TeacherTemperature
from tempnet.models.causal_lm import NUM_PROFILED_LOGITS, TemperatureCausalLM, compile_blocks
from tempnet.models.output_head import StoredBase
from tempnet.models.packing import FLASH, FLEX, document_mask, takes_document_mask
from tempnet.network import TempNet
from tempnet.network_config import TempNetConfig
from tempnet.softmax.config import TemperatureLossConfig
from tempnet.softmax.linear import default_chunk_size
from tempnet.weights import WeightFiles, check_weight_files

# The vocabulary of a random base model is padded to a multiple of this, for speed (GPT-2: 50257 → 50304).
_VOCAB_MULTIPLE = 64
# Of PyTorch's kernels for FlexAttention.
_LEAST_HEAD_SIZE = 16
_ON_GPUS = (FLEX, *FLASH)


def base_config(config: LanguageModelConfig, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    """Return the Transformers configuration of the base model; of a pretrained one, no weights are read but their headers."""
    model, vocab_size = config.model, len(tokenizer)
    if model.path:
        place = checked_copy(model.path, "model.path = ", with_weights=False)
        check_weight_files(place)
        with naming_field("model.path = "):
            base = read_config(place, trust_remote_code=model.trust_remote_code)
    else:
        base = AutoConfig.for_model(
            model.architecture,
            vocab_size=-(-vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE,
            hidden_size=model.hidden_size,
            num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_heads,
            max_position_embeddings=config.data.context_length,
            bos_token_id=document_start_id(tokenizer),
            eos_token_id=tokenizer.eos_token_id,
        )
        if model.architecture == "gpt2":
            base.resid_pdrop = base.embd_pdrop = base.attn_pdrop = model.dropout
        elif model.dropout:
            raise ValueError(f"model.dropout = {model.dropout:g} is supported only for model.architecture = 'gpt2'")
    text = base.get_text_config()
    if vocab_size > text.vocab_size:
        raise ValueError(
            f"data.tokenizer = {config.tokenizer!r} has {vocab_size} tokens, more than the vocabulary of "
            f"{text.vocab_size} of model.path = {model.path!r}: use the model's own tokenizer"
        )
    num_positions = getattr(text, "max_position_embeddings", None) or config.data.context_length
    if config.data.context_length > num_positions:
        raise ValueError(
            f"data.context_length = {config.data.context_length} is more than the {num_positions} positions of the base model"
        )
    return base


def base_shapes(config: LanguageModelConfig, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Build the base model on the meta device, without weights; in the place of attention that needs a GPU, with sdpa."""
    settings = base_config(config, tokenizer)
    attention = attention_of(config, settings)
    base = _on_meta(config, settings, "sdpa" if attention in _ON_GPUS else attention)
    if not config.data.attend_across_documents and attention not in _ON_GPUS:
        takes_document_mask(base)
    return base


def _on_meta(config: LanguageModelConfig, settings: PretrainedConfig, attention: str) -> PreTrainedModel:
    with torch.device("meta"):
        base: PreTrainedModel = AutoModelForCausalLM.from_config(
            copy.deepcopy(settings),
            attn_implementation=attention,
            trust_remote_code=config.model.trust_remote_code,
        )
    return base


def attention_of(config: LanguageModelConfig, settings: PretrainedConfig) -> str:
    """Return Transformers' name of the attention that model.attention asks for; what the base lacks is refused."""
    asked = config.model.attention
    if asked not in ("flex", "flash"):
        return "eager" if asked == "eager" else "sdpa"
    try:
        if asked == "flex":
            _check_flex(config, settings)
            return FLEX
        name = FLASH[is_flash_attn_3_available()]
        if torch.cuda.is_available():  # where the job is submitted there may be none: the workers check it
            takes_document_mask(_on_meta(config, settings, name))
        return name
    except (ValueError, ImportError) as error:
        raise ValueError(f"model.attention = {asked!r}: {error}; choose auto, sdpa or eager") from error


def _check_flex(config: LanguageModelConfig, settings: PretrainedConfig) -> None:
    """Raise ValueError if FlexAttention does not compute what the base does, or is not supported by it."""
    text = settings.get_text_config()
    for name in ("attn_pdrop", "attention_dropout"):
        if getattr(text, name, 0.0):
            raise ValueError(f"FlexAttention has no dropout, and the base has {name} = {getattr(text, name):g}")
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if size < _LEAST_HEAD_SIZE:
        raise ValueError(f"FlexAttention needs heads of {_LEAST_HEAD_SIZE} or more dimensions, and the base has {size}")
    base = _on_meta(config, settings, FLEX)
    if text is not settings or not base.is_backend_compatible():
        raise ValueError(f"a base of type {settings.model_type!r} does not use Transformers' attention interface alone")
    takes_document_mask(base)


def build_base(
    config: LanguageModelConfig, tokenizer: PreTrainedTokenizerFast, *, device_map: str | None = None
) -> PreTrainedModel:
    """Build the base model, pretrained or randomly initialised; a frozen one has the precision of the run, and is spread over
    the devices of this process by device_map = "auto".
    """
    torch.manual_seed(config.run.seed)
    base: PreTrainedModel
    if config.model.path:
        options = _options_of_loading(config)
        if device_map and options["attn_implementation"] in _ON_GPUS:
            options["attn_implementation"] = "sdpa"  # A block mask is not moved from device to device, nor are bounds.
        base = load_base(local_copy(config.model.path), fetch=local_copy, device_map=device_map, **options)
        # A base that is spread is only read, and accelerate moves its parameters.
        if config.model.precision and device_map is None:
            hold_constant(base)
    else:
        settings = base_config(config, tokenizer)
        attention = attention_of(config, settings)
        base = AutoModelForCausalLM.from_config(settings, attn_implementation=attention, trust_remote_code=False)
    return base


def _options_of_loading(config: LanguageModelConfig) -> dict[str, Any]:
    place = checked_copy(config.model.path, "model.path = ", with_weights=False)
    settings = read_config(place, trust_remote_code=config.model.trust_remote_code)
    return {
        **loading_options(config.base_precision),
        "trust_remote_code": config.model.trust_remote_code,
        "attn_implementation": attention_of(config, settings),
    }


def read_only(base: Any, config: LanguageModelConfig, vocab_size: int) -> TemperatureCausalLM:
    """Return a frozen base, or the output layer of one, as a module without a TempNet: states and logits are read of it."""
    return TemperatureCausalLM(
        base,
        None,
        TemperatureLossConfig(name="ce", rho=0.0),
        vocab_size=vocab_size,
        freeze_base=True,
        attend_across_documents=config.data.attend_across_documents,
        autocast_dtype=autocast_dtype(config),
    )


def find_divisible_base(config: LanguageModelConfig) -> tuple[PreTrainedModel, WeightFiles] | None:
    """Return a base without weights, and the files with them, if ZeRO 3 can divide them among workers while they are loaded.

    Otherwise, as for files without the names and shapes of its parameters, it is None, and every worker loads the whole base.
    """
    if config.workers.zero_stage != 3 or not config.model.path:
        return None
    place, _ = find_base(local_copy(config.model.path), fetch=local_copy)
    files = WeightFiles.find(place)
    if files is None:
        return None
    from jobs.engine.deepspeed_engine import base_without_weights

    base = base_without_weights(place, **_options_of_loading(config))
    return None if files.match(base) is None else (base, files)


def as_teacher(config: LanguageModelConfig) -> LanguageModelConfig:
    """Return the configuration of a run that trains the teacher itself, so that it can be checked like any base model."""
    return replace(
        config,
        model=replace(config.model, path=config.distillation.teacher, freeze=False),
        temperature=replace(config.temperature, loss="ce"),
        distillation=DistillationSection(),
    )


def check_teacher(config: LanguageModelConfig, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Check that a teacher is there and fits to tokenizer and context, and return it without weights."""
    try:
        check_tokenizer(as_teacher(config), tokenizer)
        return base_shapes(as_teacher(config), tokenizer)
    except ValueError as error:
        raise ValueError(str(error).replace("model.path", "distillation.teacher")) from error


def check_tokenizer(config: LanguageModelConfig, tokenizer: PreTrainedTokenizerFast) -> None:
    """Check that the tokenizer is the model's own, if the model has one, because it was trained on that one's tokens."""
    if not config.model.path or config.tokenizer == config.model.path:
        return
    try:
        own = load_tokenizer(config.model.path, needs_eos=False)
    except ValueError:
        return  # the model has no tokenizer
    if tokenizer_digest(own) != tokenizer_digest(tokenizer):
        raise ValueError(
            f"data.tokenizer = {config.data.tokenizer!r} is not the tokenizer of model.path = {config.model.path!r}, "
            "which has its own: leave it empty"
        )


def build_model(
    config: LanguageModelConfig, tokenizer: PreTrainedTokenizerFast, base: PreTrainedModel | StoredBase | None = None
) -> TemperatureCausalLM:
    """Build the module to train; its weights are the same on every rank, because they depend only on the seed."""
    (module,) = build_models([config], tokenizer, base)
    return module


def build_models(
    configs: Sequence[LanguageModelConfig],
    tokenizer: PreTrainedTokenizerFast,
    base: PreTrainedModel | StoredBase | None = None,
) -> list[TemperatureCausalLM]:
    """Build the modules of runs on one base, each as in a run of its own."""
    torch.manual_seed(configs[0].run.seed)
    base = build_base(configs[0], tokenizer) if base is None else base
    state, modules = torch.get_rng_state(), []
    for config in configs:
        torch.set_rng_state(state)
        modules.append(add_tempnet(base, config, tokenizer))
    if configs[0].workers.compiles and isinstance(base, PreTrainedModel):
        blocks = compile_blocks(base)
        if configs[0].workers.zero_stage == 3:
            from jobs.engine.deepspeed_engine import gather_together

            gather_together(blocks)
    return modules


def add_tempnet(
    base: PreTrainedModel | StoredBase, config: LanguageModelConfig, tokenizer: PreTrainedTokenizerFast
) -> TemperatureCausalLM:
    """Build the module from its base: add a TempNet, whose initial weights follow from the state of the generator."""
    if config.workers.activation_checkpointing:
        assert isinstance(base, PreTrainedModel)
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    settings, vocab_size = config.temperature, len(tokenizer)
    loss = settings.loss_config(vocab_size)
    options: dict[str, Any] = {
        "vocab_size": vocab_size,
        "attend_across_documents": config.data.attend_across_documents,
        "autocast_dtype": autocast_dtype(config),
    }
    if config.is_distilled:
        assert isinstance(base, PreTrainedModel)
        teacher = load_base(
            local_copy(config.distillation.teacher),
            fetch=local_copy,
            dtype=options["autocast_dtype"] or torch.float32,
            trust_remote_code=config.model.trust_remote_code,
            attn_implementation="eager" if config.model.attention == "eager" else "sdpa",
        )
        tau = TeacherTemperature(rho=loss.rho, tau_min=loss.tau_min, tau_max=loss.tau_max)
        if config.distillation.keep == "temperature":
            tau = TeacherTemperature(tau=settings.tau)
        return DistilledCausalLM(base, teacher, tau, loss, **options)
    network = build_tempnet(config, vocab_size, loss.rho, state_size(base)) if settings.needs_tempnet else None
    return TemperatureCausalLM(base, network, loss, freeze_base=config.model.is_frozen, **options)


def state_size(base: PreTrainedModel | StoredBase) -> int:
    """Return the dimension of the hidden states that the logits are computed from."""
    return int(base.get_output_embeddings().weight.shape[1])


def build_tempnet(config: LanguageModelConfig, vocab_size: int, rho: float, state_size: int) -> TempNet:
    """Build a new TempNet, or load the saved one from `temperature.path`."""
    wanted = config.temperature.network_config(vocab_size, rho, state_size)
    return load_tempnet(config.temperature.path, wanted) if config.temperature.path else TempNet(wanted)


def load_tempnet(path: str, wanted: TempNetConfig, *, unknown: Iterable[str] = ()) -> TempNet:
    """Load the saved TempNet of `temperature.path`; its configuration must be `wanted`, but for fields not known yet."""
    with naming_field("temperature.path = "):
        network = TempNet.from_pretrained(local_copy(path)).train()
    network.set_tau_max_eval(None)
    if replace(network.config, **{name: getattr(wanted, name) for name in unknown}) != wanted:
        raise ValueError(f"temperature.path = {path!r} was saved with {network.config}, but this run needs {wanted}")
    return network


def flops_per_token(module: TemperatureCausalLM, config: LanguageModelConfig) -> float:
    """Return the FLOPs that training on one token mathematically needs; recomputed activations do not count.

    Every parameter of a matrix product takes 2 FLOPs in the forward and 4 in the backward pass, and attention takes
    12·layers·width·T for a context of T tokens (PaLM, arXiv 2204.02311, Appendix B). A frozen base has only the forward pass,
    one whose hidden states are stored only its output layer. TempNet takes 4 per parameter, as its input has no gradient.
    """
    base = module.base
    num_tempnet = _count(module.tempnet.parameters()) if module.tempnet else 0
    if isinstance(base, StoredBase):
        return 2 * _count([base.output.weight]) + 4 * num_tempnet
    text = base.config.get_text_config()
    position = getattr(text, "max_position_embeddings", 0) * text.hidden_size
    num_base = _count(chain(base.parameters(), constant_weights(base)))
    embedding = next(base.get_input_embeddings().parameters())
    num_lookup = 0 if base.config.tie_word_embeddings else _count([embedding])
    num_multiplying = num_base - num_lookup - (position if base.config.model_type == "gpt2" else 0)
    attention = 12 * text.num_hidden_layers * text.hidden_size * config.data.context_length
    whole = 6 * num_multiplying + attention
    return (whole / 3 if module.freeze_base else whole) + 4 * num_tempnet


def _count(parameters: Iterable[Tensor]) -> int:
    return sum(whole_shape(parameter).numel() for parameter in parameters)


def estimate_memory(
    config: LanguageModelConfig,
    base: PreTrainedModel,
    vocab_size: int,
    num_base: int,
    num_tempnet: int,
    num_teacher: int = 0,
) -> dict[str, float]:
    """Return item → bytes for a worker, from the base on the device meta and the numbers of parameters that it holds."""
    model, workers, is_frozen = config.model, config.workers, config.model.is_frozen
    text, sizes = base.config.get_text_config(), (config.micro_batch_size, config.data.context_length)
    num_layers, hidden = text.num_hidden_layers, 4.0 * sizes[0] * sizes[1] * text.hidden_size
    is_half = workers.resolved_precision == "bf16"
    activations = hidden if model.features else saved_bytes(base, *sizes, is_half=is_half)
    if not model.features and (is_frozen or workers.activation_checkpointing):
        activations = activations / num_layers + (0 if is_frozen else num_layers * hidden)
    # Four buffers of a chunk's logits, and hidden states with gradients; the output weight's gradient and copy in bfloat16.
    chunk = min(sizes[0] * sizes[1], default_chunk_size(vocab_size)) * vocab_size
    bytes_per_weight = (0 if is_frozen else 4) + (2 if is_half else 0)
    if model.precision and not model.features:
        num_base -= bytes_saved(base) // 2  # eight bits, in the place of bfloat16
    return training_memory(
        workers,
        num_trained=num_tempnet + (0 if is_frozen else num_base),
        num_frozen=num_base if is_frozen else num_teacher,
        accumulates=config.num_accumulation_steps > 1,
        activations=activations,
        loss=16.0 * chunk + hidden + bytes_per_weight * vocab_size * text.hidden_size,
        # The last validation computes the profiles of some tokens at a time, from five copies of their logits.
        validation=20.0 * min(sizes[0] * sizes[1] * vocab_size, NUM_PROFILED_LOGITS),
    )


def saved_bytes(base: PreTrainedModel, num_blocks: int, num_tokens: int, *, is_half: bool) -> float:
    """Return the bytes that autograd saves in a forward pass of the base, run without data, apart from its parameters."""
    seen: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:  # so that no other storage gets the same address
        return seen.setdefault(tensor.untyped_storage()._cdata, tensor)

    body, text = base.base_model, base.config.get_text_config()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.autocast("cpu", torch.bfloat16, enabled=is_half):
        values = {
            name: torch.empty(value.shape, dtype=value.dtype, requires_grad=value.requires_grad)
            for name, value in [*body.named_parameters(), *body.named_buffers()]
        }
        places = torch.arange(num_tokens).expand(num_blocks, -1)
        mask = document_mask(places, base.config._attn_implementation)
        inputs = {"input_ids": places, "position_ids": places, "attention_mask": mask, "use_cache": False}
        try:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                functional_call(body, values, kwargs=inputs)
        except Exception:  # a model of another kind may take no such mask: arXiv 2205.05198, §4.1, in float32
            return 4.0 * 34 * places.numel() * text.hidden_size * text.num_hidden_layers
        parameters = {value.untyped_storage()._cdata for value in values.values()}
    return float(sum(tensor.untyped_storage().nbytes() for key, tensor in seen.items() if key not in parameters))
