"""Figures that need no training: parameter counts, gradient scales, and the time of training steps and of generation."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from jobs.tasks.dual_encoder.config import ClipConfig
from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.presets import clip
from jobs.tasks.presets.language_models import PRESETS
from tempnet.contrastive.normalisers import in_batch
from tempnet.contrastive.tiles import artanh_slope, clamp_cosines
from tempnet.network import TempNet
from tempnet.network_config import TempNetConfig

if TYPE_CHECKING:
    from tempnet.models.causal_lm import TemperatureCausalLM

# Base model → the number and the configuration of its TempNets. 50 304 is GPT-2's vocabulary, padded.
_NETWORKS = {
    "CLIP": (2, TempNetConfig.for_embeddings(256, rho=8.0)),
    "GPT-2": (1, TempNetConfig.for_logits(50_304)),
    "LLaMA 7B": (1, TempNetConfig.for_logits(32_000)),
}

COSINES = (-0.9, -0.5, 0.0, 0.3, 0.5, 0.7, 0.9, 0.99, 0.999)
"""Cosines C at which the gradient scale is measured."""
# Name of a form → (τ, number N of texts); τ None: the temperature-free loss.
_FORMS = {
    **{f"τ = {tau:g}": (tau, 2) for tau in (0.07, 0.1, 0.25, 0.5, 1.0)},
    "temperature-free": (None, 2),
    **{f"τ = 0.25, N = {size}": (0.25, size) for size in (2, 4, 8, 16)},
    **{f"temperature-free, N = {size}": (None, size) for size in (2, 16)},
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


def measure_gradient_scales(scale: str, seed: int) -> dict[str, dict[str, float]]:
    """Return |∂loss/∂C| of an anchor whose positive has the cosine C and whose N − 1 negatives have −C, for every form.

    The scenario is that of arXiv 2501.17683, Figures 2 to 5. With W the sum of the negatives' weights, the slope of the
    positive is −W and that of the negatives together W.
    """
    scales = {}
    for name, (tau, size) in _FORMS.items():
        cosines = torch.tensor([COSINES, COSINES], dtype=torch.float64)
        scores = cosines if tau else 2.0 * clamp_cosines(cosines).atanh()
        temperature = torch.full_like(scores, tau or 1.0)
        log_sums = math.log(size - 1) - 2.0 * scores / temperature
        weights = in_batch(log_sums, temperature, torch.ones(len(COSINES), dtype=torch.bool)).log_weight[0].exp()
        slopes = 2.0 * weights if tau else 2.0 * weights * artanh_slope(cosines[0])
        scales[name] = {f"slope at {cosine:g}": slope for cosine, slope in zip(COSINES, slopes.tolist(), strict=True)}
    return scales


def measure_overhead(scale: str, seed: int) -> dict[str, dict[str, float]]:
    """Returns what TempNet and the robust loss add to the run time of GPT-2 (Table 14).

    `training` and `generation` are medians over rounds of the ratio to the plain model's time in the same round; the other
    figures are tokens per second. Weights and tokens are random. A GPU is used if the preset requires one.
    """
    from jobs.tasks.language_model.models import build_base, build_model, build_tempnet, state_size
    from pipelines.text.tokenization import load_tokenizer

    config = PRESETS["gpt2-scratch-small" if scale == "small" else "gpt2-scratch"]()
    device, tokenizer = _find_device(config, seed), load_tokenizer(config.tokenizer)
    size, length = config.optimizer.batch_size, config.data.context_length
    ids, targets = torch.randint(len(tokenizer), (2, size, length), device=device)
    positions = torch.arange(length, device=device).expand(size, length)

    def step(loss: str) -> Callable[[], None]:
        changed = dataclasses.replace(config, temperature=dataclasses.replace(config.temperature, loss=loss))
        return training_step(build_model(changed, tokenizer).to(device), ids, positions, targets)

    steps = {"plain": step("ce"), "TempNet": step("dro")}
    base: Any = build_base(config, tokenizer).eval().to(device)
    rho = config.temperature.resolve_rho(len(tokenizer))
    assert rho is not None
    network = build_tempnet(config, len(tokenizer), rho, state_size=state_size(base)).eval().to(device)
    prompts = torch.randint(len(tokenizer), (size, _NUM_PROMPT_TOKENS), device=device)
    return _compare(
        training=(steps, size * length), generation=(_generators(base, network, prompts), size * _NUM_NEW_TOKENS)
    )


def measure_llama_overhead(scale: str, seed: int) -> dict[str, dict[str, float]]:
    """Returns what a TempNet adds to a frozen base of LLaMA 7B's width and vocabulary (Table 14), as `measure_overhead`.

    At small scale the base has one of the 32 layers, and random weights. Training is one step of the TempNet against the
    base's forward pass with the cross-entropy, which is what the base costs without a TempNet.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    from tempnet.models.causal_lm import TemperatureCausalLM
    from tempnet.softmax.config import TemperatureLossConfig

    is_small = scale == "small"
    torch.manual_seed(seed)
    device = torch.device("cpu" if is_small or not torch.cuda.is_available() else "cuda")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with device:
        base: Any = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1 if is_small else 32))
    base = base.to(dtype=dtype).eval().requires_grad_(False)
    size, vocab_size = 64 if is_small else base.config.max_position_embeddings, base.config.vocab_size
    ids, targets = torch.randint(vocab_size, (2, 1, size), device=device)
    positions = torch.arange(size, device=device).expand(1, size)

    def module(loss: str) -> TemperatureCausalLM:
        network = TempNet(TempNetConfig.for_logits(vocab_size, rho=6.0)).to(device) if loss == "dro" else None
        options = TemperatureLossConfig(name=loss, rho=6.0 if network else 0.0)
        return TemperatureCausalLM(base, network, options, vocab_size=vocab_size, freeze_base=True)

    plain, trained = module("ce"), module("dro")

    def forward() -> None:
        with torch.no_grad():
            plain(ids, positions, targets)

    assert trained.tempnet is not None
    steps = {"plain": forward, "TempNet": training_step(trained, ids, positions, targets)}
    prompts = torch.randint(vocab_size, (1, _NUM_PROMPT_TOKENS), device=device)
    return _compare(training=(steps, size), generation=(_generators(base, trained.tempnet, prompts), _NUM_NEW_TOKENS))


