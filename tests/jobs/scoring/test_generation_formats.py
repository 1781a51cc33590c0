"""Test that the generation job reads and writes the files of AlpacaEval, MT-bench and GSM8K."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.jobs.scoring.generation_support import PROMPTS, generate, read


def test_alpaca_eval(gpt2: Path, tmp_path: Path) -> None:
    instructions = [{"instruction": prompt, "dataset": f"set {i}"} for i, prompt in enumerate(PROMPTS[:3])]
    (tmp_path / "in.json").write_text(json.dumps(instructions))
    output = tmp_path / "out.json"
    options = ["--format", "alpaca-eval", "--generator", "mine"]
    generate(gpt2, tmp_path / "in.json", output, *options)
    written = json.loads(output.read_text())
    assert [(record["instruction"], record["dataset"]) for record in written] == [
        (record["instruction"], record["dataset"]) for record in instructions
    ]
    records = read(tmp_path / "out.json.records.jsonl")
    assert [record["output"] for record in written] == [record["text"].strip() for record in records]
    assert {record["generator"] for record in written} == {"mine"}
    generate(gpt2, tmp_path / "in.json", output, *options)
    assert json.loads(output.read_text()) == written


def test_mt_bench_answers_the_second_turn_after_the_first(chat: Path, tmp_path: Path) -> None:
    questions = [
        {"question_id": 81 + i, "category": "writing", "turns": [prompt, "shorter"]}
        for i, prompt in enumerate(PROMPTS[:2])
    ]
    (tmp_path / "q.jsonl").write_text("".join(f"{json.dumps(question)}\n" for question in questions))
    for name in ("a.jsonl", "b.jsonl"):
        generate(chat, tmp_path / "q.jsonl", tmp_path / name, "--format", "mt-bench", "--num-samples", "2")
    first, second = read(tmp_path / "a.jsonl"), read(tmp_path / "b.jsonl")
    records = {(r["id"], r["sample"], r["turn"]): r for r in read(tmp_path / "a.jsonl.records.jsonl")}
    assert len(records) == 8
    for answer, again, question in zip(first, second, questions, strict=True):
        assert set(answer) == {"question_id", "answer_id", "model_id", "choices", "tstamp"}
        assert answer["answer_id"] == again["answer_id"]
        assert answer["choices"] == again["choices"]
        for choice in answer["choices"]:
            before, after = (records[answer["question_id"], choice["index"], turn] for turn in (0, 1))
            assert choice["turns"] == [before["text"].strip(), after["text"].strip()]
            assert before["prompt"] == f"<user>{question['turns'][0]}<assistant>"
            assert after["prompt"] == f"{before['prompt']}{before['text']}<user>shorter<assistant>"
            assert set(before["tau"]) == {1.0}, "a model without a TempNet samples at 1"
    assert len({answer["answer_id"] for answer in first}) == 2


def test_gsm8k(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"question": f"What is {n} and {n}?", "answer": f"{n} + {n} = <<2>>.\n#### {2 * n:,}"} for n in (1, 700)]
    (tmp_path / "q.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    output = tmp_path / "out.jsonl"
    generate(llama, tmp_path / "q.jsonl", output, "--format", "gsm8k", "--num-samples", "4", "--chat", "off")
    records = read(output)
    assert [record["gold"] for record in records] == ["2"] * 4 + ["1400"] * 4
    assert all(record["prompt"].count("Q:") == 9 for record in records)
    assert all("Q:" not in record["text"] and "\n\n" not in record["text"] for record in records)
    said = capsys.readouterr().out
    for k in (1, 2, 4):
        assert f"maj@{k}: " in said
