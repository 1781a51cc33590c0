"""A text encoder whose sentences are the means of their tokens, and its directory, which sentence-transformers reads too.

    config.json, model.safetensors, the tokenizer       a Transformers model
    modules.json, sentence_bert_config.json, 1_Pooling/config.json
                                                        mean pooling, as the library configures it

Shapes: n sentences, t tokens, d width of the encoder.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from tempnet.models.towers import load_tower

# RoBERTa's kind numbers positions from the one after the padding's own.
_OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert", "mpnet")
_SETTINGS_FILE = "sentence_bert_config.json"
_MODULES = (("0", "", "Transformer"), ("1", "1_Pooling", "Pooling"))


def saved_num_tokens(directory: str | Path) -> int | None:
    """The tokens that a saved sentence encoder cuts its sentences to; None where nothing says so."""
    file = Path(directory, _SETTINGS_FILE)
    return int(json.loads(file.read_text())["max_seq_length"]) if file.is_file() else None


def num_positions(config: PreTrainedConfig) -> int | None:
    """The longest row of tokens that an encoder takes; None where nothing bounds it."""
    positions = getattr(config, "max_position_embeddings", None)
    if positions and config.model_type in _OFFSET_POSITIONS:
        return int(positions) - int(config.pad_token_id) - 1
    return int(positions) if positions else None


def mean_pooling(tokens: Tensor, attention_mask: Tensor) -> Tensor:
    """(n, t, d) vectors of tokens and their mask (n, t) (1 token, 0 padding) → (n, d) means in float32.

    A sentence without tokens has the mean 0.
    """
    weights = attention_mask.unsqueeze(-1).float()
    return (tokens.float() * weights).sum(1) / weights.sum(1).clamp(min=1.0)


class SentenceEncoder(nn.Module):
    """Any Transformers text encoder with mean pooling.

    Args:
        encoder: it gives `last_hidden_state`.
        autocast_dtype: the dtype of its matrix products; parameters and embeddings stay in float32.
    """

    def __init__(self, encoder: PreTrainedModel, *, autocast_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.encoder, self.autocast_dtype = encoder, autocast_dtype

    @property
    def embedding_size(self) -> int:
        """d."""
        return int(self.encoder.config.hidden_size)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(n, t) tokens and their mask → (n, d), float32, of any length."""
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
        """n texts → (n, d) float32 on the CPU, in eval mode; those of like length go together.

        Args:
            tokenizer: that of the encoder.
            num_tokens: longer texts are cut to these. None: what the tokenizer says.
            batch_size: texts in a forward pass.
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
        """Write the layout at the head of this file; the directory is created.

        Args:
            directory: where to.
            tokenizer: that of the encoder.
            num_tokens: longer sentences are cut to these by whoever loads it.
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
        """One that was saved, or any Transformers text encoder: directory or hub name.

        Raises:
            ValueError: naming the source, if it is none.
        """
        return cls(load_tower(source, "text"), autocast_dtype=autocast_dtype)
