"""Fast tokenizers: loading one, its effective vocabulary and digest, and training a small one (BPE or WordPiece)."""

from __future__ import annotations

import hashlib
import string
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from pipelines.sources import check_source

END_OF_TEXT = "<|endoftext|>"


def load_tokenizer(name_or_path: str, *, needs_eos: bool = True) -> PreTrainedTokenizerFast:
    """A Transformers fast tokenizer from a local directory, a `tokenizer.json`-style file, or the hub.

    Args:
        needs_eos: documents are closed by an end-of-text token; captions are not, and BERT's kind has none.

    Raises:
        ValueError: if nothing usable is found under that name, it is no fast tokenizer, or it has no end-of-text token
            and needs one; the message names the value.
    """
    # Brings torch with it, which those who only receive a tokenizer can do without: readers start two seconds sooner.
    from transformers import AutoTokenizer

    try:
        check_source(name_or_path)
    except ValueError as error:
        raise ValueError(f"tokenizer = {error}") from error
    tokenizer: PreTrainedTokenizerFast
    try:
        if Path(name_or_path).is_file():
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=name_or_path)
            if tokenizer.convert_tokens_to_ids(END_OF_TEXT) is not None:
                tokenizer.eos_token = tokenizer.bos_token = END_OF_TEXT
        else:
            loaded = AutoTokenizer.from_pretrained(name_or_path, use_fast=True)
            if not isinstance(loaded, PreTrainedTokenizerFast):
                raise ValueError("it is no fast tokenizer (it has no tokenizer.json)")
            tokenizer = loaded
        # Where there are no files, Transformers makes an empty tokenizer from the model's configuration.
        if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
            raise ValueError("it knows no word")
    except Exception as error:  # Transformers and tokenizers raise whatever the first thing they tried raised
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"tokenizer = {name_or_path!r} cannot be loaded: a directory or hub name of a Transformers fast tokenizer, or "
            f"a tokenizer.json, is needed. {reason}"
        ) from error
    if needs_eos and tokenizer.eos_token_id is None:
        raise ValueError(f"tokenizer = {name_or_path!r} has no end-of-text token (eos_token) to close documents with")
    return tokenizer


def tokenizer_digest(tokenizer: PreTrainedTokenizerFast) -> str:
    """16 hex digits that change whenever the tokenizer would encode anything differently."""
    content = tokenizer.backend_tokenizer.to_str() + f"|{document_start_id(tokenizer)}|{tokenizer.eos_token_id}"
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """What a tokenizer of an encoder puts around one text, pads with and masks with."""

    opening: tuple[int, ...]
    closing: tuple[int, ...]
    pad_id: int
    mask_id: int
    vocab_size: int

    @property
    def num_added(self) -> int:
        """Special tokens of one text."""
        return len(self.opening) + len(self.closing)

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast) -> SpecialTokens:
        """Of BERT's, RoBERTa's and similar tokenizers; one that adds nothing is fine.

        Raises:
            ValueError: naming the token that is missing, or if the added ones do not surround the text.
        """
        for name in ("pad_token", "mask_token"):
            if getattr(tokenizer, f"{name}_id") is None:
                raise ValueError(
                    f"tokenizer {tokenizer.name_or_path!r} has no {name}: that of a masked language model is needed"
                )
        plain = tokenizer.encode("a", add_special_tokens=False)
        whole = tokenizer.encode("a")
        at = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), None)
        if at is None:
            raise ValueError(f"tokenizer {tokenizer.name_or_path!r} changes a text by its special tokens")
        return cls(
            opening=tuple(whole[:at]),
            closing=tuple(whole[at + len(plain) :]),
            pad_id=int(tokenizer.pad_token_id),
            mask_id=int(tokenizer.mask_token_id),
            vocab_size=len(tokenizer),
        )


def token_texts(tokenizer: PreTrainedTokenizerFast, ids: Iterable[int]) -> list[str]:
    """The text of every token by itself."""
    return [str(tokenizer.decode([token])) for token in ids]


def document_start_id(tokenizer: PreTrainedTokenizerFast) -> int:
    """The token that opens a document: bos, or eos where there is none (GPT-2)."""
    return tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id


def train_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of GPT-2's kind with exactly this vocabulary, `<|endoftext|>` being token 0."""
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
    """A WordPiece tokenizer of BERT's kind, lower-casing, with at most this vocabulary; `[PAD]` is token 0.

    The vocabulary is the special tokens, every ASCII letter and digit, also as the continuation of a word (so that no
    plain word is unknown), punctuation, and the most frequent words. It is made here, as `WordPieceTrainer` numbers the
    tokens differently each time.
    """
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
