"""Make tiny real models to evaluate, compute their scores by brute force, and provide texts."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from pipelines.text.tokenization import document_start_id, train_bpe
from tempnet.network import TempNet
from tempnet.network_config import TempNetConfig

MAX_LENGTH = 24
NUM_PADDING = 17
TEXT = """
 = First title =

 The quick brown fox , seen in 1 @,@ 000 places , jumps over the lazy dog . It is said that the dog did not mind .
 = = A section = =
 Pack my box with five dozen liquor jugs ; how vexingly quick daft zebras jump !

 = Second title =

 Sphinx of black quartz , judge my vow . The five boxing wizards jump quickly , and the dog sleeps .
"""
LAMBADA = [
    {"text": "the quick brown fox jumps over the lazy dog"},
    {"text": "pack my box with five dozen liquor jugs"},
    {"text": "judge my vow , sphinx of black quartz  "},
    {"text": "wizards"},
]
QUESTIONS = [
    {"query": f"Question: what does the {animal} do", "choices": ["sleeps", "jumps quickly", "judge"], "gold": gold}
    for animal, gold in [("fox", 0), ("dog", 1), ("sphinx", 2), ("zebra", 1), ("wizard", 0), ("box", 2), ("jug", 1)]
]


def make_export(directory: Path, *, seed: int = 0, with_tempnet: bool = True, reads: str = "logits") -> str:
    """Save a random GPT-2 with padding logits, and a TempNet that reads `reads`, in a directory, and return the directory.

    The weights are large enough for predictions and temperatures to differ from token to token.
    """
    torch.manual_seed(seed)
    tokenizer = train_bpe([TEXT] * 3, 320)
    config = AutoConfig.for_model(
        "gpt2", vocab_size=len(tokenizer) + NUM_PADDING, n_embd=32, n_layer=2, n_head=2, n_positions=MAX_LENGTH,
        initializer_range=0.25, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    if with_tempnet:
        sizes = {"rho": 1.0, "hidden_size": 16, "num_prototypes": 8}
        if reads == "logits":
            network = TempNet(TempNetConfig.for_logits(len(tokenizer), **sizes))
        else:
            network = TempNet(TempNetConfig.for_hidden(len(tokenizer), 32, with_logits=reads == "both", **sizes))
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, std=0.7)
        network.save_pretrained(directory / "tempnet")
    return str(directory)


def write_lines(path: Path, records: list[dict]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


class BruteForce:
    """Scores every token by a forward pass over its own context, without batches, padding or chunks."""

    def __init__(self, export: str) -> None:
        self.base = AutoModelForCausalLM.from_pretrained(export).eval()
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(export)
        has_tempnet = (Path(export) / "tempnet").is_dir()
        self.network = TempNet.from_pretrained(Path(export) / "tempnet") if has_tempnet else None
        self.start = document_start_id(self.tokenizer)

    def reset(self) -> None:
        """Undo what :meth:`tau` did to the network."""
        if self.network:
            self.network.set_tau_max_eval(None)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids

    @torch.no_grad()
    def all_logits(self, context: list[int]) -> Tensor:
        """Return the logits of the token after a context, with the padding; :meth:`tau` reads the state of this call."""
        output = self.base(torch.tensor([context]), output_hidden_states=True)
        self.state = output.hidden_states[-1][0, -1]
        return output.logits[0, -1]

    def logits(self, context: list[int]) -> Tensor:
        """Return the logits (V,) of the token after a context."""
        logits = self.all_logits(context)
        return logits[: len(self.tokenizer)] if self.network else logits

    @torch.no_grad()
    def tau(self, logits: Tensor, temperature: str) -> float:
        kind, _, number = temperature.partition(":")
        if kind == "tempnet":
            assert self.network is not None
            self.network.set_tau_max_eval(float(number) if number else None)
            return float(self.network(logits, self.state))
        return float(number or 1.0)

    def nll(self, context: list[int], target: int, temperature: str) -> tuple[float, float, float, bool]:
        """Return (−log p in nats, τ, entropy at τ = 1 in nats, whether the target is the likeliest token)."""
        logits = self.logits(context)
        tau = self.tau(logits, temperature)
        plain = torch.log_softmax(logits.double(), -1)
        value = -float(torch.log_softmax(logits.double() / tau, -1)[target])
        return value, tau, -float((plain.exp() * plain).sum()), int(logits.argmax()) == target

    def continuation(self, context: list[int], targets: list[int], temperature: str) -> list[tuple]:
        whole = context + targets
        return [self.nll(whole[:at][-MAX_LENGTH:], whole[at], temperature) for at in range(len(context), len(whole))]

    def document(self, text: str, temperature: str) -> list[tuple]:
        """Score every token of a document once, given the tokens before it in the window of its block."""
        stream = [self.start, *self.ids(text)]  # `stream[i]` is the token before token i.
        num, out = len(stream) - 1, []
        for index in range(num):
            block = index // MAX_LENGTH
            end = min((block + 1) * MAX_LENGTH, num)
            first = max(0, end - MAX_LENGTH) if block else 0
            out.append(self.nll(stream[first : index + 1], stream[index + 1], temperature))
        return out
