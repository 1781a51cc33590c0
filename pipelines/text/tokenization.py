"""Fast tokenizers: load one, find its special tokens and digest, and train a small one (BPE or WordPiece)."""

from __future__ import annotations

import hashlib
import string
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from pipelines.local_copy import checked_copy

if TYPE_CHECKING:  # Importing Transformers costs every command and worker that only reads data half a second.
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
# Number of tokens that are decoded together to cut their text into pieces, and how many of them are kept for the next.
_NUM_DECODED, _NUM_KEPT = 64, 16


def load_tokenizer(name_or_path: str, *, needs_eos: bool = True) -> PreTrainedTokenizerFast:
    """Load a Transformers fast tokenizer from a directory, URI, `tokenizer.json`-style file, or the hub.

    Documents of a language model end with an end-of-text token (`needs_eos`), which tokenizers of BERT's kind lack.

    Raises:
        ValueError: if nothing usable is found under that name, or it is no fast tokenizer, or lacks a required token.
    """
    # This import also imports torch. It is local because processes that only receive a pickled tokenizer do not need
    # it, and start two seconds sooner without it.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    place = checked_copy(name_or_path, "tokenizer = ", with_weights=False)
    tokenizer: PreTrainedTokenizerFast
    try:
        if Path(place).is_file():
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=place)
            if tokenizer.convert_tokens_to_ids(END_OF_TEXT) is not None:
                tokenizer.eos_token = tokenizer.bos_token = END_OF_TEXT
        else:
            loaded = AutoTokenizer.from_pretrained(place, use_fast=True, trust_remote_code=False)
            if not isinstance(loaded, PreTrainedTokenizerFast):
                raise ValueError("it is not a fast tokenizer (it has no tokenizer.json)")
            tokenizer = loaded
        # If the tokenizer's files are missing, Transformers creates an empty tokenizer from the model's configuration.
        if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
            raise ValueError("its vocabulary is empty")
        # A tokenizer.json may say how its last user cut and padded texts, which is not what its next one wants.
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
    except Exception as error:  # Transformers and tokenizers raise exceptions of many types.
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"tokenizer = {name_or_path!r} cannot be loaded: a directory or hub name of a Transformers fast tokenizer, or "
            f"a tokenizer.json, is needed. {reason}"
        ) from error
    if tokenizer.bos_token is None and (start := _start_of_model(place)) is not None and start < len(tokenizer):
        tokenizer.bos_token = tokenizer.convert_ids_to_tokens(start)
    if needs_eos and tokenizer.eos_token_id is None:
        raise ValueError(f"tokenizer = {name_or_path!r} has no end-of-text token (eos_token) to close documents with")
    return tokenizer


def tokenizer_digest(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a hash of 16 hex digits that changes whenever the tokenizer would encode anything differently."""
    content = tokenizer.backend_tokenizer.to_str() + f"|{document_start_id(tokenizer)}|{tokenizer.eos_token_id}"
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """Special tokens that an encoder's tokenizer adds to a text, pads with and masks with."""

    opening: tuple[int, ...]
    """Ids of the tokens before a text, such as `[CLS]`."""
    closing: tuple[int, ...]
    """Ids of the tokens after a text, such as `[SEP]`."""
    pad_id: int
    mask_id: int
    vocab_size: int

    @property
    def num_added(self) -> int:
        """Number of special tokens that are added to one text."""
        return len(self.opening) + len(self.closing)

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast) -> SpecialTokens:
        """Determine the special tokens of a tokenizer of BERT's or a similar kind, which may add none around a text."""
        for name in ("pad_token", "mask_token"):
            if getattr(tokenizer, f"{name}_id") is None:
                raise ValueError(
                    f"tokenizer {tokenizer.name_or_path!r} has no {name}: use the tokenizer of a masked language model"
                )
        opening, closing = _surroundings(tokenizer)
        if closing is None:
            raise ValueError(
                f"tokenizer {tokenizer.name_or_path!r} splits a text differently when it adds special tokens"
            )
        return cls(
            opening=tuple(opening),
            closing=tuple(closing),
            pad_id=int(tokenizer.pad_token_id),
            mask_id=int(tokenizer.mask_token_id),
            vocab_size=len(tokenizer),
        )


