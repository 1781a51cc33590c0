"""What an experiment costs, before it is run: GPU-hours by the papers' own clocks where they give them, else by FLOPs.

The papers' clocks (TempNet Tables 1 and 14), in GPU-hours a step with the method: training GPT-2 1.28 h for 10 000 steps on 8
A6000, and likewise CLIP on CC3M 2.42 h, frozen LLaMA-2 7B 3.98 h and 13B 10.33 h; LLaMA-2 Chat 1.42, 3.68 and 11.4 A100-hours
for a run.

By FLOPs: 6·N·D for N trained parameters and D tokens (2·N·D through a frozen base), for images the forward products of their
tower ×3; at 40 % of the 312 TFLOP/s of an A100.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jobs.engine.config import TrainingConfig
from jobs.studies.reproduction.runs import PRESETS
from jobs.tasks.classifier.config import ClassifierConfig
from jobs.tasks.dual_encoder.config import ClipConfig
from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.sentence_encoder.config import SentenceConfig

_A100_FLOPS = 312e12
_UTILIZATION = 0.4

# Parameters, in millions, of what full-scale presets start from.
_MILLIONS = {
    "EleutherAI/pythia-160m": 162.0,
    "huggyllama/llama-7b": 6_738.0,
    "meta-llama/Llama-2-7b-hf": 6_738.0,
    "meta-llama/Llama-2-13b-hf": 13_016.0,
    "meta-llama/Llama-2-7b-chat-hf": 6_738.0,
    "meta-llama/Llama-2-13b-chat-hf": 13_016.0,
    "meta-llama/Llama-2-70b-chat-hf": 68_977.0,
    "distilbert/distilroberta-base": 82.0,
    "FacebookAI/roberta-base": 125.0,
    "FacebookAI/roberta-large": 355.0,
}
_GPT2_MILLIONS = 124.4

# Forward GFLOPs of one image of 224 pixels and one caption: ResNet-50 with DistilBERT (30 tokens), CLIP ViT-B/32 (77 tokens).
_PAIR_GFLOPS = {"microsoft/resnet-50": 8.2 + 2 * 0.066 * 30, "openai/clip-vit-base-patch32": 8.8 + 2 * 0.063 * 77}

# Name of a preset's start → GPU-hours a step, and whose clock that is.
_PAPER_HOURS = {
    "gpt2-scratch": (1.28 * 8 / 10_000, "Table 14: 1.28 h for 10 000 steps on 8 A6000"),
    "clip-cc3m": (2.42 * 8 / 10_000, "Table 14: 2.42 h for 10 000 steps on 8 A6000"),
    "llama2-7b-frozen": (3.98 * 8 / 10_000, "Table 14: 3.98 h for 10 000 steps on 8 A6000"),
    "llama2-13b-frozen": (10.33 * 8 / 10_000, "Table 14: 10.33 h for 10 000 steps on 8 A6000"),
    "llama2-chat-7b-frozen": (1.42 / 30_000, "Table 1: 1.42 A100-hours for 30 000 steps"),
    "llama2-chat-13b-frozen": (3.68 / 30_000, "Table 1: 3.68 A100-hours for 30 000 steps"),
    "llama2-chat-70b-frozen": (11.4 / 20_000, "Table 1: 11.4 A100-hours for 20 000 steps"),
}

# Roughly the core-seconds of a step of the small twins, and of start, validations and end of a run: from the outcomes of
# the runs of docs/log.md that were made two at a time on two cores with busy neighbours.
_SMALL_SECONDS = {LanguageModelConfig: 0.5, ClipConfig: 0.6, SentenceConfig: 0.45, ClassifierConfig: 0.25}
_SMALL_START = 45.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of some runs."""

    hours: float
    unit: str
    """`GPU-hours` or `core-hours`."""
    bases: tuple[str, ...]
    """What the figure rests on."""

    def describe(self) -> str:
        """For a person."""
        amount = f"{self.hours:,.0f}" if self.hours >= 10 else f"{self.hours:.2g}"
        return f"about {amount} {self.unit} ({'; '.join(self.bases)})"


def cost_of(configs: Sequence[TrainingConfig]) -> Cost:
    """Of all these runs together."""
    if not any(config.workers.use_gpu for config in configs):
        hours = sum(_SMALL_START + config.run.num_steps * _SMALL_SECONDS[type(config)] for config in configs) / 3600
        return Cost(hours=hours, unit="core-hours", bases=("roughly, by the small twins' pace on two busy cores",))
    parts = [_full(config) for config in configs]
    return Cost(
        hours=sum(hours for hours, _ in parts),
        unit="GPU-hours",
        bases=tuple(dict.fromkeys(basis for _, basis in parts)),
    )


def _full(config: TrainingConfig) -> tuple[float, str]:
    for start, (hours, basis) in _PAPER_HOURS.items():
        if config.run.name.startswith(start):
            return hours * config.run.num_steps, basis
    flops = _flops_per_step(config) * config.run.num_steps
    return flops / (_UTILIZATION * _A100_FLOPS) / 3600, f"FLOPs at {_UTILIZATION:.0%} of an A100's 312 TFLOP/s"


def _flops_per_step(config: TrainingConfig) -> float:
    size = config.optimizer.batch_size
    if isinstance(config, ClipConfig):
        usual = _usual(config).model
        start = config.model.path or config.model.image_path
        forward = (_PAIR_GFLOPS.get(start) or _PAIR_GFLOPS[usual.path or usual.image_path]) * 1e9
        return size * forward * (1 if config.model.freeze else 3)
    if isinstance(config, LanguageModelConfig):
        num_parameters = 1e6 * (_millions(config, config.model.path) if config.model.path else _GPT2_MILLIONS)
        return (2 if config.model.is_frozen else 6) * num_parameters * size * config.data.context_length
    if isinstance(config, SentenceConfig):
        # Spans are mean(Beta(4, 2)) and mean(Beta(2, 4)) of the way from the shortest to the longest.
        data = config.data
        width = data.max_length - data.min_length
        tokens = data.num_anchors * (
            data.min_length + width * 4 / 6 + data.num_positives * (data.min_length + width * 2 / 6)
        )
        return 6 * 1e6 * _millions(config, config.model.path) * size * tokens
    assert isinstance(config, ClassifierConfig)
    # A cell's model.path may be the export of another run, which no full-scale preset has.
    return 6 * 1e6 * _millions(config, config.model.path) * size * config.data.num_tokens


def _millions(config: TrainingConfig, path: str) -> float:
    """Of the model at a path; of one's own weights, those of the preset that they stand for."""
    return _MILLIONS.get(path) or _MILLIONS.get(_usual(config).model.path, _GPT2_MILLIONS)


def _usual(config: TrainingConfig) -> Any:
    """What the preset of a run has."""
    return PRESETS[max((name for name in PRESETS if config.run.name.startswith(f"{name}-")), key=len)]()
