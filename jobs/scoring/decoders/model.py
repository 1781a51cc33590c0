"""The frozen model of the bench: hidden states of text, logits of hidden states, and texts that a rule samples.

Shapes: B texts, P tokens of a prompt, N tokens, d hidden size, V effective vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipelines.local_copy import local_copy
from pipelines.text.tokenization import load_tokenizer
from tempnet.base_model import load_base
from tempnet.decoders.rules import Rule, temper
from tempnet.inference import end_ids
from tempnet.models.output_head import find_output_head


class MeasuredText(NamedTuple):
    """The tokens of documents, document after document."""

    hidden: Tensor
    """Hidden state that each token is predicted from: (N, d), float32."""
    targets: Tensor
    """The tokens: (N,)."""
    documents: Tensor
    """Number of each token's document, ascending: (N,)."""

    def part(self, inside: Tensor) -> MeasuredText:
        """Return the tokens that a mask (N,) selects."""
        return MeasuredText(self.hidden[inside], self.targets[inside], self.documents[inside])


@dataclass(frozen=True, slots=True)
class SampledText:
    """A text that a rule has sampled."""

    tokens: list[int]
    """Its tokens, without the token that ends it."""
    num_drawn: int
    """Number of tokens drawn, with the one that ends it."""
    log_probability: float
    """Σ log softmax(z) of the tokens drawn: how probable the model itself, at τ = 1, finds the text, in nats."""


