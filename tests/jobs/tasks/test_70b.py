"""Test what a plan says of the largest preset, from the configuration of LLaMA-2 70B alone: it has no weights here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig

from jobs.train_lm import main
from pipelines.text.tokenization import train_bpe

NUM_PARAMETERS = 68_976_648_192  # of meta-llama/Llama-2-70b-chat-hf, as the hub counts them
LARGEST = 80 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28_672 + 2 * 8192) + 2 * 32_000 * 8192 + 8192


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    model = tmp_path / "llama"
    LlamaConfig(
        hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
        max_position_embeddings=4096, vocab_size=32_000, bos_token_id=1, eos_token_id=0,
    ).save_pretrained(model)  # fmt: skip
    text = "a sentence of a text, and another one. " * 20
    train_bpe([text], 280).save_pretrained(model)
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": text}) + "\n")
    places = [f"--data.{name}={tmp_path / 'text.jsonl'}" for name in ("train", "validation")]
    return [
        "llama2-chat-70b-frozen", f"--model.path={model}", f"--data.tokenizer={model}", *places, "--temperature.rho=3",
        f"--run.storage={tmp_path / 'runs'}", "--dry-run",
    ]  # fmt: skip


def test_a_dry_run_of_the_largest_preset_says_what_it_needs(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of eight workers holds an eighth of the base in bfloat16, and a billion weights of layers that are run."""
    assert LARGEST == NUM_PARAMETERS
    assert main(options) == 0
    said = capsys.readouterr().out
    assert f"base {NUM_PARAMETERS:,} (frozen)" in said
    assert "8 workers" in said
    weights = 2 * (NUM_PARAMETERS / 8 + 1e9) / 2**30
    assert f"weights {weights:.2f}" in said
    with pytest.raises(SystemExit) as ended:
        main([*options, "--workers.memory-gib=16"])
    assert ended.value.code == 2
    assert "more than workers.memory_gib = 16" in capsys.readouterr().err