def measure_clip_overhead(scale: str, seed: int) -> dict[str, dict[str, float]]:
    """Returns what two TempNets and the robust loss add to a training step of CLIP (Table 14), as `measure_overhead`."""
    from jobs.tasks.dual_encoder.task import add_loss, build_encoder
    from pipelines.text.tokenization import load_tokenizer

    def form(name: str) -> Callable[[], None]:
        config = clip.PRESETS[f"{name}-small" if scale == "small" else name]()
        device = _find_device(config, seed)
        encoder = build_encoder(config, load_tokenizer(config.tokenizer, needs_eos=False))
        size, pixels, width = config.optimizer.batch_size, config.model.image_size, config.data.num_text_tokens
        module = add_loss(encoder, config, num_pairs=size, device=device)
        inputs = {
            "images": torch.randint(256, (size, pixels, pixels, 3), dtype=torch.uint8, device=device),
            "input_ids": torch.randint(5, 100, (size, width), device=device),
            "attention_mask": torch.ones(size, width, dtype=torch.long, device=device),
        }
        numbers = torch.arange(size, device=device)
        return _step(module, lambda: module(ids=numbers, image_ids=numbers, gamma=0.8, **inputs)["loss"])

    forms = {"plain": form(plain := "clip-cc3m-clip"), "TempNet": form("clip-cc3m-tempnet")}
    config = clip.PRESETS[f"{plain}-small" if scale == "small" else plain]()
    return _compare(training=(forms, config.optimizer.batch_size))


def _compare(**tasks: tuple[Mapping[str, Callable[[], object]], int]) -> dict[str, dict[str, float]]:
    """Returns form → the median ratio to the plain form's time in the same round, and items per second, of every task."""
    figures: dict[str, dict[str, float]] = {"plain": {}, "TempNet": {}}
    for task, (forms, num_items) in tasks.items():
        seconds = time_in_turn(forms, _NUM_ROUNDS)
        for form, values in seconds.items():
            ratios = [value / plain for value, plain in zip(values, seconds["plain"], strict=True)]
            figures[form] |= {task: statistics.median(ratios), f"{task}_speed": num_items / statistics.median(values)}
    return figures


def time_in_turn(forms: Mapping[str, Callable[[], object]], num_rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every form in every round, after one that warms up; the order rotates, which favours none."""
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


def _find_device(config: LanguageModelConfig | ClipConfig, seed: int) -> torch.device:
    """Return the device that a preset asks for, with this process's random numbers and threads set as for a run."""
    torch.manual_seed(seed)
    if config.workers.num_threads:
        torch.set_num_threads(config.workers.num_threads)
    if not config.workers.use_gpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("workers.use_gpu = True, but this machine has no GPU to measure on")
    return torch.device("cuda")


def training_step(module: nn.Module, ids: Tensor, positions: Tensor, targets: Tensor) -> Callable[[], None]:
    """Returns a function that does one step: forward, backward, clipping and AdamW, always with the same batch."""
    return _step(module, lambda: module(ids, positions, targets)["loss"])


def _step(module: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    # The same optimiser as in `jobs.engine.deepspeed_engine`.
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)

    def step() -> None:
        loss().backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _generators(base: Any, network: TempNet, prompts: Tensor) -> dict[str, Callable[[], None]]:
    from tempnet.inference import CachedFold, attach

    fold = CachedFold.of(base, network)
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
