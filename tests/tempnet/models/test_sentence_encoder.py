"""Mean pooling against a loop, and the saved directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModel, PreTrainedTokenizerFast

from tempnet.models.sentence_encoder import SentenceEncoder, mean_pooling
from tempnet.models.towers import random_tower


@pytest.fixture
def encoder() -> SentenceEncoder:
    torch.manual_seed(0)
    tower = random_tower(
        "roberta",
        "text",
        vocab_size=30,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=20,
    )
    return SentenceEncoder(tower).eval()


def test_the_mean_is_over_tokens_and_in_float32() -> None:
    tokens = torch.randn(3, 5, 4)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]])
    found = mean_pooling(tokens.bfloat16(), mask)
    assert found.dtype == torch.float32
    wide = tokens.bfloat16().float()
    for row, count in ((0, 5), (1, 2)):
        expected = sum(wide[row, token] for token in range(count)) / count
        torch.testing.assert_close(found[row], expected)
    assert found[2].tolist() == [0.0] * 4


@torch.no_grad()
def test_padding_changes_nothing(encoder: SentenceEncoder) -> None:
    ids = torch.randint(3, 30, (2, 6))
    alone = encoder(ids, torch.ones_like(ids))
    padded, mask = torch.ones(2, 11, dtype=torch.int64), torch.zeros(2, 11, dtype=torch.int64)
    padded[:, :6], mask[:, :6] = ids, 1
    torch.testing.assert_close(encoder(padded, mask), alone)
    assert alone.shape == (2, encoder.embedding_size)


@torch.no_grad()
def test_what_is_saved_is_read_here_by_transformers_and_as_a_sentence_transformer(
    encoder: SentenceEncoder, tmp_path: Path
) -> None:
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "[PAD]": 2}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")
    encoder.save_pretrained(tmp_path, tokenizer, num_tokens=18)
    ids = torch.randint(3, 30, (2, 6))
    again = SentenceEncoder.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(ids, torch.ones_like(ids)), encoder(ids, torch.ones_like(ids)))
    AutoModel.from_pretrained(tmp_path)
    modules = json.loads((tmp_path / "modules.json").read_text())
    assert [module["path"] for module in modules] == ["", "1_Pooling"]
    pooling = json.loads((tmp_path / "1_Pooling" / "config.json").read_text())
    assert pooling["word_embedding_dimension"] == 16
    assert [name for name, value in pooling.items() if value is True] == ["pooling_mode_mean_tokens"]
    assert json.loads((tmp_path / "sentence_bert_config.json").read_text())["max_seq_length"] == 18


def test_the_library_sentence_transformers_gives_the_same_embeddings(encoder: SentenceEncoder, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    words = Tokenizer(WordLevel({word: number for number, word in enumerate("abcdefgh")} | {"[PAD]": 9}, unk_token="a"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")
    encoder.save_pretrained(tmp_path, tokenizer, num_tokens=5)
    texts = ["b c d", "e", "f g h b c d e f g h"]
    loaded = SentenceTransformer(str(tmp_path), device="cpu")
    found = loaded.encode(texts, convert_to_tensor=True)
    torch.testing.assert_close(found, encoder.encode(texts, tokenizer, num_tokens=5), rtol=0, atol=1e-5)
    assert loaded.max_seq_length == 5


def test_what_is_no_text_encoder_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere holds no Transformers model"):
        SentenceEncoder.from_pretrained(tmp_path / "nowhere")
