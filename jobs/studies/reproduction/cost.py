"""The estimated cost of an experiment: GPU-hours from the papers' timings if they give them, else from FLOPs.

The papers' timings (TempNet Tables 1 and 14) are turned into GPU-hours per step with the method: training GPT-2 1.28 h
for 10 000 steps on 8 A6000, and likewise CLIP on CC3M 2.42 h, frozen LLaMA-2 7B 3.98 h and 13B 10.33 h; LLaMA-2 Chat
7B, 13B and 70B 1.42, 3.68 and 11.4 A100-hours per run.

FLOPs are 6·N·D for N trained parameters and D tokens (2·N·D through a frozen base), and for images 3 times the forward
FLOPs of their tower. They are assumed to run at 40 % of the 312 TFLOP/s of an A100.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jobs.engine.config import TrainingConfig
from jobs.tasks.classifier.config import ClassifierConfig
from jobs.tasks.dual_encoder.config import ClipConfig
from jobs.tasks.image_encoder.config import ImageEncoderConfig
from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.presets import classifiers, clip, images, language_models, sentences
from jobs.tasks.sentence_encoder.config import SentenceConfig

PRESETS: dict[str, Callable[[], Any]] = {
    **language_models.PRESETS,
    **clip.PRESETS,
    **sentences.PRESETS,
    **images.PRESETS,
    **classifiers.PRESETS,
}
"""Preset name → function that returns its configuration, for all jobs; the names are distinct."""

_A100_FLOPS = 312e12
_UTILIZATION = 0.4

# Number of parameters, in millions, of the models that full-scale presets start from.
_MILLIONS = {
    "EleutherAI/pythia-160m": 162.0, "huggyllama/llama-7b": 6_738.0,
    "meta-llama/Llama-2-7b-hf": 6_738.0, "meta-llama/Llama-2-7b-chat-hf": 6_738.0,
    "meta-llama/Llama-2-13b-hf": 13_016.0, "meta-llama/Llama-2-13b-chat-hf": 13_016.0,
    "meta-llama/Llama-2-70b-chat-hf": 68_977.0, "distilbert/distilroberta-base": 82.0,
    "FacebookAI/roberta-base": 125.0, "FacebookAI/roberta-large": 355.0,
}  # fmt: skip
_GPT2_MILLIONS = 124.4

# Forward GFLOPs of one image of 224 × 224 pixels and one caption: ResNet-50 with DistilBERT (30 tokens), CLIP ViT-B/32
# (77 tokens).
_PAIR_GFLOPS = {"microsoft/resnet-50": 8.2 + 2 * 0.066 * 30, "openai/clip-vit-base-patch32": 8.8 + 2 * 0.063 * 77}

# Forward GFLOPs of one image of 224 × 224 pixels through a ResNet-18.
_IMAGE_GFLOPS = 3.6

# Beginning of a preset's name → GPU-hours per step, and the source of the timing.
_PAPER_HOURS = {
    "gpt2-scratch": (1.28 * 8 / 10_000, "Table 14: 1.28 h for 10 000 steps on 8 A6000"),
    "clip-cc3m": (2.42 * 8 / 10_000, "Table 14: 2.42 h for 10 000 steps on 8 A6000"),
    "llama2-7b-frozen": (3.98 * 8 / 10_000, "Table 14: 3.98 h for 10 000 steps on 8 A6000"),
    "llama2-13b-frozen": (10.33 * 8 / 10_000, "Table 14: 10.33 h for 10 000 steps on 8 A6000"),
    "llama2-chat-7b-frozen": (1.42 / 30_000, "Table 1: 1.42 A100-hours for 30 000 steps"),
    "llama2-chat-13b-frozen": (3.68 / 30_000, "Table 1: 3.68 A100-hours for 30 000 steps"),
    "llama2-chat-70b-frozen": (11.4 / 20_000, "Table 1: 11.4 A100-hours for 20 000 steps"),
}

# Rough core-seconds per step of the small presets with their validations, and of the start of a run, from runs that were
# made two at a time on two cores.
_SMALL_SECONDS = {
    LanguageModelConfig: 0.6,
    ClipConfig: 0.35,
    SentenceConfig: 0.25,
    ClassifierConfig: 0.1,
    ImageEncoderConfig: 0.2,
}
_SMALL_START = 6.0


class Cost(NamedTuple):
    hours: float
    unit: str
    bases: tuple[str, ...]
    """What the estimate is based on."""

    def describe(self) -> str:
        amount = f"{self.hours:,.0f}" if self.hours >= 10 else f"{self.hours:.2g}"
        return f"about {amount} {self.unit} ({'; '.join(self.bases)})"


def cost_of(configs: Sequence[TrainingConfig]) -> Cost:
    """Returns the cost of all these runs together."""
    if not any(config.workers.use_gpu for config in configs):
        hours = sum(_SMALL_START + config.run.num_steps * _SMALL_SECONDS[type(config)] for config in configs) / 3600
        return Cost(hours, "core-hours", ("a rough estimate from the pace of the small presets on two busy cores",))
    parts = [_estimate_full(config) for config in configs]
    return Cost(sum(hours for hours, _ in parts), "GPU-hours", tuple(dict.fromkeys(basis for _, basis in parts)))


def _estimate_full(config: TrainingConfig) -> tuple[float, str]:
    for start, (hours, basis) in _PAPER_HOURS.items():
        if config.run.name.startswith(start):
            return hours * config.run.num_steps, basis
    flops = _flops_per_step(config) * config.run.num_steps
    return flops / (_UTILIZATION * _A100_FLOPS) / 3600, f"FLOPs at {_UTILIZATION:.0%} of an A100's 312 TFLOP/s"


def _flops_per_step(config: TrainingConfig) -> float:
    size = config.optimizer.batch_size
    if isinstance(config, ClipConfig):
        preset = _preset_config(config).model
        start = config.model.path or config.model.image_path
        forward = (_PAIR_GFLOPS.get(start) or _PAIR_GFLOPS[preset.path or preset.image_path]) * 1e9
        return size * forward * (1 if config.model.freeze else 3)
    if isinstance(config, ImageEncoderConfig):
        return 3 * 2 * size * _IMAGE_GFLOPS * 1e9 * (config.model.image_size / 224) ** 2
    if isinstance(config, LanguageModelConfig):
        num_parameters = 1e6 * (_millions(config, config.model.path) if config.model.path else _GPT2_MILLIONS)
        return (2 if config.model.is_frozen else 6) * num_parameters * size * config.data.context_length
    if isinstance(config, SentenceConfig):
        # The mean lengths of spans are min_length plus the mean of Beta(4, 2) (anchors) or Beta(2, 4) (positives) times
        # the width.
        data = config.data
        width = data.max_length - data.min_length
        tokens = data.num_anchors * (
            data.min_length + width * 4 / 6 + data.num_positives * (data.min_length + width * 2 / 6)
        )
        return 6 * 1e6 * _millions(config, config.model.path) * size * tokens
    assert isinstance(config, ClassifierConfig)
    return 6 * 1e6 * _millions(config, config.model.path) * size * config.data.num_tokens


def _millions(config: TrainingConfig, path: str) -> float:
    """Returns the parameters, in millions, of the model at a path; for an unknown path, those of the preset's model."""
    return _MILLIONS.get(path) or _MILLIONS.get(_preset_config(config).model.path, _GPT2_MILLIONS)


def _preset_config(config: TrainingConfig) -> Any:
    return PRESETS[max((name for name in PRESETS if config.run.name.startswith(f"{name}-")), key=len)]()
