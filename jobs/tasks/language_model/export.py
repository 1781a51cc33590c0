"""Exports a model as a Transformers directory that loads without this project, with the TempNet in a subdirectory.

Of a frozen base the export only names path and digest, unless `model.whole_export` asks for its weights too; the
functions of `tempnet.base_model` and `tempnet.loading` load both kinds.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig

from jobs.engine.deepspeed_engine import whole_parameters
from jobs.engine.export import open_export
from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.language_model.training_text import write_training_text
from pipelines.local_copy import local_copy
from pipelines.text.tokenization import load_tokenizer
from tempnet.base_model import BaseReference
from tempnet.models.causal_lm import TemperatureCausalLM
from tempnet.models.output_head import StoredBase
from tempnet.network import PAIRED_DIRECTORY, TempNet


def export_model(
    module: TemperatureCausalLM, config: LanguageModelConfig, *, is_first: bool, base: BaseReference | None
) -> None:
    """Write base model, tokenizer and TempNet into the directory `export` of the run.

    All ranks must call this; only the first rank (`is_first`) writes.

    Args:
        module: the trained module.
        config: configuration of the run.
        is_first: whether this is the rank that writes.
        base: reference to write instead of the weights of the base; None: the weights are written.
    """
    weights: dict[str, torch.Tensor] = {}
    part: nn.Module = module
    prefix = "tempnet."
    if base is not None:
        assert module.tempnet is not None
        part, prefix = module.tempnet, ""
    for name, value in whole_parameters(part, config.workers.zero_stage):
        if is_first:
            weights[name] = value
    if not is_first:
        return
    with open_export(config.run.export_directory) as directory:
        write_training_text(directory, config.data.train, config.model.path, is_base_trained=not config.model.is_frozen)
        if base is None:
            module.base.save_pretrained(directory, state_dict=_base_weights(module, weights))
        else:
            _save_configuration(module, config, directory)
            base.save(directory)
        load_tokenizer(config.tokenizer).save_pretrained(directory)
        if module.tempnet is not None:
            network = TempNet(module.tempnet.config)
            network.load_state_dict(
                {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
            )
            network.save_pretrained(directory / PAIRED_DIRECTORY)


def _save_configuration(module: TemperatureCausalLM, config: LanguageModelConfig, directory: Path) -> None:
    """Write the configuration of the base, so that an export without its weights still says what it is."""
    if isinstance(module.base, StoredBase) or config.model.precision:  # else it would say that the base has eight bits
        place = local_copy(config.model.path, with_weights=False)
        AutoConfig.from_pretrained(place, trust_remote_code=config.model.trust_remote_code).save_pretrained(directory)
        return
    module.base.config.save_pretrained(directory)
    if module.base.generation_config is not None:
        module.base.generation_config.save_pretrained(directory)


def _base_weights(module: TemperatureCausalLM, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights of the base by their names in it, without an output weight that is tied to the input."""
    base = {name.removeprefix("base."): value for name, value in weights.items() if name.startswith("base.")}
    if module.base.config.tie_word_embeddings:
        output = module.base.get_output_embeddings()
        tied = {f"{name}.weight" for name, part in module.base.named_modules() if part is output}
        base = {name: value for name, value in base.items() if name not in tied}
    return base
