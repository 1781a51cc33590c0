"""Generate three texts side by side, one token at a time: at predicted temperatures, at a constant one, and by min-p.

Shapes: 3 texts, V effective vocabulary.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from jobs.scoring.playground.config import PlaygroundConfig, Settings
from jobs.tasks.base import naming_field
from pipelines.local_copy import local_copy
from pipelines.text.tokenization import added_text, encode_prompt, load_tokenizer
from tempnet.base_model import load_base
from tempnet.devices import input_device, loading_options, move_base
from tempnet.inference import check_prompts, end_ids
from tempnet.loading import check_vocabulary, load_tempnet
from tempnet.network import TempNet
from tempnet.serving.batch import BatchTemperatures

TEXTS = ("tempnet", "constant", "min_p")
NUM_ALTERNATIVES = 8
"""Number of most likely next tokens that the page shows for every token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One generated token."""

    text: str
    """What it adds to the text."""
    tau: float
    """Temperature at which it was drawn; 1 for min-p."""
    entropy: float
    """Entropy of the distribution that it was drawn from, in nats."""
    alternatives: Sequence[tuple[str, float]]
    """The most likely tokens of that distribution, with their probabilities."""


class Playground:
    """A model and its TempNet, which serve one request at a time."""

    def __init__(self, base: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tempnet: TempNet) -> None:
        check_vocabulary(base, tempnet)
        self.base, self.tokenizer = base.eval(), tokenizer
        self.temperatures = BatchTemperatures(tempnet, input_device(base))
        self._ends = set(end_ids(base, tokenizer))
        self._lock = threading.Lock()

    @classmethod
    def load(cls, config: PlaygroundConfig) -> Playground:
        """Load model, tokenizer and TempNet.

        Raises:
            OSError: if a file cannot be read, or there is no TempNet.
            ValueError: if the device is missing, weights are damaged, or the parts do not fit together.
        """
        device = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError(f"device = {device}: torch finds no CUDA device here; cpu is one")
        with naming_field("model = "):
            place = local_copy(config.model)
        with naming_field("tempnet = " if config.tempnet else "model = "):
            tempnet = load_tempnet(local_copy(config.tempnet) if config.tempnet else place)
        tokenizer = load_tokenizer(place, needs_eos=False)
        with naming_field("model = "):
            base = load_base(
                place,
                fetch=local_copy,
                trust_remote_code=config.trust_remote_code,
                device_map=config.device_map,
                **loading_options(config.dtype),
            )
        return cls(move_base(base, device), tokenizer, tempnet)

    def generate(self, settings: Settings) -> Iterator[dict[str, Token]]:
        """Yield the next token of every text that has not ended, by the name of the text (`TEXTS`).

        Raises:
            ValueError: if the prompt and the new tokens do not fit into the context.
        """
        ids = encode_prompt(self.tokenizer, settings.prompt)
        tokens = torch.tensor([ids] * len(TEXTS), device=self.temperatures.device)
        check_prompts(self.base, tokens, None, settings.num_tokens)
        return self._steps(tokens, settings)

    def _steps(self, tokens: Tensor, settings: Settings) -> Iterator[dict[str, Token]]:
        generators = [torch.Generator().manual_seed(settings.seed) for _ in TEXTS]
        running, written = set(range(len(TEXTS))), tokens.tolist()
        cache: Any = None
        # One request at a time: a second one would only make both slow. A page that is closed ends its generator.
        with self._lock:
            for _ in range(settings.num_tokens):
                with torch.inference_mode():
                    output = self.base(input_ids=tokens, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                log_probabilities, tau = self._distributions(output.logits[:, -1], settings)
                drawn = [
                    int(torch.multinomial(row.exp(), 1, generator=generator))
                    for row, generator in zip(log_probabilities, generators, strict=True)
                ]
                tokens = torch.tensor(drawn, device=self.temperatures.device).unsqueeze(-1)
                running -= {text for text in running if drawn[text] in self._ends}
                if not running:
                    return
                made = {}
                for text in sorted(running):
                    written[text].append(drawn[text])
                    made[TEXTS[text]] = self._token(written[text], log_probabilities[text], float(tau[text]))
                yield made

    @torch.inference_mode()
    def _distributions(self, logits: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
        """Return the logarithms (3, V) of the distributions that tokens are drawn from, on the CPU, and their τ (3,)."""
        logits = logits[:, : self.temperatures.vocab_size].float()
        tau = self.temperatures.predict(logits[:1], torch.tensor([settings.tau_max], device=logits.device))
        tau = torch.cat([tau, tau.new_tensor([settings.constant, 1.0])])
        made = torch.log_softmax(logits / tau.unsqueeze(-1), dim=-1)
        if settings.min_p > 0.0:
            too_small = made[2] < made[2].amax() + math.log(settings.min_p)
            made[2] = torch.log_softmax(made[2].masked_fill(too_small, -math.inf), dim=-1)
        return made.cpu(), tau.cpu()

    def _token(self, written: list[int], log_probabilities: Tensor, tau: float) -> Token:
        probabilities = log_probabilities.exp()
        top = probabilities.topk(min(NUM_ALTERNATIVES, len(probabilities)))
        return Token(
            text=added_text(self.tokenizer, written[:-1], written[-1]),
            tau=tau,
            entropy=float(torch.special.entr(probabilities).sum()),
            alternatives=[
                (
                    added_text(self.tokenizer, written[:-1], int(index)) or str(self.tokenizer.decode([int(index)])),
                    round(float(value), 6),
                )
                for value, index in zip(*top, strict=True)
                if value > 0.0
            ],
        )
