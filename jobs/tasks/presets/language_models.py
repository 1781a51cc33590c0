"""Presets of the language-model experiments (TempNet Table 5, §6.1, Appendix D.3), and small twins for two CPU cores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jobs.engine.config import OptimizerSection, RunSection, TrackingSection, WorkersSection
from jobs.engine.fields import with_fields
from jobs.tasks.language_model.config import (
    BlockValidationSection,
    DataSection,
    LanguageModelConfig,
    TemperatureSection,
)
from jobs.tasks.presets import TWO_WORKERS, named, twins_of, variant

Preset = Callable[[], LanguageModelConfig]

SAMPLE_TEXT = "data/sample/text"
SAMPLE_TOKENIZER = "data/sample/tokenizer"
SMALL_EXPORT = "runs/gpt2-scratch-small/export"


def gpt2_scratch() -> LanguageModelConfig:
    """GPT-2 125M and its TempNet from scratch on OpenWebText2, 320k steps (Tables 2, 4 and 15)."""
    return LanguageModelConfig(
        run=RunSection(name="gpt2-scratch", num_steps=320_000, checkpoint_every=2_000, log_every=50),
        data=DataSection(train="data/openwebtext2/train", validation="data/openwebtext2/validation", tokenizer="gpt2"),
        temperature=TemperatureSection(rho=10.0),
        optimizer=OptimizerSection(batch_size=32, learning_rate_base=6e-4, learning_rate_tempnet=1e-4),
        workers=WorkersSection(num_workers=4, use_gpu=True, zero_stage=2),
        validation=BlockValidationSection(every=2_000, num_blocks=512),
        tracking=TrackingSection(paper="TempNet, Tables 2, 4 and 15"),
    )


_gpt2_finetune = variant(
    gpt2_scratch,
    "The Pythia suite's GPT-2-size model and a TempNet fine-tuned on OpenWebText2, 50k steps (Table 2).",
    {
        "run.num_steps": 50_000,
        "data.tokenizer": "EleutherAI/pythia-160m",
        "model.path": "EleutherAI/pythia-160m",
        "model.freeze": False,
        # This is the learning rate of Table 5; the text of the paper says 1e-5.
        "optimizer.learning_rate_base": 1e-4,
        "tracking.paper": "TempNet, Table 2",
    },
)

_frozen = variant(
    gpt2_scratch,
    "A TempNet for your own model: give --model.path, --data.train, --data.validation; ρ is calibrated, the base frozen.",
    {
        "run.num_steps": 1_000,
        "run.checkpoint_every": 200,
        "run.log_every": 20,
        "data.train": "data/train",
        "data.validation": "data/validation",
        "data.tokenizer": "",
        "data.context_length": 256,
        "model.path": "model",
        "temperature.rho": None,
        # With this shift the regret is about half of that of a network that reads the raw logits.
        "temperature.input_shift": "mean",
        "optimizer.batch_size": 16,
        "optimizer.learning_rate_tempnet": 1e-2,
        "optimizer.weight_decay": 0.01,
        "optimizer.warmup_share": 0.05,
        "workers.num_workers": 1,
        "validation.every": 200,
        "validation.num_blocks": 128,
        "tracking.paper": "",
    },
)


def _llama(model: str, path: str, num_steps: int, tables: str, **changes: Any) -> Preset:
    return variant(
        gpt2_scratch,
        f"A TempNet for the frozen {model}, {num_steps // 1000}k steps ({tables}).",
        {
            "run.num_steps": num_steps,
            "data.tokenizer": path,
            "model.path": path,
            "model.freeze": True,
            "optimizer.batch_size": 16,
            "optimizer.learning_rate_tempnet": 1e-4,
            "optimizer.weight_decay": 0.01,
            "optimizer.beta2": 0.999,
            "tracking.paper": f"TempNet, {tables}",
            **{name.replace("__", "."): value for name, value in changes.items()},
        },
    )


_CHAT = "Tables 1, 11 and 12"
_LLAMA: dict[str, Preset] = {
    "llama1-7b-frozen": _llama(
        "LLaMA-1 7B", "huggyllama/llama-7b", 10_000, "Tables 2 and 10",
        optimizer__learning_rate_tempnet=2e-4, optimizer__weight_decay=0.1, optimizer__beta2=0.95,
    ),
    "llama2-7b-frozen": _llama("LLaMA-2 7B", "meta-llama/Llama-2-7b-hf", 30_000, "Table 2"),
    "llama2-13b-frozen": _llama("LLaMA-2 13B", "meta-llama/Llama-2-13b-hf", 30_000, "Table 5"),
    "llama2-chat-7b-frozen": _llama("LLaMA-2 Chat 7B", "meta-llama/Llama-2-7b-chat-hf", 30_000, _CHAT),
    "llama2-chat-13b-frozen": _llama("LLaMA-2 Chat 13B", "meta-llama/Llama-2-13b-chat-hf", 30_000, _CHAT),
    # The bfloat16 weights take 138 GB, too much for any one GPU beside its activations, so ZeRO 3 divides them among
    # eight workers, while they are loaded and during training.
    "llama2-chat-70b-frozen": _llama(
        "LLaMA-2 Chat 70B", "meta-llama/Llama-2-70b-chat-hf", 20_000, _CHAT, workers__num_workers=8, workers__zero_stage=3
    ),
}  # fmt: skip

_SMALL: dict[str, Any] = {
    "run.checkpoint_every": 200,
    "run.log_every": 20,
    "data.train": f"{SAMPLE_TEXT}/train",
    "data.validation": f"{SAMPLE_TEXT}/validation",
    "data.tokenizer": SAMPLE_TOKENIZER,
    "data.context_length": 128,
    "data.prepare_cpus": 0.5,
    "model.attention": "eager",
    # With a vocabulary of 2 048 tokens ρ = 10 would be infeasible (log V = 7.62), so ρ is given by a target entropy.
    "temperature.rho": None,
    "temperature.target_entropy": 4.0,
    "optimizer.batch_size": 16,
    "optimizer.learning_rate_base": 2e-3,
    "optimizer.learning_rate_tempnet": 1e-2,
    "optimizer.warmup_share": 0.05,
    **TWO_WORKERS,
    "validation.every": 200,
    "validation.num_blocks": 64,
}
"""What trains on the sample data in a few minutes on two CPU cores."""
_SMALL_FROZEN = _SMALL | {
    "run.num_steps": 400,
    "data.tokenizer": "",  # that of the model, whichever model the user gives
    "model.path": SMALL_EXPORT,
    "model.freeze": True,
}

gpt2_scratch_small = variant(
    gpt2_scratch,
    "The main example: a 4-layer GPT-2 and its TempNet from scratch on the sample data, a few minutes on two cores.",
    _SMALL
    | {
        "run.num_steps": 600,
        "model.hidden_size": 192,
        "model.num_layers": 4,
        "model.num_heads": 6,
        "temperature.target_entropy": 4.9,
        "optimizer.learning_rate_tempnet": 3e-3,
    },
)
frozen_small = variant(
    _frozen,
    "A TempNet for the frozen model of gpt2-scratch-small with a calibrated ρ, a few minutes on two cores.",
    _SMALL_FROZEN | {"temperature.target_entropy": None},
)

PRESETS: dict[str, Preset] = named(
    {"gpt2-scratch": gpt2_scratch, "gpt2-finetune": _gpt2_finetune, "frozen": _frozen}
    | _LLAMA
    | {
        "gpt2-scratch-small": gpt2_scratch_small,
        "gpt2-ce-small": variant(
            gpt2_scratch_small,
            "The baseline of gpt2-scratch-small: the same GPT-2 by plain cross-entropy, without a TempNet.",
            {"temperature.loss": "ce"},
        ),
        "gpt2-finetune-small": variant(
            _gpt2_finetune,
            "The model of gpt2-scratch-small, fine-tuned jointly with a new TempNet on the sample data.",
            _SMALL | {"run.num_steps": 300, "model.path": SMALL_EXPORT},
        ),
        "frozen-small": frozen_small,
    }
    | twins_of(
        _LLAMA,
        lambda config: with_fields(config, _SMALL_FROZEN),
        "gpt2-scratch-small's model with the optimizer settings of",
        # The models of LLaMA-2 differ in size, which their twins share.
        aliases={name: "llama2-7b-frozen" for name in _LLAMA if name.startswith("llama2-") and "2-7b" not in name},
    )
)
