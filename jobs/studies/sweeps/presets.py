"""The paper's grids of ρ and the TempNet's learning rate (TempNet §6.1, Table 6), and their small versions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from jobs.studies.sweeps.config import ClipSweep, LanguageModelSweep, SweepSection
from jobs.tasks.presets import clip, language_models
from jobs.tasks.presets.twins import named

Preset = Callable[[], LanguageModelSweep | ClipSweep]


def gpt2_rho_lr() -> LanguageModelSweep:
    """GPT-2 from scratch: 4 values of ρ × 4 learning rates of the TempNet; band 0.7 to 1."""
    base = language_models.gpt2_scratch()
    axes = ("temperature.rho=9,9.5,10,10.5", "optimizer.learning_rate_tempnet=5e-4,1e-4,5e-5,1e-5")
    return LanguageModelSweep(
        base=replace(
            base,
            run=replace(base.run, name="gpt2-rho-lr"),
            tracking=replace(base.tracking, paper="TempNet, §6.1"),
        ),
        sweep=SweepSection(axes=axes),
    )


def clip_rho_lr() -> ClipSweep:
    """CLIP with TempNets on CC3M: 4 values of ρ × 4 learning rates of the TempNets; band 0.01 to 0.02."""
    base = clip.clip_cc3m_tempnet()
    axes = ("temperature.rho=7,8,9,10", "optimizer.learning_rate_tempnet=1e-4,5e-5,1e-5,5e-6")
    return ClipSweep(
        base=replace(
            base,
            run=replace(base.run, name="clip-rho-lr"),
            tracking=replace(base.tracking, paper="TempNet, Table 6"),
        ),
        sweep=SweepSection(axes=axes, band=(0.01, 0.02)),
    )


def gpt2_rho_lr_small() -> LanguageModelSweep:
    """For two cores, sample text and a smaller model than gpt2-scratch-small: 4 values of ρ × 4 learning rates."""
    base = language_models.gpt2_scratch_small()
    axes = ("temperature.rho=2,2.5,3,3.5", "optimizer.learning_rate_tempnet=3e-3,6e-3,1e-2,2e-2")
    return LanguageModelSweep(
        base=replace(
            base,
            run=replace(base.run, name="gpt2-rho-lr-small", num_steps=300),
            model=replace(base.model, hidden_size=128, num_layers=2, num_heads=4),
            tracking=replace(base.tracking, paper="TempNet, §6.1"),
            temperature=replace(base.temperature, rho=2.7, target_entropy=None),
            # One worker per trial, so that two trials run at the same time.
            workers=replace(base.workers, num_workers=1, zero_stage=0),
            validation=replace(base.validation, every=30),
        ),
        sweep=SweepSection(axes=axes),
    )


def frozen_rho_lr_small() -> LanguageModelSweep:
    """For two cores: 4 values of ρ × 4 learning rates on the frozen model of gpt2-scratch-small, all side by side."""
    base = language_models.frozen_small()
    axes = ("temperature.rho=2.5,3,3.5,4", "optimizer.learning_rate_tempnet=3e-3,6e-3,1e-2,2e-2")
    return LanguageModelSweep(
        base=replace(base, run=replace(base.run, name="frozen-rho-lr-small")), sweep=SweepSection(axes=axes)
    )


def clip_rho_lr_small() -> ClipSweep:
    """For two cores and the sample images: 4 values of ρ (4 to 7) × 4 learning rates; band 0.01 to 0.02."""
    base = clip.PRESETS["clip-cc3m-tempnet-small"]()
    assert isinstance(base, clip.ClipConfig)
    axes = ("temperature.rho=4,5,6,7", "optimizer.learning_rate_tempnet=3e-4,1e-3,3e-3,1e-2")
    return ClipSweep(
        base=replace(
            base,
            run=replace(base.run, name="clip-rho-lr-small", num_steps=300),
            workers=replace(base.workers, num_workers=1, zero_stage=0),
            # A sweep of ρ looks for the value that brings the mean τ into the band, so nothing else may steer the mean.
            temperature=replace(base.temperature, target_tau=None),
            optimizer=replace(base.optimizer, rest_share_tempnet=0.0),
            validation=replace(base.validation, every=30),
            tracking=replace(base.tracking, paper="TempNet, Table 6"),
        ),
        sweep=SweepSection(axes=axes, band=(0.01, 0.02)),
    )


def clip_frozen_rho_lr_small() -> ClipSweep:
    """For two cores: 4 values of ρ × 4 learning rates on the frozen towers of clip-cc3m-clip-small, all side by side."""
    base = clip.PRESETS["clip-cc12m-tempnet-frozen-small"]()
    assert isinstance(base, clip.ClipConfig)
    axes = ("temperature.rho=3.5,4,4.5,5", "optimizer.learning_rate_tempnet=1e-3,3e-3,1e-2,3e-2")
    return ClipSweep(
        base=replace(
            base,
            run=replace(base.run, name="clip-frozen-rho-lr-small"),
            data=replace(base.data, view="central"),  # so that stored embeddings can be read (model.features)
        ),
        sweep=SweepSection(axes=axes, band=(0.01, 0.02)),
    )


PRESETS: dict[str, Preset] = named(
    {
        function.__name__.replace("_", "-"): function
        for function in (
            gpt2_rho_lr_small,
            frozen_rho_lr_small,
            clip_rho_lr_small,
            clip_frozen_rho_lr_small,
            gpt2_rho_lr,
            clip_rho_lr,
        )
    }
)
"""Preset name → function that returns its configuration."""
