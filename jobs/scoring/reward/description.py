"""The plan of a run in words, before anything is started: prompts, steps, texts, tokens, verifier, leash and memory."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from jobs.engine.masking import masked
from jobs.engine.memory import PROCESS_BYTES, describe_memory
from jobs.scoring.reward.comparison import CONSTANTS, NUM_COMPARED, NUM_FINAL_BATCHES
from jobs.scoring.reward.learning import NUM_TOKENS_AT_A_TIME
from jobs.scoring.reward.plan import Question, RewardPlan
from pipelines.local_copy import local_copy
from tempnet.network import TempNet

_WIDTH = 14
# Copies of the logits of a token that the gradient, or a draw, holds at once: logits, logits/τ, probabilities, products.
_NUM_COPIES = 4
# Numbers per token and hidden unit that a layer without a graph holds: queries, keys, values, the four of the MLP, residuals.
_NUM_PER_UNIT = 10


def describe_plan(plan: RewardPlan, tracking_uri: str) -> str:
    """Return the plan as lines of name and text.

    Args:
        plan: the plan.
        tracking_uri: address of MLflow; empty if the run is not logged.
    """
    config, leash = plan.config, plan.config.leash
    num_texts = config.prompts_per_step * config.group_size
    num_training, num_beside = config.num_steps * num_texts, num_measured_texts(plan)
    longest = max(len(question.ids) for question in plan.questions)
    most = (num_training + num_beside) * config.max_new_tokens
    target = f"{leash.target_kl:g} nats a text" if leash.target_kl is not None else "from the reward at τ = 1"
    where = "1 GPU" if config.workers.use_gpu else f"{config.workers.cpus_per_worker:g} CPUs"
    rows = {
        "run": f"{config.name} in {config.run.directory}",
        "model": f"{config.model}, {_shapes(plan)['parameters']:,} parameters in {config.dtype}, frozen",
        "TempNet": f"{_count(plan):,} parameters, reads {plan.config.temperature.input}",
        "prompts": f"{_describe_questions(plan.questions)}; {plan.num_too_long} too long and left out",
        "held out": _describe_questions(plan.held_out) if plan.held_out else "none: --held-out-prompts FILE",
        "verifier": f"{config.verifier.name}, at most {config.verifier.seconds:g} s a text; reward: {config.reward}",
        "steps": f"{config.num_steps} of {config.prompts_per_step} prompts × {config.group_size} texts; checkpoint every "
        f"{config.checkpoint_every}",
        "texts": f"{num_training:,} to learn from, {num_beside:,} to measure at the beginning and the end",
        "tokens": f"at most {most:,} new ones, {config.max_new_tokens} a text after prompts of at most {longest}",
        "leash": f"KL to settle at a target {target}; λ is {'found' if leash.reset_steps else 'fixed'}, first "
        f"{leash.weight:g}",
        "workers": f"{config.workers.num_workers} × {where}, {config.prompts_at_a_time} prompts at a time",
        "memory": _describe_memory(plan),
        "MLflow": masked(tracking_uri) or "off",
    }
    return "\n".join(f"{name:<{_WIDTH}}{text}" for name, text in rows.items())


def num_measured_texts(plan: RewardPlan) -> int:
    """Return the number of texts that nothing is learned from."""
    config = plan.config
    num_batches = config.leash.num_base_batches + NUM_COMPARED * NUM_FINAL_BATCHES + len(CONSTANTS)
    num_held_out = NUM_COMPARED * len(plan.held_out) * config.group_size
    return num_batches * config.prompts_per_step * config.group_size + num_held_out


def _describe_memory(plan: RewardPlan) -> str:
    """Return the memory of a worker at its peak, by arithmetic: the process, weights, keys and values, and logits."""
    config, shapes = plan.config, _shapes(plan)
    size = getattr(torch, config.dtype).itemsize
    num_texts = config.prompts_at_a_time * config.group_size
    num_tokens = num_texts * (max(len(question.ids) for question in plan.asked) + config.max_new_tokens)
    items = {
        "process": PROCESS_BYTES[config.workers.use_gpu],
        "weights": shapes["parameters"] * size,
        "keys and values": 2 * shapes["layers"] * shapes["key_width"] * num_tokens * size,
        "a layer": _NUM_PER_UNIT * shapes["hidden"] * num_tokens * size,
        "logits": _NUM_COPIES * max(NUM_TOKENS_AT_A_TIME, num_texts) * plan.network.input_size * 4,
    }
    return f"about {describe_memory(items)}"


def _shapes(plan: RewardPlan) -> dict[str, int]:
    """Return the number of parameters, layers, hidden units, and of keys of a token in a layer."""
    remote = plan.config.trust_remote_code
    place = local_copy(plan.config.model, with_weights=False)
    config: Any = AutoConfig.from_pretrained(place, trust_remote_code=remote)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=remote)
    text = config.get_text_config()
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    num_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layers": text.num_hidden_layers,
        "hidden": text.hidden_size,
        "key_width": num_heads * head_size,
    }


def _count(plan: RewardPlan) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in TempNet(plan.network).parameters())


def _describe_questions(questions: tuple[Question, ...]) -> str:
    lengths = [len(question.ids) for question in questions]
    return f"{len(questions)} of {min(lengths)} to {max(lengths)} tokens"
