"""Calibrates ρ on a base model: finds the ρ that gives a wanted mean optimal temperature on a sample of prepared text.

The calibration runs as a Ray task, or in this process where Ray is not running. The sample consists of blocks spread evenly
over the data, which the model reads as in training. The result is stored as `calibration.json` in the run's directory, so
that a continued run keeps its ρ.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor

from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.language_model.models import autocast_dtype, build_base
from jobs.tasks.language_model.validation import to_tensors
from pipelines.storage import read_json
from pipelines.stream import Batch
from pipelines.text.blocks import read_range
from pipelines.text.manifest import Manifest
from pipelines.text.packing import IGNORE_INDEX, PackingConfig
from pipelines.text.tokenization import load_tokenizer
from tempnet.calibration import Calibration, calibrate_rho
from tempnet.devices import input_device, move_base
from tempnet.models.causal_lm import TemperatureCausalLM
from tempnet.softmax.config import TemperatureLossConfig

CALIBRATION_FILE = "calibration.json"

# Number of logits that are in memory at a time while optimal temperatures are computed (float32: 256 MiB per copy).
_NUM_LOGITS_AT_A_TIME = 1 << 26


def read_or_calibrate(config: LanguageModelConfig, manifest: Manifest) -> dict[str, Any]:
    """Return the calibration of a run as plain values: read from the run's directory, or computed now.

    This writes no file: the run's directory does not exist before the run's name is claimed, and a run whose
    calibration fails must not claim it.

    Raises:
        CalibrationError: if no ρ gives the wanted mean temperature.
    """
    return read_json(f"{config.run.directory}/{CALIBRATION_FILE}") or calibrate(config, manifest)


def calibrate(
    config: LanguageModelConfig, manifest: Manifest, *, device_map: str | None = None, num_gpus: int = 1
) -> dict[str, Any]:
    """Compute a calibration without reading an earlier one; see :func:`read_or_calibrate`.

    Args:
        config: configuration of the run.
        manifest: the prepared text.
        device_map: "auto" to spread the base over the GPUs, else None.
        num_gpus: number of GPUs to reserve, if the configuration's workers use them.
    """
    if not ray.is_initialized():
        return dataclasses.asdict(_calibrate(config, manifest.directory, device_map))
    workers = config.workers
    task = ray.remote(num_cpus=workers.cpus_per_worker, num_gpus=num_gpus if workers.use_gpu else 0)(_calibrate)
    try:
        return dataclasses.asdict(ray.get(task.remote(config, manifest.directory, device_map)))
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None


def describe_calibration(values: dict[str, Any]) -> str:
    """Return a calibration as one line of text for the terminal."""
    return (
        f"{values['rho']:.4f} (target entropy {values['target_entropy']:.4f} nats): mean τ* {values['tau_mean']:.3f} ± "
        f"{values['tau_std']:.3f} over {values['num_contexts']:,} contexts of the base model"
    )


def _calibrate(config: LanguageModelConfig, directory: str, device_map: str | None) -> Calibration:
    if config.workers.num_threads:
        torch.set_num_threads(config.workers.num_threads)
    tokenizer = load_tokenizer(config.tokenizer)
    base = move_base(build_base(config, tokenizer, device_map=device_map), "cuda" if config.workers.use_gpu else "cpu")
    module = TemperatureCausalLM(
        base,
        None,
        TemperatureLossConfig(name="ce", rho=0.0),
        vocab_size=len(tokenizer),
        freeze_base=True,
        attend_across_documents=config.data.attend_across_documents,
        autocast_dtype=autocast_dtype(config),
    )
    settings = config.temperature
    contexts = sample_contexts(module, Manifest.load(directory), settings.num_calibration_tokens, input_device(base))
    size = max(1, _NUM_LOGITS_AT_A_TIME // len(tokenizer))

    @torch.no_grad()
    def rows() -> Iterator[Tensor]:
        for part in contexts.split(size):
            yield module.context_logits(part)

    return calibrate_rho(
        rows, len(tokenizer), tau=settings.calibrated_tau, tau_min=settings.tau_min, tau_max=settings.tau_max
    )


@torch.no_grad()
def sample_contexts(module: TemperatureCausalLM, manifest: Manifest, num_tokens: int, device: torch.device) -> Tensor:
    """Return the hidden states (num_tokens, d) of blocks spread evenly over the data; fewer rows if the data are few."""
    assert isinstance(manifest.layout, PackingConfig)
    num_blocks = min(manifest.num_rows, math.ceil(1.25 * num_tokens / manifest.layout.context_length) + 1)
    contexts: list[Tensor] = []
    for index in np.linspace(0, manifest.num_rows - 1, num_blocks).astype(int).tolist():
        arrays: Batch = read_range(manifest, index, index + 1)
        batch = to_tensors(arrays, device)
        hidden = module.contexts(batch["input_ids"], batch["position_ids"])
        contexts.append(hidden[(batch["targets"] != IGNORE_INDEX).to(hidden.device)])
    return torch.cat(contexts)[:num_tokens]
