"""Test the generation job with tiny models: records, continuation, and that batches change no text."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM, AutoTokenizer

from jobs.scoring.generation.config import GenerateConfig
from jobs.scoring.generation.processors import EntropyRecorder, SeededDraw
from jobs.scoring.generation.sampling import Request, Sampler
from tempnet import TempNet
from tests.jobs.scoring.generation_support import PROMPTS, VOCABULARY, generate, read, refused, write_prompts


def test_records_say_what_the_model_did(gpt2: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    generate(
        gpt2, write_prompts(tmp_path / "p.jsonl"), output, "--num-samples", "2", "--html", str(tmp_path / "p.html")
    )
    records = read(output)
    assert [(record["id"], record["sample"]) for record in records] == [
        (f"p{i}", s) for i in range(5) for s in range(2)
    ]
    base, network = AutoModelForCausalLM.from_pretrained(gpt2).eval(), TempNet.from_pretrained(gpt2 / "tempnet")
    tokenizer = AutoTokenizer.from_pretrained(gpt2)
    assert {record["finish_reason"] for record in records} <= {"stop", "length"}
    # Tokens of half a character all decode to the same replacement character, so only whole ones are looked up below.
    id_of = {tokenizer.decode([token]): token for token in range(VOCABULARY)}
    num_checked = 0
    for record in records:
        ended = record["finish_reason"] == "stop"
        assert (record["tokens"][-1] == "<|endoftext|>") == ended
        assert ended or len(record["tokens"]) == 12
        begin = "".join(record["tokens"]).partition("\ufffd")[0]
        known = next((i for i, token in enumerate(record["tokens"]) if "\ufffd" in token), len(record["tokens"]))
        assert record["text"].startswith(begin.removesuffix("<|endoftext|>"))
        prompt = tokenizer(record["prompt"]).input_ids
        new = [id_of[token] for token in record["tokens"][:known]]
        count = min(known + 1, len(record["tokens"]))
        with torch.no_grad():
            raw = base(input_ids=torch.tensor([prompt + new])).logits[0, len(prompt) - 1 :, :VOCABULARY][:count]
            torch.testing.assert_close(torch.tensor(record["tau"][:count]), network(raw), rtol=1e-4, atol=1e-4)
        entropy = torch.distributions.Categorical(logits=raw).entropy()
        torch.testing.assert_close(torch.tensor(record["entropy"][:count]), entropy, rtol=1e-4, atol=1e-4)
        num_checked += count
    assert num_checked > 15
    assert (tmp_path / "p.html").read_text().count("title=") == sum(len(record["tokens"]) for record in records)


@pytest.mark.parametrize("temperature", ["tempnet", "0.8", "greedy"])
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_a_text_owes_nothing_to_its_batch(
    model: str, temperature: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    directory = request.getfixturevalue(model)
    prompts = write_prompts(tmp_path / "p.jsonl")
    options = ["--temperature", temperature]
    if temperature != "greedy":
        options += ["--num-samples", "3", "--top-k", "50", "--top-p", "0.95"]
    for size in (1, 4):
        generate(directory, prompts, tmp_path / f"{size}.jsonl", "--batch-size", str(size), *options)
    reverse = write_prompts(tmp_path / "one.jsonl", PROMPTS[:2])
    generate(directory, reverse, tmp_path / "few.jsonl", *options)
    one, four, few = (read(tmp_path / f"{name}.jsonl") for name in ("1", "4", "few"))
    assert [record["tokens"] for record in one] == [record["tokens"] for record in four]
    assert [record["text"] for record in few] == [record["text"] for record in one[: len(few)]]
    for first, second in zip(one, four, strict=True):
        if temperature == "tempnet":
            assert first["tau"] == pytest.approx(second["tau"], abs=1e-4)
        else:
            assert first["tau"] == (None if temperature == "greedy" else [0.8] * len(first["tokens"]))
    if temperature != "greedy":
        assert len({record["text"] for record in one}) > len(PROMPTS), "samples of a prompt differ"
        generate(directory, prompts, tmp_path / "seed.jsonl", "--seed", "1", *options)
        assert [record["text"] for record in read(tmp_path / "seed.jsonl")] != [record["text"] for record in one]


def test_seeded_draws_follow_the_softmax() -> None:
    scores = torch.tensor([0.5, -1.0, 2.0, float("-inf"), 0.0, 1.0])
    draw = SeededDraw([f"key {number}" for number in range(500)])
    tokens = Counter(
        token for _ in range(10) for token in draw(torch.empty(0), scores.expand(500, -1)).argmax(-1).tolist()
    )
    assert tokens[3] == 0
    allowed = [0, 1, 2, 4, 5]
    expected = (torch.softmax(scores.double(), -1) * 5000)[allowed]
    assert chisquare([tokens[token] for token in allowed], expected.tolist()).pvalue > 1e-3
    assert draw(torch.empty(0), scores.expand(500, -1)).exp().sum(-1).tolist() == [1.0] * 500
    recorder = EntropyRecorder(5)
    recorder(torch.empty(0), torch.zeros(2, 6))
    assert recorder.steps[0].tolist() == pytest.approx([1.6094379] * 2)


def test_a_repeated_job_continues(gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, output = write_prompts(tmp_path / "p.jsonl"), tmp_path / "out.jsonl"
    generate(gpt2, prompts, output, "--num-samples", "2", "--batch-size", "1")
    whole = output.read_bytes()
    lines = whole.splitlines(keepends=True)
    output.write_bytes(b"".join(lines[:3]) + lines[3][:40])  # The job was killed while it wrote.
    generate(gpt2, prompts, output, "--num-samples", "2", "--batch-size", "1")
    assert output.read_bytes() == whole
    assert "10 texts in" in (said := capsys.readouterr().out)
    assert "3 of them from before" in said
    generate(gpt2, prompts, output, "--num-samples", "3", "--limit", "2", "--batch-size", "1")
    assert output.read_bytes()[: len(whole)] == whole
    assert [(record["id"], record["sample"]) for record in read(output)[10:]] == [("p0", 2), ("p1", 2)]
    (tmp_path / "untouched.jsonl").write_bytes(output.read_bytes())
    arguments = ["--model", gpt2, "--prompts", prompts, "--output", output, "--max-new-tokens", "12"]
    message = refused(capsys, *arguments, "--seed", "4", "--top-p", "0.5")
    assert "other settings (seed was 0, is 4; top_p was 1.0, is 0.5)" in message
    other = write_prompts(tmp_path / "other.jsonl", ["something else", *PROMPTS[1:]])
    arguments[3] = other
    assert "the text of id 'p0' belongs to another prompt" in refused(capsys, *arguments)
    assert output.read_bytes() == (tmp_path / "untouched.jsonl").read_bytes()


def test_another_network_under_the_same_name_is_other_settings(
    gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(gpt2, tmp_path / "model")
    prompts, output = write_prompts(tmp_path / "p.jsonl", PROMPTS[:1]), tmp_path / "out.jsonl"
    generate(model, prompts, output)
    network = TempNet.from_pretrained(model / "tempnet")
    with torch.no_grad():
        network.pool_bias += 1e-3
    network.save_pretrained(model / "tempnet")
    arguments = ["--model", model, "--prompts", prompts, "--output", output, "--max-new-tokens", "12"]
    assert "(tempnet was " in refused(capsys, *arguments)
    output.unlink()
    generate(model, prompts, output)
    base = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        base.get_input_embeddings().weight.add_(0.1)
    base.save_pretrained(model)
    assert "(weights was " in refused(capsys, *arguments)


def test_too_long_prompts_are_counted_as_lost(gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", ["the model", "the temperature " * 40, "a token"])
    generate(gpt2, prompts, tmp_path / "out.jsonl", "--num-samples", "2")
    assert [record["id"] for record in read(tmp_path / "out.jsonl")] == ["p0", "p0", "p2", "p2"]
    said = capsys.readouterr().out
    assert "LOST: 2 texts of 1 prompts, which are longer than the 52 tokens" in said
    assert "ids p1" in said


def test_a_stop_string_ends_its_own_text_only(gpt2: Path) -> None:
    config = GenerateConfig(model=str(gpt2), prompts="", output="", max_new_tokens=40, device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(gpt2)
    requests = [Request(key=(i, 0, 0), prompt="def", ids=tokenizer("def").input_ids) for i in range(12)]
    free, stopped = (Sampler(config, tokenizer, 1.0, stop)(requests) for stop in ((), ("e", "th")))
    ended_by_string = 0
    for text, cut in zip(free, stopped, strict=True):
        assert cut.ids == text.ids[: len(cut.ids)]
        assert len(cut.tau or []) == len(cut.entropy or []) == len(cut.ids)
        assert "e" not in cut.text
        assert text.text.startswith(cut.text.rstrip("\ufffd"))
        if cut.ids == text.ids:
            assert cut.finish_reason == text.finish_reason or "e" in text.text[-4:]
            continue
        ended_by_string += 1
        assert cut.finish_reason == "stop"
        assert "e" in tokenizer.decode(cut.ids) or "th" in tokenizer.decode(cut.ids)
        assert "e" not in tokenizer.decode(cut.ids[:-1]), "it went on after the string"
    assert ended_by_string > 3
