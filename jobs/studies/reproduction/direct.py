"""Figures that need no training: parameter counts, and the time of training steps and of generation."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.presets.language_models import PRESETS
from tempnet.network import TempNet
from tempnet.network_config import TempNetConfig

# Base model → the number and the configuration of its TempNets. 50 304 is GPT-2's vocabulary, padded.
_NETWORKS = {
    "CLIP": (2, TempNetConfig.for_embeddings(256, rho=8.0)),
    "GPT-2": (1, TempNetConfig.for_logits(50_304)),
    "LLaMA 7B": (1, TempNetConfig.for_logits(32_000)),
}

_NUM_ROUNDS = 8
_NUM_PROMPT_TOKENS = 16
_NUM_NEW_TOKENS = 32


def count_parameters(scale: str, seed: int) -> dict[str, dict[str, float]]:
    """Returns the number of the TempNets' parameters for every base, counted and by formula (Table 13).

    The formula is d0·d1 + d1 + d1·d2 + d2 + 2 per network.
    """
    counts = {}
    for base, (number, config) in _NETWORKS.items():
        with torch.device("meta"):
            counted = sum(parameter.numel() for parameter in TempNet(config).parameters())
        d0, d1, d2 = config.input_size, config.hidden_size, config.num_prototypes
        formula = d0 * d1 + d1 + d1 * d2 + d2 + 2
        counts[base] = {"parameters": float(number * counted), "formula": float(number * formula)}
    return counts


def measure_overhead(scale: str, seed: int) -> dict[str, dict[str, float]]:
    """Returns what TempNet and the robust loss add to the run time of GPT-2 (Table 14).

    The plain model and the one with a TempNet are timed in turn, round after round. `training` and `generation` are
    medians over the rounds of the ratio to the plain model's time in the same round; the other figures are tokens per second.
    Weights and tokens are random, since only their shapes matter. A GPU is used if the preset requires one.
    """
    config = PRESETS["gpt2-scratch-small" if scale == "small" else "gpt2-scratch"]()
    assert isinstance(config, LanguageModelConfig)
    torch.manual_seed(seed)
    if config.workers.num_threads:
        torch.set_num_threads(config.workers.num_threads)
    size = config.optimizer.batch_size
    figures: dict[str, dict[str, float]] = {"plain": {}, "TempNet": {}}
    for task, forms, num_tokens in (
        ("training", _make_training_steps(config), size * config.data.context_length),
        ("generation", _make_generators(config), size * _NUM_NEW_TOKENS),
    ):
        seconds = time_in_turn(forms, _NUM_ROUNDS)
        for form, values in seconds.items():
            ratios = [value / plain for value, plain in zip(values, seconds["plain"], strict=True)]
            figures[form] |= {task: statistics.median(ratios), f"{task}_speed": num_tokens / statistics.median(values)}
    return figures


def time_in_turn(forms: Mapping[str, Callable[[], object]], num_rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of every form in every round, of which one more comes first and warms up.

    The order rotates, so that no form always comes first.
    """
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    order = list(forms)
    for number in range(num_rounds + 1):
        for name in order[number % len(order) :] + order[: number % len(order)]:
            started = time.perf_counter()
            forms[name]()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if number:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def _find_device(config: LanguageModelConfig) -> torch.device:
    if not config.workers.use_gpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("workers.use_gpu = True, but this machine has no GPU to measure on")
    return torch.device("cuda")


def training_step(module: nn.Module, ids: Tensor, positions: Tensor, targets: Tensor) -> Callable[[], None]:
    """Returns a function that does one step: forward, backward, clipping and AdamW, always with the same batch."""
    # The same optimiser as in `jobs.engine.deepspeed_engine`.
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        module(ids, positions, targets)["loss"].backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _make_training_steps(config: LanguageModelConfig) -> dict[str, Callable[[], None]]:
    """Returns the functions that do a training step, by form."""
    from jobs.tasks.language_model.models import build_model
    from pipelines.text.tokenization import load_tokenizer

    device, tokenizer = _find_device(config), load_tokenizer(config.tokenizer)
    shape = (config.optimizer.batch_size, config.data.context_length)
    ids, targets = torch.randint(len(tokenizer), (2, *shape), device=device)
    positions = torch.arange(shape[1], device=device).expand(shape)

    def form(loss: str) -> Callable[[], None]:
        module = build_model(
            dataclasses.replace(config, temperature=dataclasses.replace(config.temperature, loss=loss)), tokenizer
        ).to(device)
        return training_step(module, ids, positions, targets)

    return {"plain": form("ce"), "TempNet": form("dro")}


def _make_generators(config: LanguageModelConfig) -> dict[str, Callable[[], None]]:
    """Returns the functions that sample tokens for a batch of prompts, by form."""
    from jobs.tasks.language_model.models import build_base, build_tempnet, state_size
    from pipelines.text.tokenization import load_tokenizer
    from tempnet.inference import CachedFold, attach

    device, tokenizer = _find_device(config), load_tokenizer(config.tokenizer)
    base = build_base(config, tokenizer).eval()
    base.to(device)
    rho = config.temperature.resolve_rho(len(tokenizer))
    assert rho is not None
    network = build_tempnet(config, len(tokenizer), rho, state_size=state_size(base)).eval().to(device)
    fold = CachedFold.of(base, network)
    prompts = torch.randint(len(tokenizer), (config.optimizer.batch_size, _NUM_PROMPT_TOKENS), device=device)
    options = {
        "input_ids": prompts,
        "attention_mask": torch.ones_like(prompts),
        "max_new_tokens": _NUM_NEW_TOKENS,
        "min_new_tokens": _NUM_NEW_TOKENS,
        "do_sample": True,
        "top_k": 0,
        "pad_token_id": 0,
    }

    def plain() -> None:
        base.generate(**options)

    def with_tempnet() -> None:
        with attach(base, network, fold) as attached:
            base.generate(**options, logits_processor=[attached.processor()])

    return {"plain": plain, "TempNet": with_tempnet}
