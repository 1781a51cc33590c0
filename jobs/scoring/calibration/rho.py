"""Calibrate ρ: compute the mean optimal temperature of a base model over a range of ρ, print it and plot it."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from jobs.engine.cluster import start_ray
from jobs.engine.config import RunSection, WorkersSection
from jobs.engine.export import open_export
from jobs.engine.report import picture
from jobs.scoring.calibration.config import Rho
from jobs.tasks.base import resolve_paths
from jobs.tasks.language_model.calibration import calibrate
from jobs.tasks.language_model.config import DataSection, LanguageModelConfig, ModelSection, TemperatureSection
from jobs.tasks.language_model.data import blocks_layout
from jobs.tasks.language_model.models import base_shapes
from jobs.tasks.text import prepare_split
from pipelines.archives import list_archives
from pipelines.text.tokenization import load_tokenizer

_DEFAULT_CONTEXT_LENGTH = 256


def calibrate_rho(job: Rho) -> None:
    """Run the subcommand `rho`: prepare the text, calibrate in a Ray task, print and plot the result."""
    config = _configure(job)
    start_ray()
    started = time.monotonic()
    manifest = prepare_split(config, blocks_layout(config, "train"), "train")
    values = calibrate(config, manifest, device_map=job.device_map, num_gpus=job.num_gpus)
    with open_export(job.output) as output:
        (output / "calibration.json").write_text(json.dumps(values, indent=1) + "\n")
        plot(values, output / "curve.png", wanted=job.tau)
    curve = values["curve"]
    print(f"{'ρ':>8}{'target entropy':>16}{'mean τ*':>10}{'std':>8}")
    for row in zip(curve["rho"], curve["target_entropy"], curve["tau_mean"], curve["tau_std"], strict=True):
        print(f"{row[0]:>8.3f}{row[1]:>16.3f}{row[2]:>10.3f}{row[3]:>8.3f}")
    print(
        f"\nρ = {values['rho']:.4f} (target entropy {values['target_entropy']:.4f} nats) has mean τ* = "
        f"{values['tau_mean']:.4f} ± {values['tau_std']:.4f} over {values['num_contexts']:,} contexts\n"
        f"{time.monotonic() - started:.0f} s; {job.output}/curve.png shows the curve. Train with\n"
        f"  --temperature.target-entropy {values['target_entropy']:.4f}"
    )


def _configure(job: Rho) -> LanguageModelConfig:
    """Return the configuration of a run on the job's model and text, with absolute paths."""
    config = LanguageModelConfig(
        run=RunSection(name="calibration", storage=job.storage),
        data=DataSection(
            train=job.text,
            validation=job.text,
            tokenizer=job.tokenizer,
            context_length=job.context_length or 2,  # a placeholder until the model's is known
            attend_across_documents=job.attend_across_documents,
        ),
        model=ModelSection(path=job.model, trust_remote_code=job.trust_remote_code),
        temperature=TemperatureSection(
            rho=None,
            calibrated_tau=job.tau,
            tau_min=job.tau_min,
            tau_max=job.tau_max,
            num_calibration_tokens=job.num_tokens,
        ),
        workers=WorkersSection(precision=job.precision, use_gpu=job.use_gpu),
    )
    list_archives(job.text)
    base = base_shapes(config, load_tokenizer(config.tokenizer)).config
    if not job.context_length:
        length = min(_DEFAULT_CONTEXT_LENGTH, getattr(base, "max_position_embeddings", None) or _DEFAULT_CONTEXT_LENGTH)
        config = replace(config, data=replace(config.data, context_length=length))
    return resolve_paths(config)


def plot(values: dict[str, Any], path: Path, *, wanted: float) -> None:
    """Plot the mean optimal temperature τ* over ρ with its standard deviation, the wanted mean and the ρ that gives it."""
    curve = values["curve"]
    low = [mean - std for mean, std in zip(curve["tau_mean"], curve["tau_std"], strict=True)]
    high = [mean + std for mean, std in zip(curve["tau_mean"], curve["tau_std"], strict=True)]
    with picture(path, figsize=(6, 4)) as ((axis,),):
        axis.fill_between(curve["rho"], low, high, alpha=0.2, label="± one standard deviation of τ*")
        axis.plot(curve["rho"], curve["tau_mean"], marker=".", label="mean τ*")
        axis.axhline(wanted, linestyle=":", color="black")
        axis.plot([values["rho"]], [values["tau_mean"]], "o", color="black", label=f"ρ = {values['rho']:.3f}")
        axis.set(xlabel="ρ (nats)", ylabel="optimal temperature τ*", ylim=(0, None))
        axis.legend()
