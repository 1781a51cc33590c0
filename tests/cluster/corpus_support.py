"""Write the text that the cluster tests and some benchmarks train on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support import write_jsonl_zst

from pipelines.text.tokenization import train_bpe


def write_corpus(directory: Path) -> Path:
    """Write a few hundred documents of a small language with structure to learn, and return the directory.

    It holds `train/`, `validation/` and `tokenizer/`.
    """
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefgh"), size=rng.integers(2, 7))) for _ in range(300)]
    follows = rng.integers(0, 300, size=(300, 4))

    def document() -> str:
        word, sentence = int(rng.integers(300)), []
        for _ in range(int(rng.integers(20, 120))):
            sentence.append(words[word])
            word = int(follows[word, rng.choice(4, p=[0.6, 0.25, 0.1, 0.05])])
        return " ".join(sentence)

    texts = [document() for _ in range(400)]
    for shard in range(3):
        write_jsonl_zst(directory / "train" / f"part-{shard}.jsonl.zst", texts[shard:360:3])
    write_jsonl_zst(directory / "validation" / "part-0.jsonl.zst", texts[360:])
    train_bpe(texts[:360], 512).save_pretrained(directory / "tokenizer")
    return directory
