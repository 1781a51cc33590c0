"""Presets of the language-model experiments (TempNet Table 5, §6.1, Appendix D.3), and small twins for two CPU cores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from jobs.engine.config import OptimizerSection, RunSection, TrackingSection, WorkersSection
from jobs.tasks.language_model.config import (
    BlockValidationSection,
    DataSection,
    LanguageModelConfig,
    ModelSection,
    TemperatureSection,
)
from jobs.tasks.presets.twins import named, twins_of

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


def gpt2_finetune() -> LanguageModelConfig:
    """The Pythia suite's GPT-2-size model and a TempNet fine-tuned on OpenWebText2, 50k steps (Table 2)."""
    base = gpt2_scratch()
    return replace(
        base,
        run=replace(base.run, name="gpt2-finetune", num_steps=50_000),
        data=replace(base.data, tokenizer="EleutherAI/pythia-160m"),
        model=ModelSection(path="EleutherAI/pythia-160m", freeze=False),
        # This is the learning rate of Table 5; the text of the paper says 1e-5.
        optimizer=replace(base.optimizer, learning_rate_base=1e-4),
        tracking=replace(base.tracking, paper="TempNet, Table 2"),
    )


def _frozen(
    name: str, path: str, tables: str, *, num_steps: int, rate: float, weight_decay: float, beta2: float
) -> LanguageModelConfig:
    base = gpt2_scratch()
    return replace(
        base,
        run=replace(base.run, name=name, num_steps=num_steps),
        data=replace(base.data, tokenizer=path),
        model=ModelSection(path=path, freeze=True),
        optimizer=replace(
            base.optimizer, batch_size=16, learning_rate_tempnet=rate, weight_decay=weight_decay, beta2=beta2
        ),
        tracking=replace(base.tracking, paper=f"TempNet, {tables}"),
    )


def llama1_7b_frozen() -> LanguageModelConfig:
    """A TempNet for the frozen LLaMA-1 7B, 10k steps (Tables 2 and 10)."""
    path = "huggyllama/llama-7b"
    return _frozen(
        "llama1-7b-frozen", path, "Tables 2 and 10", num_steps=10_000, rate=2e-4, weight_decay=0.1, beta2=0.95
    )


def frozen() -> LanguageModelConfig:
    """A TempNet for your own model: give --model.path, --data.train, --data.validation; ρ is calibrated, the base frozen."""
    base = gpt2_scratch()
    return replace(
        base,
        run=replace(base.run, name="frozen", num_steps=1_000, checkpoint_every=200, log_every=20),
        data=DataSection(train="data/train", validation="data/validation", context_length=256),
        model=ModelSection(path="model"),
        # With this shift the regret is about half of that of a network that reads the raw logits (docs/results.md).
        temperature=replace(base.temperature, rho=None, input_shift="mean"),
        optimizer=replace(
            base.optimizer, batch_size=16, learning_rate_tempnet=1e-2, weight_decay=0.01, warmup_share=0.05
        ),
        workers=replace(base.workers, num_workers=1),
        validation=BlockValidationSection(every=200, num_blocks=128),
        tracking=replace(base.tracking, paper=""),
    )


def _llama2(name: str, path: str, tables: str, num_steps: int = 30_000) -> LanguageModelConfig:
    return _frozen(name, path, tables, num_steps=num_steps, rate=1e-4, weight_decay=0.01, beta2=0.999)


def llama2_7b_frozen() -> LanguageModelConfig:
    """A TempNet for the frozen LLaMA-2 7B, 30k steps (Table 2)."""
    return _llama2("llama2-7b-frozen", "meta-llama/Llama-2-7b-hf", "Table 2")


def llama2_13b_frozen() -> LanguageModelConfig:
    """A TempNet for the frozen LLaMA-2 13B, 30k steps (Table 5)."""
    return _llama2("llama2-13b-frozen", "meta-llama/Llama-2-13b-hf", "Table 5")


def llama2_chat_7b_frozen() -> LanguageModelConfig:
    """A TempNet for the frozen LLaMA-2 Chat 7B, 30k steps (Tables 1, 11 and 12)."""
    return _llama2("llama2-chat-7b-frozen", "meta-llama/Llama-2-7b-chat-hf", "Tables 1, 11 and 12")


def llama2_chat_13b_frozen() -> LanguageModelConfig:
    """A TempNet for the frozen LLaMA-2 Chat 13B, 30k steps (Tables 1, 11 and 12)."""
    return _llama2("llama2-chat-13b-frozen", "meta-llama/Llama-2-13b-chat-hf", "Tables 1, 11 and 12")


