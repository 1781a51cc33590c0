"""Predict the temperature of every token of one's own text with a trained model, and show it as a coloured page.

python -m jobs.predict_temperatures --model runs/gpt2-scratch-small/export --text README.md
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from transformers import AutoModelForCausalLM

from jobs.command_line import fail
from jobs.training.report import coloured_page
from pipelines.tokenization import document_start_id, load_tokenizer, token_texts
from tempnet.network import PAIRED_DIRECTORY, TempNet


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictTemperaturesConfig:
    """A model, a text, and where the page goes."""

    model: str
    """An exported directory: a Transformers model with `tempnet/` beside it."""
    text: str
    """A UTF-8 text file."""
    output: str = "temperatures.html"
    """The page to write."""
    max_tokens: int = 4096
    """Tokens of the text that are read, at most."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens = {self.max_tokens} must be positive")


@torch.no_grad()
def predict(config: PredictTemperaturesConfig) -> tuple[list[str], np.ndarray, np.ndarray]:
    """(tokens, τ, entropy at τ = 1) of the text; τ and entropy belong to the prediction of the token.

    A text longer than the model's context is read in windows that do not see each other.
    """
    network = TempNet.from_pretrained(Path(config.model) / PAIRED_DIRECTORY)
    tokenizer = load_tokenizer(config.model)
    if len(tokenizer) != network.config.input_size:
        raise ValueError(
            f"the tokenizer of {config.model} has {len(tokenizer)} tokens, its TempNet was built for a vocabulary of "
            f"{network.config.input_size}"
        )
    base = AutoModelForCausalLM.from_pretrained(config.model).eval()
    try:
        content = Path(config.text).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{config.text} is not UTF-8: {error}") from error
    ids = tokenizer.backend_tokenizer.encode(content, add_special_tokens=False).ids[: config.max_tokens]
    if not ids:
        raise ValueError(f"{config.text} holds no text")
    stream = torch.tensor([document_start_id(tokenizer), *ids])
    taus, entropies = [], []
    for window in stream[:-1].split(base.config.max_position_embeddings):
        logits = base(window.unsqueeze(0)).logits[0, :, : network.config.input_size].float()
        log_probs = torch.log_softmax(logits, dim=-1)
        taus.append(network(logits))
        entropies.append(-(log_probs.exp() * log_probs).sum(-1))
    return token_texts(tokenizer, ids), torch.cat(taus).numpy(), torch.cat(entropies).numpy()


def main(arguments: Sequence[str]) -> int:
    """Run the job."""
    try:
        config = tyro.cli(
            PredictTemperaturesConfig, args=arguments, prog="python -m jobs.predict_temperatures", description=__doc__
        )
        tokens, tau, entropy = predict(config)
        page = coloured_page(
            title=f"Temperatures of {config.text}", sections={config.text: (tokens, tau.tolist(), entropy.tolist())}
        )
        Path(config.output).write_text(page, encoding="utf-8")
    except (ValueError, OSError) as error:
        fail(str(error))
    low, middle, high = np.quantile(tau, [0.05, 0.5, 0.95])
    print(f"{len(tau)} tokens: mean τ {tau.mean():.3f}; 5 %, 50 %, 95 %: {low:.3f}, {middle:.3f}, {high:.3f}")
    print(f"{config.output} shows every token coloured by its τ")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
