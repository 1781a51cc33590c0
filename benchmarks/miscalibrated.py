"""Small language models that are calibrated, or miscalibrated in a known way, with held-out text for each.

    .venv/bin/python -m benchmarks.miscalibrated --text bbc.jsonl.zst --shifted wikitext2_valid.txt --output worlds --seed 0

A GPT-2 of two layers is trained on nine tenths of the documents. From it come four worlds, each a directory with the model
and held-out text that no part of it was trained on:

    calibrated   the model, and texts that it sampled itself at τ = 1
    shift        the model, and text of another source
    rounded      the model with its weights rounded to 3 bits, and texts that the unrounded model sampled
    overfit      the model, fine-tuned on few documents until it overfits, and held-out documents of the first source

Tokens are words and punctuation marks, so that a sampled sequence of tokens is read back as the same tokens. Subwords would
not do: a model also samples sequences that its tokenizer would never produce, and is not calibrated on what is read back.
"""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, PreTrainedTokenizerFast

from pipelines.archives import list_archives
from pipelines.text.reading import readable_documents
from pipelines.text.tokenization import END_OF_TEXT, document_start_id

WORLDS = ("calibrated", "shift", "rounded", "overfit")
CONTEXT_LENGTH = 64
_VOCAB_SIZE = 2048
_UNKNOWN = "<unk>"
_BATCH_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Texts and sizes."""

    text: str
    """Archive of documents to train on and to hold out."""
    shifted: str
    """Text of another source, with a heading ` = Title = ` before each document."""
    output: str
    """Directory of the worlds."""
    seed: int = 0
    """Seed of weights, batches and samples."""
    num_steps: int = 600
    """Number of training steps of the model."""
    num_steps_overfit: int = 200
    """Number of steps of fine-tuning on few documents."""
    num_documents_overfit: int = 20
    """Number of documents to fine-tune on."""
    num_held_out: int = 200
    """Number of documents held out."""
    num_samples: int = 4000
    """Number of texts to sample."""


def make_model(vocab_size: int, num_positions: int, start_id: int, end_id: int) -> GPT2LMHeadModel:
    """Return a new GPT-2 of two layers and width 64."""
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "n_positions": num_positions,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
    }
    none: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **none, bos_token_id=start_id, eos_token_id=end_id))


def train(
    model: PreTrainedModel, draw: Callable[[], tuple[Tensor, Tensor]], *, num_steps: int, rate: float, warmup_share: float,
    beta2: float, weight_decay: float,
) -> float:  # fmt: skip
    """Train a model with AdamW and one cycle of its rate, and return the mean loss of the last tenth of the steps.

    Args:
        model: the model.
        draw: returns a batch of tokens and of targets, −100 where there is none.
        num_steps: number of steps.
        rate: highest learning rate.
        warmup_share: share of the steps in which the rate rises.
        beta2: AdamW's second decay.
        weight_decay: of all weights.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=weight_decay, betas=(0.9, beta2))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, num_steps, pct_start=warmup_share)
    losses = []
    model.train()
    for _ in range(num_steps):
        tokens, targets = draw()
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    model.eval()
    return float(np.mean(losses[-max(1, num_steps // 10) :]))


def train_on_stream(model: PreTrainedModel, stream: Tensor, *, num_steps: int, rate: float, seed: int) -> float:
    """Train a model on blocks drawn from a stream of tokens, and return the mean loss of the last tenth of the steps."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(stream) - CONTEXT_LENGTH - 1, (_BATCH_SIZE, 1), generator=generator)
        block = stream[starts + torch.arange(CONTEXT_LENGTH + 1)]
        return block[:, :-1], block[:, 1:]

    return train(model, draw, num_steps=num_steps, rate=rate, warmup_share=0.05, beta2=0.95, weight_decay=0.1)


@torch.inference_mode()
def sample_texts(model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast, number: int, seed: int) -> list[list[int]]:
    """Return token ids that the model samples at τ = 1, each text one token shorter than its context."""
    torch.manual_seed(seed)
    start = torch.full((number, 1), document_start_id(tokenizer))
    mask = torch.ones_like(start)
    generator: Any = model
    out = generator.generate(
        start, attention_mask=mask, eos_token_id=None, do_sample=True, top_k=0, max_new_tokens=CONTEXT_LENGTH - 1,
        pad_token_id=0,
    )  # fmt: skip
    texts: list[list[int]] = out[:, 1:].tolist()
    return texts


@torch.no_grad()
def round_weights(model: GPT2LMHeadModel, num_bits: int) -> None:
    """Round every matrix to 2^bits levels per row, evenly spaced from the row's smallest to its largest entry."""
    for parameter in {id(value): value for value in model.parameters() if value.dim() == 2}.values():
        low, high = parameter.amin(-1, keepdim=True), parameter.amax(-1, keepdim=True)
        step = (high - low).clamp(min=1e-12) / (2**num_bits - 1)
        parameter.copy_(((parameter - low) / step).round() * step + low)


def make_worlds(job: Arguments) -> None:
    """Make the four worlds in `output`."""
    documents = [
        split_words(document.text)
        for archive in list_archives(job.text)
        for document in readable_documents(job.text, archive, "text", Counter(), [])
    ]
    order = np.random.default_rng(0).permutation(len(documents))
    held_out = [documents[place] for place in order[: job.num_held_out]]
    training = [documents[place] for place in order[job.num_held_out :]]
    pages = re.split(r"\n(?= = [^=])", Path(job.shifted).read_text())
    pages = [split_words(page.replace(_UNKNOWN, "")) for page in pages if len(page) > 400]
    tokenizer = make_tokenizer(training)
    torch.manual_seed(job.seed)
    base = make_model(_VOCAB_SIZE, CONTEXT_LENGTH, document_start_id(tokenizer), tokenizer.eos_token_id)
    stream = encode(tokenizer, training)
    loss = train_on_stream(base, stream, num_steps=job.num_steps, rate=5e-3, seed=job.seed)
    print(f"loss {loss:.3f}, {len(stream):,} tokens", flush=True)
    texts = sample_texts(base, tokenizer, job.num_samples, job.seed)
    sampled = [str(tokenizer.decode(ids)) for ids in texts]
    assert tokenizer(sampled[:20], add_special_tokens=False)["input_ids"] == texts[:20]
    save(job, "calibrated", base, tokenizer, sampled)
    save(job, "shift", base, tokenizer, pages)
    rounded = copy.deepcopy(base)
    round_weights(rounded, 3)
    save(job, "rounded", rounded, tokenizer, sampled)
    few = encode(tokenizer, training[: job.num_documents_overfit])
    loss = train_on_stream(base, few, num_steps=job.num_steps_overfit, rate=3e-3, seed=job.seed + 1)
    print(f"overfit: loss {loss:.3f}, {len(few):,} tokens", flush=True)
    save(job, "overfit", base, tokenizer, held_out)


def split_words(text: str) -> str:
    """Return words and punctuation marks in lower case, separated by spaces."""
    return " ".join(re.findall(r"\w+|[^\w\s]", text.lower()))


def make_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer of the most frequent words of texts."""
    counts = Counter(word for text in texts for word in text.split())
    words = [END_OF_TEXT, _UNKNOWN, *(word for word, _ in counts.most_common(_VOCAB_SIZE - 2))]
    return word_tokenizer(words, unknown=_UNKNOWN)


def word_tokenizer(words: Sequence[str], *, unknown: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of words, the first of which opens and ends a text; every sequence of tokens survives decoding."""
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=words[0], eos_token=words[0], unk_token=unknown
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> Tensor:
    """Return the tokens of all texts, each after the token that opens a document."""
    start = document_start_id(tokenizer)
    ids = [[start, *ids] for ids in tokenizer(list(texts), add_special_tokens=False)["input_ids"]]
    return torch.tensor([token for text in ids for token in text])


def save(
    job: Arguments, world: str, model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]
) -> None:
    """Write a world's model and held-out text."""
    directory = Path(job.output) / world
    model.save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    lines = [json.dumps({"text": text}) + "\n" for text in texts if text.strip()]
    (directory / "text.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    torch.set_num_threads(1)
    make_worlds(tyro.cli(Arguments, description=__doc__))
