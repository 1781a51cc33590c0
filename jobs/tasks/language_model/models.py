"""Builds the module to train from a configuration: a Transformers base model, its TempNet and the loss."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from jobs.tasks.base import naming_field
from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.language_model.teacher import as_base, load_teacher, teacher_temperature
from pipelines.local_copy import checked_copy, local_copy
from pipelines.text.tokenization import document_start_id, load_tokenizer, tokenizer_digest
from tempnet.base_model import find_base, load_base, read_config
from tempnet.devices import hold_constant, loading_options
from tempnet.distillation import DistilledCausalLM
from tempnet.models.causal_lm import TemperatureCausalLM, compile_blocks
from tempnet.models.output_head import StoredBase
from tempnet.models.packing import takes_document_mask
from tempnet.network import TempNet
from tempnet.rho import rho_from_target_entropy
from tempnet.softmax.config import TemperatureLossConfig
from tempnet.weights import WeightFiles, check_weight_files

# The vocabulary of a random base model is padded to a multiple of this, for speed (GPT-2: 50257 → 50304).
_VOCAB_MULTIPLE = 64


def base_config(config: LanguageModelConfig, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    """Return the Transformers configuration of the base model, without loading its weights.

    Of a pretrained model, only configuration files and the headers of the weight files are read.

    Raises:
        ValueError: if the model cannot be found, is too small for the tokenizer or the context, or its weight files are
            truncated.
    """
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
    """Build the base model on the meta device, without weights.

    Raises:
        ValueError: see :func:`base_config`; also if the configuration requires packed documents to be separated but the
            model cannot do it.
    """
    with torch.device("meta"):
        base: PreTrainedModel = AutoModelForCausalLM.from_config(
            base_config(config, tokenizer),
            attn_implementation=config.model.attention,
            trust_remote_code=config.model.trust_remote_code,
        )
    if not config.data.attend_across_documents:
        takes_document_mask(base)
    return base


def resolve_rho(config: LanguageModelConfig, vocab_size: int) -> float | None:
    """Return the ρ of the run, as given or computed from the target entropy; None if it must be calibrated first.

    The proper score has no ρ, so that a TempNet's pooling is not scaled by it: it is 0 unless one is given.
    """
    settings = config.temperature
    if settings.target_entropy is not None:
        return rho_from_target_entropy(settings.target_entropy, vocab_size)
    return 0.0 if settings.rho is None and not settings.needs_calibration else settings.rho


def loss_config(config: LanguageModelConfig, vocab_size: int) -> TemperatureLossConfig:
    """Return the configuration of the loss, with ρ as a number."""
    settings = config.temperature
    rho = resolve_rho(config, vocab_size)
    assert rho is not None, "ρ is calibrated before a model is built"
    return TemperatureLossConfig(
        name=settings.token_loss,
        rho=rho,
        tau=settings.tau,
        tau_min=settings.tau_range[0],
        tau_max=settings.tau_range[1],
    )


def build_base(
    config: LanguageModelConfig, tokenizer: PreTrainedTokenizerFast, *, device_map: str | None = None
) -> PreTrainedModel:
    """Build the base model, pretrained or randomly initialised; a frozen one has the precision of the run.

    Args:
        config: configuration of the run.
        tokenizer: tokenizer of the run.
        device_map: "auto" to spread a pretrained base, which is not trained, over the devices of this process.
    """
    torch.manual_seed(config.run.seed)
    base: PreTrainedModel
    if config.model.path:
        options = _options_of_loading(config)
        base = load_base(local_copy(config.model.path), fetch=local_copy, device_map=device_map, **options)
        # A base that is spread is only read, and accelerate moves its parameters.
        if config.model.precision and device_map is None:
            hold_constant(base)
    else:
        base = AutoModelForCausalLM.from_config(
            base_config(config, tokenizer), attn_implementation=config.model.attention, trust_remote_code=False
        )
    return base


def _options_of_loading(config: LanguageModelConfig) -> dict[str, Any]:
    return {
        **loading_options(config.base_precision),
        "trust_remote_code": config.model.trust_remote_code,
        "attn_implementation": config.model.attention,
    }


def find_divisible_base(config: LanguageModelConfig) -> tuple[PreTrainedModel, WeightFiles] | None:
    """Return a base without weights, and the files with them, if its weights can be divided among workers while loaded.

    This is so under ZeRO 3 for a pretrained base whose safetensors files have the names and shapes of its parameters;
    otherwise the result is None, and every worker loads the whole base before ZeRO 3 divides it.
    """
    if config.workers.zero_stage != 3 or not config.model.path:
        return None
    place, _ = find_base(local_copy(config.model.path), fetch=local_copy)
    files = WeightFiles.find(place)
    if files is None:
        return None
    from jobs.engine.deepspeed_engine import base_without_weights  # imports DeepSpeed, which a plan does without

    base = base_without_weights(place, **_options_of_loading(config))
    return None if files.match(base) is None else (base, files)


def check_teacher(config: LanguageModelConfig, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Check that a teacher is there and fits to tokenizer and context, and return it without weights.

    Raises:
        ValueError: if it does not; the message names the field.
    """
    try:
        check_tokenizer(as_base(config), tokenizer)
        return base_shapes(as_base(config), tokenizer)
    except ValueError as error:
        raise ValueError(str(error).replace("model.path", "distillation.teacher")) from error


