"""A text encoder with mean pooling, and its directory format, which the library sentence-transformers can read too.

The directory contains:

    config.json, model.safetensors, the tokenizer       a Transformers model
    modules.json, sentence_bert_config.json, 1_Pooling/config.json
                                                        configuration of mean pooling for sentence-transformers

Shapes: n sentences, t tokens, d width of the encoder.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from tempnet.models.towers import load_tower

# Models that number the positions of tokens from pad_token_id + 1 on.
_OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert", "mpnet")
_SETTINGS_FILE = "sentence_bert_config.json"
_MODULES = (("0", "", "Transformer"), ("1", "1_Pooling", "Pooling"))


def saved_num_tokens(directory: str | Path) -> int | None:
    """Return the number of tokens that a saved sentence encoder truncates sentences to, or None if it is not given."""
    file = Path(directory, _SETTINGS_FILE)
    return int(json.loads(file.read_text())["max_seq_length"]) if file.is_file() else None


def num_positions(config: PreTrainedConfig) -> int | None:
    """Return the maximum number of tokens that an encoder accepts, or None if the configuration gives no limit."""
    positions = getattr(config, "max_position_embeddings", None)
    if positions and config.model_type in _OFFSET_POSITIONS:
        return int(positions) - int(config.pad_token_id) - 1
    return int(positions) if positions else None


def mean_pooling(tokens: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the means (n, d) of token vectors (n, t, d) in float32.

    `attention_mask` (n, t) is 1 for tokens and 0 for padding. A sentence without tokens has the mean 0.
    """
    weights = attention_mask.unsqueeze(-1).float()
    return (tokens.float() * weights).sum(1) / weights.sum(1).clamp(min=1.0)


class SentenceEncoder(nn.Module):
    """Any Transformers text encoder whose output contains `last_hidden_state`, with mean pooling.

    `autocast_dtype` is the dtype of its matrix products; parameters and embeddings stay in float32.
    """

    def __init__(self, encoder: PreTrainedModel, *, autocast_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.encoder, self.autocast_dtype = encoder, autocast_dtype

    @property
    def embedding_size(self) -> int:
        """Dimension d of the embeddings."""
        return int(self.encoder.config.hidden_size)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return embeddings (n, d) in float32 of tokens (n, t) and their mask; they are not normalised."""
        autocast = self.autocast_dtype
        with torch.autocast(input_ids.device.type, dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            tokens = self.encoder(input_ids=input_ids, attention_mask=attention_mask)["last_hidden_state"]
        return mean_pooling(tokens, attention_mask)

    @torch.no_grad()
    def encode(
        self,
        texts: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        *,
        num_tokens: int | None = None,
        batch_size: int = 64,
    ) -> Tensor:
        """Return embeddings (n, d) of n texts, in float32 on the CPU, computed in eval mode, `batch_size` texts at a time.

        Texts of similar length are processed together. Longer texts are truncated to `num_tokens`, by default the
        tokenizer's own maximum.
        """
        was_training = self.training
        self.eval()
        device = next(self.parameters()).device
        tokens = tokenizer(list(texts), truncation=True, max_length=num_tokens)["input_ids"] if texts else []
        rows = torch.empty(len(texts), self.embedding_size)
        order = sorted(range(len(texts)), key=lambda number: len(tokens[number]))
        for at in range(0, len(order), batch_size):
            few = order[at : at + batch_size]
            padded = tokenizer.pad({"input_ids": [tokens[number] for number in few]}, return_tensors="pt")
            rows[few] = self(padded["input_ids"].to(device), padded["attention_mask"].to(device)).cpu()
        self.train(was_training)
        return rows

    def save_pretrained(self, directory: str | Path, tokenizer: PreTrainedTokenizerBase, *, num_tokens: int) -> None:
        """Save the encoder and its tokenizer in the layout that the docstring of this module describes.

        After loading, longer sentences are truncated to `num_tokens`.
        """
        directory = Path(directory)
        self.encoder.save_pretrained(directory)
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.model_max_length = num_tokens
        tokenizer.save_pretrained(directory)
        modules = [
            {"idx": number, "name": name, "path": path, "type": f"sentence_transformers.models.{kind}"}
            for number, (name, path, kind) in enumerate(_MODULES)
        ]
        pooling = {"word_embedding_dimension": self.embedding_size, "pooling_mode_mean_tokens": True} | {
            f"pooling_mode_{other}": False for other in ("cls_token", "max_tokens", "mean_sqrt_len_tokens")
        }
        (directory / "1_Pooling").mkdir(exist_ok=True)
        for file, content in (
            ("modules.json", modules),
            (_SETTINGS_FILE, {"max_seq_length": num_tokens, "do_lower_case": False}),
            ("1_Pooling/config.json", pooling),
        ):
            (directory / file).write_text(json.dumps(content, indent=2))

    @classmethod
    def from_pretrained(cls, source: str | Path, *, autocast_dtype: torch.dtype | None = None) -> SentenceEncoder:
        """Load a saved sentence encoder, or any Transformers text encoder, from a directory or hub name.

        A source that is no text encoder raises ValueError, which names it.
        """
        return cls(load_tower(source, "text"), autocast_dtype=autocast_dtype)


@contextmanager
def last_hidden_states(
    model: PreTrainedModel, narrow: Callable[[Tensor], Tensor] | None = None
) -> Iterator[list[Tensor]]:
    """Context in which every forward pass of a model with a head appends the last hidden states of its body to the list.

    `narrow` selects the part of the hidden states that the head receives, so that the head is not computed for the others.
    """
    states: list[Tensor] = []

    def pass_on(_module: nn.Module, _inputs: object, output: object) -> object:
        hidden: Tensor = output["last_hidden_state"]  # type: ignore[index]
        states.append(hidden)
        if narrow is not None:
            output["last_hidden_state"] = narrow(hidden)  # type: ignore[index]
        return output

    handle = model.base_model.register_forward_hook(pass_on)
    try:
        yield states
    finally:
        handle.remove()
