"""The paper's grids of ρ and the TempNet's learning rate (TempNet §6.1, Table 6), and their small versions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jobs.engine.fields import with_fields
from jobs.studies.sweeps.config import ClipSweep, LanguageModelSweep, SweepSection
from jobs.tasks.presets import clip, language_models, named

Preset = Callable[[], LanguageModelSweep | ClipSweep]

_LANGUAGE_MODELS, _CLIP = {"tracking.paper": "TempNet, §6.1"}, {"tracking.paper": "TempNet, Table 6"}
# One worker per trial, so that two trials run at the same time.
_SMALL: dict[str, Any] = {
    "run.num_steps": 300, "workers.num_workers": 1, "workers.zero_stage": 0, "validation.every": 30
}  # fmt: skip


def _grid(rho: str, rates: str, **options: Any) -> SweepSection:
    return SweepSection(axes=(f"temperature.rho={rho}", f"optimizer.learning_rate_tempnet={rates}"), **options)


def gpt2_rho_lr() -> LanguageModelSweep:
    """GPT-2 from scratch: 4 values of ρ × 4 learning rates of the TempNet; band 0.7 to 1."""
    base = with_fields(language_models.gpt2_scratch(), {"run.name": "gpt2-rho-lr", **_LANGUAGE_MODELS})
    return LanguageModelSweep(base=base, sweep=_grid("9,9.5,10,10.5", "5e-4,1e-4,5e-5,1e-5"))


def clip_rho_lr() -> ClipSweep:
    """CLIP with TempNets on CC3M: 4 values of ρ × 4 learning rates of the TempNets; band 0.01 to 0.02."""
    base = with_fields(clip.clip_cc3m_tempnet(), {"run.name": "clip-rho-lr", **_CLIP})
    return ClipSweep(base=base, sweep=_grid("7,8,9,10", "1e-4,5e-5,1e-5,5e-6", band=(0.01, 0.02)))


def gpt2_rho_lr_small() -> LanguageModelSweep:
    """For two cores, sample text and a smaller model than gpt2-scratch-small: 4 values of ρ × 4 learning rates."""
    smaller = {"model.hidden_size": 128, "model.num_layers": 2, "model.num_heads": 4}
    changes = {"run.name": "gpt2-rho-lr-small", "temperature.rho": 2.7, "temperature.target_entropy": None}
    base = with_fields(language_models.gpt2_scratch_small(), {**changes, **smaller, **_SMALL, **_LANGUAGE_MODELS})
    return LanguageModelSweep(base=base, sweep=_grid("2,2.5,3,3.5", "3e-3,6e-3,1e-2,2e-2"))


def frozen_rho_lr_small() -> LanguageModelSweep:
    """For two cores: 4 values of ρ × 4 learning rates on the frozen model of gpt2-scratch-small, all side by side."""
    base = with_fields(language_models.frozen_small(), {"run.name": "frozen-rho-lr-small"})
    return LanguageModelSweep(base=base, sweep=_grid("2.5,3,3.5,4", "3e-3,6e-3,1e-2,2e-2"))


def clip_rho_lr_small() -> ClipSweep:
    """For two cores and the sample images: 4 values of ρ (4 to 7) × 4 learning rates; band 0.01 to 0.02."""
    # A sweep of ρ looks for the value that brings the mean τ into the band, so nothing else may steer the mean.
    free = {"temperature.target_tau": None, "optimizer.rest_share_tempnet": 0.0}
    changes = {"run.name": "clip-rho-lr-small", **free, **_SMALL, **_CLIP}
    base: Any = with_fields(clip.PRESETS["clip-cc3m-tempnet-small"](), changes)
    return ClipSweep(base=base, sweep=_grid("4,5,6,7", "3e-4,1e-3,3e-3,1e-2", band=(0.01, 0.02)))


def clip_frozen_rho_lr_small() -> ClipSweep:
    """For two cores: 4 values of ρ × 4 learning rates on the frozen towers of clip-cc3m-clip-small, all side by side."""
    changes = {"run.name": "clip-frozen-rho-lr-small", "data.view": "central"}  # so that stored embeddings can be read
    base: Any = with_fields(clip.PRESETS["clip-cc12m-tempnet-frozen-small"](), changes)
    return ClipSweep(base=base, sweep=_grid("3.5,4,4.5,5", "1e-3,3e-3,1e-2,3e-2", band=(0.01, 0.02)))


_SMALL_ONES = (gpt2_rho_lr_small, frozen_rho_lr_small, clip_rho_lr_small, clip_frozen_rho_lr_small)
PRESETS: dict[str, Preset] = named(
    {function.__name__.replace("_", "-"): function for function in (*_SMALL_ONES, gpt2_rho_lr, clip_rho_lr)}
)
"""Preset name → function that returns its configuration."""