def token_pieces(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[str]:
    """Cut the decoded text of tokens into one piece per token; the pieces joined are the text.

    A token alone does not say what it adds to a text: SentencePiece's loses its space, WordPiece's keeps its `##`, and a
    byte of a character is no character. So piece i is what the text of the first i + 1 tokens adds to that of the first i,
    and of several tokens of a character all but the last have empty pieces.
    """
    text = str(tokenizer.decode(ids))
    pieces: list[str] = []
    start = place = cut = 0  # the tokens from `start` on are decoded, and their text begins at `place` of the whole
    for end in range(1, len(ids) + 1):
        part = str(tokenizer.decode(ids[start:end]))
        known = _num_common(part, text[place : place + len(part)])
        before, cut = cut, max(cut, place + known)
        pieces.append(text[before:cut])
        # Decoding all tokens before each one would take quadratic time. The last few do where they give the same text.
        if end - start > _NUM_DECODED and known == len(part):
            tail = str(tokenizer.decode(ids[end - _NUM_KEPT : end]))
            if tail and text[:cut].endswith(tail):
                start, place = end - _NUM_KEPT, cut - len(tail)
    if pieces:
        pieces[-1] += text[cut:]
    return pieces


def added_text(tokenizer: PreTrainedTokenizerFast, before: list[int], token: int) -> str:
    """Return what a token adds to the text of those before it, of which the last few are enough.

    A character of several tokens is added by the last of them.
    """
    before = before[-_NUM_KEPT:]
    known, text = (str(tokenizer.decode(ids)).rstrip("\ufffd") for ids in (before, [*before, token]))
    return text[_num_common(known, text) :]


def _num_common(first: str, second: str) -> int:
    """Return the number of characters that two texts have in common at their beginning."""
    ends = (place for place, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
    return next(ends, min(len(first), len(second)))


def document_start_id(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the id of the token that starts a document, as the model was trained with it.

    It is the first of these that there is: the token that the tokenizer itself puts before a text, its bos_token, that of
    the model's configuration beside it (:func:`load_tokenizer` makes it the bos_token), and its eos_token.
    """
    if tokenizer.bos_token_id is None:
        return tokenizer.eos_token_id
    opening, _ = _surroundings(tokenizer)
    return int(opening[-1] if opening else tokenizer.bos_token_id)


def _surroundings(tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int] | None]:
    """Return the tokens that are put before and behind a text; [] and None if it is split differently between them."""
    whole, plain = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
    at = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), None)
    return ([], None) if at is None else (whole[:at], whole[at + len(plain) :])


def _start_of_model(place: str) -> int | None:
    """Return the bos_token_id of the configuration of the model in a directory or of the hub, if it has one."""
    from transformers import PreTrainedConfig

    try:
        values, _ = PreTrainedConfig.get_config_dict(place)
    except OSError:  # there is a tokenizer, and no model
        return None
    start = values.get("bos_token_id", values.get("text_config", {}).get("bos_token_id"))
    return start if isinstance(start, int) else None


def encode_prompt(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Return the tokens of a text that begins a document: the token that starts one, once, and those of the text.

    What a tokenizer would append of its own accord, such as an end of text, is left out.
    """
    start, ids = document_start_id(tokenizer), tokenizer.encode(text, add_special_tokens=False)
    return ids if start is None or ids[:1] == [start] else [start, *ids]


def train_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of GPT-2's kind with exactly `vocab_size` tokens; `<|endoftext|>` is token 0."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)


def train_wordpiece(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a lower-casing WordPiece tokenizer of BERT's kind with at most `vocab_size` tokens; `[PAD]` is token 0.

    The vocabulary consists of the special tokens, punctuation, every ASCII letter and digit, both alone and as the
    continuation of a word (so that no plain word is unknown), and the most frequent words. It is computed here, because
    `WordPieceTrainer` numbers the tokens differently each time.
    """
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(
            word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(text))
        )
    words = sorted(counts, key=lambda word: (-counts[word], word))
    characters = string.ascii_lowercase + string.digits
    special_tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokens = [
        *special_tokens,
        *string.punctuation,
        *characters,
        *(f"##{character}" for character in characters),
        *words,
    ]
    vocabulary = {token: number for number, token in enumerate(list(dict.fromkeys(tokens))[:vocab_size])}
    tokenizer.model = models.WordPiece(vocabulary, unk_token="[UNK]")
    tokenizer.add_special_tokens(special_tokens)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "attention_mask"],
    )
