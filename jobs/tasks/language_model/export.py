"""Exports a model as a Transformers directory that loads without this project, with the TempNet in a subdirectory."""

from __future__ import annotations

import torch

from jobs.engine.deepspeed_engine import whole_parameters
from jobs.engine.export import open_export
from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.language_model.training_text import write_training_text
from pipelines.text.tokenization import load_tokenizer
from tempnet.models.causal_lm import TemperatureCausalLM
from tempnet.network import PAIRED_DIRECTORY, TempNet


def export_model(module: TemperatureCausalLM, config: LanguageModelConfig, *, is_first: bool) -> None:
    """Write base model, tokenizer and TempNet into the directory `export` of the run.

    All ranks must call this; only the first rank (`is_first`) writes. A frozen base model is written too, so that the
    directory is complete.
    """
    weights: dict[str, torch.Tensor] = {}
    for name, value in whole_parameters(module, config.workers.zero_stage):
        if is_first:
            weights[name] = value
    if not is_first:
        return
    base = {name.removeprefix("base."): value for name, value in weights.items() if name.startswith("base.")}
    output = module.base.get_output_embeddings()
    tied = module.base.config.tie_word_embeddings
    if tied:
        names = [name for name, part in module.base.named_modules() if part is output]
        base = {name: value for name, value in base.items() if name not in {f"{part}.weight" for part in names}}
    with open_export(config.run.export_directory) as directory:
        write_training_text(directory, config.data.train, config.model.path, is_base_trained=not config.model.is_frozen)
        module.base.save_pretrained(directory, state_dict=base)
        load_tokenizer(config.tokenizer).save_pretrained(directory)
        if module.tempnet is not None:
            network = TempNet(module.tempnet.config)
            prefix = "tempnet."
            network.load_state_dict(
                {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
            )
            network.save_pretrained(directory / PAIRED_DIRECTORY)