class FrozenModel:
    """A causal language model whose weights stay as they are.

    Args:
        place: directory, URI or hub name of the model.
        vocab_size: V.
        bos_id: token that opens a document.
        precision: precision in which it runs.
        use_gpu: whether it runs on a GPU.

    Raises:
        ValueError: if there is no GPU, or the logits of the model are no function of its last hidden state that is known.
    """

    def __init__(
        self,
        place: str,
        *,
        vocab_size: int,
        bos_id: int,
        precision: Literal["fp32", "bf16"] = "fp32",
        use_gpu: bool = False,
    ) -> None:
        if use_gpu and not torch.cuda.is_available():
            raise ValueError("workers.use_gpu = True: torch finds no CUDA device here")
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
        base = load_base(local_copy(place), fetch=local_copy, dtype=dtype).eval()
        self.device = torch.device("cuda" if use_gpu else "cpu")
        self.base: Any = base.to(self.device)
        head = find_output_head(base)
        if head is None:
            raise ValueError(
                f"model = {place}: its logits are not computed from the last hidden state in a way that is known, and "
                "learned decoders read that state"
            )
        self._head, self.vocab_size, self._bos_id = head, vocab_size, bos_id
        self._ends = set(end_ids(base, load_tokenizer(place, needs_eos=False)))

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits (…, V) in float32 of hidden states (…, d)."""
        return self._head.logits(self.base, hidden.to(self.device), self.vocab_size).float()

    @torch.no_grad()
    def measure(self, documents: Sequence[Sequence[int]], batch_size: int) -> MeasuredText:
        """Return the tokens of documents, none longer than the context, with the states that they are predicted from."""
        found: list[Tensor] = []
        for start in range(0, len(documents), batch_size):
            batch = documents[start : start + batch_size]
            ids = torch.full((len(batch), max(map(len, batch))), self._bos_id)
            for row, tokens in enumerate(batch):
                ids[row, 1 : len(tokens)] = torch.as_tensor(tokens[:-1])
            # Padding is on the right, so that a causal model never attends to it.
            hidden = self.base.base_model(input_ids=ids.to(self.device), use_cache=False)[0]
            found += [state[: len(tokens)].float().cpu() for state, tokens in zip(hidden, batch, strict=True)]
        lengths = torch.tensor([len(tokens) for tokens in documents])
        return MeasuredText(
            torch.cat(found),
            torch.as_tensor(np.concatenate([np.asarray(tokens, dtype=np.int64) for tokens in documents])),
            torch.repeat_interleave(torch.arange(len(documents)), lengths),
        )

    @torch.no_grad()
    def sample(
        self,
        rule: Rule,
        prompts: Sequence[Sequence[int]],
        *,
        num_samples: int,
        num_tokens: int,
        seed: int,
        batch_size: int,
    ) -> list[list[SampledText]]:
        """Return the texts that a rule samples for every prompt.

        The random numbers of a text are fixed by the seed, the place of its prompt and its own number. They are the same
        for all rules, and a text does not depend on the others of its batch.

        Args:
            rule: the rule.
            prompts: token ids of the prompts, none empty.
            num_samples: number of texts for each.
            num_tokens: maximum number of tokens of a text.
            seed: the seed.
            batch_size: number of prompts that are continued together.
        """
        texts: list[list[SampledText]] = [[] for _ in prompts]
        for places in _equal_lengths(prompts, batch_size):
            rows = [(place, number) for place in places for number in range(num_samples)]
            streams = [random.Random(f"{seed}/{place}/{number}") for place, number in rows]
            states = [rule.start(num_samples, _state_seed(seed, place)) for place in places]
            known = [state for state in states if state is not None]
            ids = torch.tensor([list(prompts[place]) for place, _ in rows], device=self.device)
            state = torch.cat(known).to(self.device) if known else None
            made = self._continue(rule, ids, streams, state, num_tokens)
            for (place, _), text in zip(rows, made, strict=True):
                texts[place].append(text)
        return texts

    def _continue(
        self, rule: Rule, ids: Tensor, streams: list[random.Random], state: Tensor | None, num_tokens: int
    ) -> list[SampledText]:
        """Continue prompts (B, P) of equal length."""
        drawn, scores, cache = list[Tensor](), list[Tensor](), None
        ended = torch.zeros(len(ids), dtype=torch.bool)
        for _ in range(num_tokens):
            output = self.base.base_model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache, hidden = output.past_key_values, output[0][:, -1]
            logits = self.logits(hidden)
            log_q = rule.log_probabilities(logits, hidden, state)
            tokens = draw(log_q, [stream.random() for stream in streams])
            scores.append(temper(logits, 1.0).gather(-1, tokens.unsqueeze(-1)).squeeze(-1).cpu())
            drawn.append(tokens.cpu())
            state = rule.advance(state, log_q, tokens)
            ids = tokens.unsqueeze(-1)
            ended |= torch.tensor([token in self._ends for token in drawn[-1].tolist()])
            if bool(ended.all()):
                break
        values = torch.stack(scores, dim=-1)
        return [self._finish(tokens, values[row]) for row, tokens in enumerate(torch.stack(drawn, dim=-1).tolist())]

    def _finish(self, tokens: list[int], scores: Tensor) -> SampledText:
        end = next((place for place, token in enumerate(tokens) if token in self._ends), len(tokens))
        num_drawn = min(end + 1, len(tokens))
        return SampledText(tokens[:end], num_drawn, scores[:num_drawn].double().sum().item())


def draw(log_probabilities: Tensor, numbers: Sequence[float]) -> Tensor:
    """Return one token (B,) per row of log q (B, V): the first at which the cumulative q exceeds the row's number."""
    cumulative = log_probabilities.double().exp().cumsum(-1)
    passed = torch.tensor(numbers, dtype=torch.float64, device=cumulative.device).unsqueeze(-1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, passed, right=True).squeeze(-1)


def _equal_lengths(prompts: Sequence[Sequence[int]], batch_size: int) -> Iterator[list[int]]:
    """Yield the places of prompts of the same length, in batches: no padding, whose treatment differs between models."""
    by_length: dict[int, list[int]] = {}
    for place, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(place)
    for places in by_length.values():
        for start in range(0, len(places), batch_size):
            yield places[start : start + batch_size]


def _state_seed(seed: int, place: int) -> int:
    return random.Random(f"state/{seed}/{place}").getrandbits(62)