def check_tokenizer(config: LanguageModelConfig, tokenizer: PreTrainedTokenizerFast) -> None:
    """Check that the tokenizer is the model's own, if the model has one, because it was trained on that one's tokens.

    Raises:
        ValueError: if it is another one; the message names both.
    """
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
    """Build the module to train; its weights are the same on every rank, because they depend only on the seed.

    Args:
        config: configuration of the run.
        tokenizer: tokenizer of the run.
        base: the base, which may have no weights yet, or its output layer, if its hidden states are read; None: it is built.
    """
    if base is None:
        base = build_base(config, tokenizer)
    else:
        torch.manual_seed(config.run.seed)
    module = add_tempnet(base, config, tokenizer)
    if config.workers.compiles and isinstance(base, PreTrainedModel):
        compile_blocks(base)
    return module


def add_tempnet(
    base: PreTrainedModel | StoredBase, config: LanguageModelConfig, tokenizer: PreTrainedTokenizerFast
) -> TemperatureCausalLM:
    """Build the module from its base: add a TempNet, whose initial weights follow from the state of the generator."""
    if config.workers.activation_checkpointing:
        assert isinstance(base, PreTrainedModel)
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    vocab_size = len(tokenizer)
    loss = loss_config(config, vocab_size)
    if config.is_distilled:
        assert isinstance(base, PreTrainedModel)
        return DistilledCausalLM(
            base,
            load_teacher(config),
            teacher_temperature(config, loss.rho),
            loss,
            vocab_size=vocab_size,
            attend_across_documents=config.data.attend_across_documents,
            autocast_dtype=autocast_dtype(config),
        )
    network = None
    if config.temperature.needs_tempnet:
        network = build_tempnet(config, vocab_size, loss.rho, state_size=state_size(base))
    return TemperatureCausalLM(
        base,
        network,
        loss,
        vocab_size=vocab_size,
        freeze_base=config.model.is_frozen,
        attend_across_documents=config.data.attend_across_documents,
        autocast_dtype=autocast_dtype(config),
    )


def autocast_dtype(config: LanguageModelConfig) -> torch.dtype | None:
    """Return the autocast dtype of the base model's matrix products; None for float32."""
    return torch.bfloat16 if config.workers.resolved_precision == "bf16" else None


def state_size(base: PreTrainedModel | StoredBase) -> int:
    """Return the dimension of the hidden state that a base model computes its logits from."""
    return int(base.get_output_embeddings().weight.shape[1])


def build_tempnet(config: LanguageModelConfig, vocab_size: int, rho: float, *, state_size: int) -> TempNet:
    """Build a new TempNet, or load the saved one from `temperature.path`.

    Raises:
        ValueError: if the configuration of the saved TempNet differs from the temperature section.
    """
    wanted = config.temperature.network_config(vocab_size, rho, state_size)
    if not config.temperature.path:
        return TempNet(wanted)
    network = TempNet.from_pretrained(local_copy(config.temperature.path)).train()
    network.set_tau_max_eval(None)
    if network.config != wanted:
        raise ValueError(
            f"temperature.path = {config.temperature.path!r} was saved with {network.config}, but this run needs {wanted}"
        )
    return network
