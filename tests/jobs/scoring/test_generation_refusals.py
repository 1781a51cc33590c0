"""Test what the generation job refuses: bad prompts, settings that contradict each other, and files of others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tempnet import TempNet, TempNetConfig
from tests.jobs.scoring.generation_support import VOCABULARY, refused, write_prompts


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (None, [], "p.jsonl"),
        ('{"prompt": "a"}\n{"prompt": 3}\n', [], "p.jsonl line 2: `prompt` is missing or no string"),
        ('{"prompt": "a"}\n{"pro', [], "p.jsonl line 2: no JSON"),
        ('{"prompt": "a", "id": 1}\n{"prompt": "b", "id": 1}\n', [], "the id 1 comes twice"),
        ("\n", [], "holds no prompts"),
        ('{"prompt": "a"}\n', ["--format", "alpaca-eval"], "JSON list"),
        ('[{"instruction": "a", "dataset": "b"}, {}]', ["--format", "alpaca-eval"], "record 1: `instruction`"),
        ('{"question_id": 1, "turns": []}\n', ["--format", "mt-bench"], "line 1: `turns`"),
        ('{"question": "a", "answer": "b"}\n', ["--format", "gsm8k"], "line 1: `answer` does not end in ####"),
        ('{"prompt": "a"}\n', ["--format", "csv"], "invalid choice"),
        ('{"prompt": "a"}\n', ["--max-new-tokens", "64"], "max_new_tokens = 64 leaves no room"),
        (json.dumps({"prompt": "word " * 90}), [], "the shortest prompt has"),
        ('{"prompt": "a"}\n', ["--temperature", "0"], "temperature = 0 must be positive"),
        ('{"prompt": "a"}\n', ["--temperature", "-1"], "temperature = -1 must be positive"),
        ('{"prompt": "a"}\n', ["--temperature", "warm"], "neither a number nor one of auto, tempnet, greedy"),
        ('{"prompt": "a"}\n', ["--temperature", "greedy", "--top-k", "3"], "greedy draws nothing"),
        ('{"prompt": "a"}\n', ["--temperature", "0.7", "--tau-max-eval", "1"], "uses no TempNet"),
        ('{"prompt": "a"}\n', ["--tau-max-eval", "0.001"], "not above tau_min"),
        ('{"prompt": "a"}\n', ["--top-p", "0"], "top_p = 0"),
        ('{"prompt": "a"}\n', ["--tempnet", "/nowhere"], "/nowhere is missing: it is neither a directory, nor a file"),
        (
            '{"prompt": "a"}\n',
            ["--model", "/nowhere"],
            "tokenizer = '/nowhere' is missing: there is no such file",
        ),
        ('{"prompt": "a"}\n', ["--chat", "on"], "has no chat template"),
    ],
)
def test_bad_input_is_refused_before_the_model_is_loaded(
    content: str | None,
    options: list[str],
    message: str,
    gpt2: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = shutil.copytree(gpt2, tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"not to be read")
    if content is not None:
        (tmp_path / "p.jsonl").write_text(content)
    arguments: list[object] = ["--model", model, "--prompts", tmp_path / "p.jsonl", "--output", tmp_path / "out.jsonl"]
    assert message in refused(
        capsys, *arguments, *(["--max-new-tokens", "12"] if "64" not in options else []), *options
    )
    assert not (tmp_path / "out.jsonl").exists()


def test_a_model_without_a_tempnet_and_files_of_others(
    chat: Path, gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl")
    arguments = ["--model", chat, "--prompts", prompts, "--output", tmp_path / "out.jsonl"]
    assert "holds no TempNet" in refused(capsys, *arguments, "--temperature", "tempnet")
    big = TempNet(TempNetConfig.for_logits(VOCABULARY + 1, rho=2.0, hidden_size=16, num_prototypes=8))
    big.save_pretrained(tmp_path / "big")
    assert f"was built for {VOCABULARY + 1} logits" in refused(capsys, *arguments, "--tempnet", tmp_path / "big")
    (tmp_path / "out.jsonl").write_text("my own notes\n")
    assert "line 1 is no record of this job" in refused(capsys, *arguments)
    assert (tmp_path / "out.jsonl").read_text() == "my own notes\n"
    (tmp_path / "in.json").write_text('[{"instruction": "a", "dataset": "b"}]')
    arguments = ["--model", gpt2, "--prompts", tmp_path / "in.json", "--output", tmp_path / "out.jsonl"]
    message = refused(capsys, *arguments, "--format", "alpaca-eval", "--max-new-tokens", "12")
    assert "this job did not write it" in message
    assert (tmp_path / "out.jsonl").read_text() == "my own notes\n"
