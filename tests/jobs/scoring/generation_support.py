"""Make tiny models to generate with, and run the generation job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from evaluation_support import write_lines
from transformers import AutoConfig, AutoModelForCausalLM

from jobs.generate import main
from pipelines.text.tokenization import train_bpe
from tempnet import TempNet, TempNetConfig

VOCABULARY = 300
CORPUS = [path.read_text() for path in sorted(Path(__file__).parents[3].joinpath("tempnet").glob("*.py"))]
PROMPTS = ["def", "the temperature of a token", "x", "class TempNet(nn.Module): a network", "for the base model"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_model(directory: Path, architecture: str, context: int, *, tempnet: bool = True, chat: bool = False) -> Path:
    tokenizer = train_bpe(CORPUS, VOCABULARY)
    tokenizer.chat_template = CHAT_TEMPLATE if chat else None
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        architecture,
        vocab_size=VOCABULARY + 4,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=context,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=0,
        **({} if architecture == "gpt2" else {"intermediate_size": 64, "num_key_value_heads": 2}),
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    if tempnet:
        # As the published networks for LLaMA, that of a Llama cannot be folded into the output layer.
        shift: Any = "max" if architecture == "llama" else "none"
        sizes = {"hidden_size": 16, "num_prototypes": 8}
        network = TempNet(TempNetConfig.for_logits(VOCABULARY, rho=2.0, input_shift=shift, **sizes))
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(torch.randn_like(parameter))
        network.save_pretrained(directory / "tempnet")
    return directory


def write_prompts(path: Path, prompts: list[str] = PROMPTS) -> Path:
    return Path(write_lines(path, [{"prompt": prompt, "id": f"p{i}"} for i, prompt in enumerate(prompts)]))


def generate(model: Path, prompts: Path, output: Path, *options: str) -> None:
    arguments = ["--model", model, "--prompts", prompts, "--output", output, "--max-new-tokens", "12", *options]
    assert main([str(argument) for argument in arguments]) == 0


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
