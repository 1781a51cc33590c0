"""Make tiny language models and TempNets to generate with, and a batch of prompts."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3Config, PreTrainedModel

from tempnet import TempNet, TempNetConfig

VOCABULARY = 61  # of 64 logits: the last three are padding
PROMPTS = [[5, 9, 11, 23, 42, 7], [8, 30], [60, 1, 2, 3]]


def make_base(architecture: str, **changes: object) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        architecture,
        **{
            "vocab_size": 64,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "bos_token_id": 0,
            "eos_token_id": None,
            "pad_token_id": 0,
            "initializer_range": 0.5,  # logits that differ, so that τ does
            **({} if architecture == "gpt2" else {"intermediate_size": 64, "num_key_value_heads": 2}),
            **changes,
        },
    )
    return AutoModelForCausalLM.from_config(config).eval()


def make_composite() -> PreTrainedModel:
    """Return a model of text and images, whose configuration holds that of its text."""
    torch.manual_seed(0)
    text = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
    text |= {"num_key_value_heads": 1, "intermediate_size": 64, "max_position_embeddings": 64, "initializer_range": 0.5}
    image = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 8,
        "image_size": 28,
    }
    tokens = {"image_token_index": 63, "boi_token_index": 62, "eoi_token_index": 61}
    config = Gemma3Config(text_config=text, vision_config=image, mm_tokens_per_image=4, **tokens)
    return AutoModelForCausalLM.from_config(config).eval()


def make_tempnet(
    vocab_size: int = VOCABULARY, *, kind: str = "logits", state_size: int = 32, noise: float = 1.0, **changes: object
) -> TempNet:
    """Create a network that reads logits, hidden states, or both."""
    torch.manual_seed(1)
    sizes = {"rho": 1.5, "hidden_size": 16, "num_prototypes": 8, **changes}
    if kind == "logits":
        config = TempNetConfig.for_logits(vocab_size, **sizes)
    else:
        config = TempNetConfig.for_hidden(vocab_size, state_size, with_logits=kind == "both", **sizes)
    network = TempNet(config)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return network.eval()


def left_padded(prompts: list[list[int]]) -> dict[str, Tensor]:
    width = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts]),
        "attention_mask": torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
    }