def llama2_chat_70b_frozen() -> LanguageModelConfig:
    """A TempNet for the frozen LLaMA-2 Chat 70B, 20k steps (Tables 1, 11 and 12)."""
    config = _llama2(
        "llama2-chat-70b-frozen", "meta-llama/Llama-2-70b-chat-hf", "Tables 1, 11 and 12", num_steps=20_000
    )
    # The bfloat16 weights take 138 GB, too much for any one GPU beside its activations, so ZeRO 3 divides them among
    # eight workers, while they are loaded and during training.
    return replace(config, workers=replace(config.workers, num_workers=8, zero_stage=3))


def _small(
    config: LanguageModelConfig, *, num_steps: int, target_entropy: float, rate_tempnet: float
) -> LanguageModelConfig:
    """Return the twin of a configuration, which trains on the sample data in a few minutes on two CPU cores.

    With a vocabulary of 2 048 tokens ρ = 10 would be infeasible (log V = 7.62), so ρ is given by a target entropy.
    """
    return replace(
        config,
        run=replace(
            config.run, name=f"{config.run.name}-small", num_steps=num_steps, checkpoint_every=200, log_every=20
        ),
        data=DataSection(
            train=f"{SAMPLE_TEXT}/train",
            validation=f"{SAMPLE_TEXT}/validation",
            tokenizer=SAMPLE_TOKENIZER,
            context_length=128,
            prepare_cpus=0.5,
        ),
        temperature=replace(config.temperature, rho=None, target_entropy=target_entropy),
        optimizer=replace(
            config.optimizer,
            batch_size=16,
            learning_rate_base=2e-3,
            learning_rate_tempnet=rate_tempnet,
            warmup_share=0.05,
        ),
        workers=WorkersSection(num_workers=2, cpus_per_worker=0.5, zero_stage=2),
        validation=BlockValidationSection(every=200, num_blocks=64),
    )


def gpt2_scratch_small() -> LanguageModelConfig:
    """The main example: a 4-layer GPT-2 and its TempNet from scratch on the sample data, a few minutes on two cores."""
    config = _small(gpt2_scratch(), num_steps=600, target_entropy=4.9, rate_tempnet=3e-3)
    return replace(config, model=ModelSection(hidden_size=192, num_layers=4, num_heads=6, attention="eager"))


def gpt2_ce_small() -> LanguageModelConfig:
    """The baseline of gpt2-scratch-small: the same GPT-2 by plain cross-entropy, without a TempNet."""
    config = gpt2_scratch_small()
    return replace(
        config,
        run=replace(config.run, name="gpt2-ce-small"),
        temperature=replace(config.temperature, loss="ce"),
    )


def gpt2_finetune_small() -> LanguageModelConfig:
    """The model of gpt2-scratch-small, fine-tuned jointly with a new TempNet on the sample data."""
    config = _small(gpt2_finetune(), num_steps=300, target_entropy=4.0, rate_tempnet=1e-2)
    return replace(config, model=ModelSection(path=SMALL_EXPORT, freeze=False, attention="eager"))


def _frozen_small(config: LanguageModelConfig) -> LanguageModelConfig:
    small = _small(config, num_steps=400, target_entropy=4.0, rate_tempnet=1e-2)
    # An empty path selects the tokenizer of the model, whichever model the user gives.
    small = replace(small, data=replace(small.data, tokenizer=""))
    return replace(small, model=ModelSection(path=SMALL_EXPORT, freeze=True, attention="eager"))


def frozen_small() -> LanguageModelConfig:
    """A TempNet for the frozen model of gpt2-scratch-small with a calibrated ρ, a few minutes on two cores."""
    small = _frozen_small(frozen())
    return replace(small, temperature=replace(small.temperature, target_entropy=None))


def _by_name(*presets: Preset) -> dict[str, Preset]:
    return {preset.__name__.replace("_", "-"): preset for preset in presets}


_LLAMA = _by_name(
    llama1_7b_frozen,
    llama2_7b_frozen,
    llama2_13b_frozen,
    llama2_chat_7b_frozen,
    llama2_chat_13b_frozen,
    llama2_chat_70b_frozen,
)

PRESETS: dict[str, Preset] = named(
    _by_name(gpt2_scratch, gpt2_finetune, frozen)
    | _LLAMA
    | _by_name(gpt2_scratch_small, gpt2_ce_small, gpt2_finetune_small, frozen_small)
    | twins_of(
        _LLAMA,
        _frozen_small,
        "gpt2-scratch-small's model with the optimizer settings of",
        # The models of LLaMA-2 differ in size, which their twins share.
        aliases={name: "llama2-7b-frozen" for name in _LLAMA if name.startswith("llama2-") and "2-7b" not in name},
    )
)
