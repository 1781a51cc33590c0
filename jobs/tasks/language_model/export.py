"""Exports a model as a Transformers directory that loads without this project, with the TempNet in a subdirectory.

Of a frozen base the export only names path and digest, unless `model.whole_export` asks for its weights too; the
functions of `tempnet.base_model` and `tempnet.loading` load both kinds.
"""

from __future__ import annotations

import torch
from torch import nn

from jobs.engine.deepspeed_engine import whole_parameters
from jobs.engine.export import open_export
from jobs.tasks.language_model.config import LanguageModelConfig
from pipelines.text.tokenization import load_tokenizer
from tempnet.base_model import BaseReference
from tempnet.models.causal_lm import TemperatureCausalLM
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
        if base is None:
            module.base.save_pretrained(directory, state_dict=_base_weights(module, weights))
        else:
            module.base.config.save_pretrained(directory)
            if module.base.generation_config is not None:
                module.base.generation_config.save_pretrained(directory)
            base.save(directory)
        load_tokenizer(config.tokenizer).save_pretrained(directory)
        if module.tempnet is not None:
            network = TempNet(module.tempnet.config)
            network.load_state_dict(
                {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
            )
            network.save_pretrained(directory / PAIRED_DIRECTORY)


def _base_weights(module: TemperatureCausalLM, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights of the base by their names in it, without an output weight that is tied to the input."""
    base = {name.removeprefix("base."): value for name, value in weights.items() if name.startswith("base.")}
    if module.base.config.tie_word_embeddings:
        output = module.base.get_output_embeddings()
        tied = {f"{name}.weight" for name, part in module.base.named_modules() if part is output}
        base = {name: value for name, value in base.items() if name not in tied}
    return base
