"""Test the generation job with tiny models: records, continuation, formats, and that batches change no text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from evaluation_support import write_lines
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from jobs.engine.export import model_digest, tempnet_digest
from jobs.scoring.generation.config import GenerateConfig
from jobs.scoring.generation.formats import describe_judged
from jobs.scoring.generation.gsm8k import extract_answer, majority_score
from jobs.scoring.generation.sampling import EffectiveVocabulary, Sampler, SeededDraw
from tempnet import TempNet
from tempnet.inference import can_fold, end_ids
from tests.jobs.scoring.generation_support import PROMPTS, VOCABULARY, generate, read, write_prompts


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_records_say_what_the_model_did(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    model: Path = request.getfixturevalue(name)
    output = tmp_path / "out.jsonl"
    options = ["--num-samples", "2", "--min-p", "0.1", "--html", str(tmp_path / "p.html")]
    generate(model, write_prompts(tmp_path / "p.jsonl"), output, *options)
    records = read(output)
    assert [(record["id"], record["sample"]) for record in records] == [
        (f"p{i}", s) for i in range(5) for s in range(2)
    ]
    base, network = AutoModelForCausalLM.from_pretrained(model).eval(), TempNet.from_pretrained(model / "tempnet")
    assert can_fold(base, network) == (name == "gpt2")
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert {record["finish_reason"] for record in records} <= {"stop", "length"}
    num_checked = 0
    for record in records:
        ended = record["finish_reason"] == "stop"
        assert (record["tokens"][-1] == "<|endoftext|>") == ended
        assert ended or len(record["tokens"]) == 12
        ids, prompt = record["token_ids"], [0, *tokenizer(record["prompt"]).input_ids]
        assert "".join(record["tokens"]) == tokenizer.decode(ids)
        assert record["text"] == tokenizer.decode(ids, skip_special_tokens=True)
        with torch.no_grad():
            raw = base(input_ids=torch.tensor([prompt + ids[:-1]])).logits[0, len(prompt) - 1 :, :VOCABULARY]
            torch.testing.assert_close(torch.tensor(record["tau"]), network(raw), rtol=1e-4, atol=1e-4)
        drawn = torch.softmax(raw / torch.tensor(record["tau"]).unsqueeze(-1), -1)
        assert (drawn.gather(-1, torch.tensor(ids).unsqueeze(-1))[:, 0] >= 0.0999 * drawn.amax(-1)).all()
        entropy = torch.distributions.Categorical(logits=raw).entropy()
        torch.testing.assert_close(torch.tensor(record["entropy"]), entropy, rtol=1e-4, atol=1e-4)
        num_checked += len(ids)
    assert num_checked > 15
    assert (tmp_path / "p.html").read_text().count("title=") == sum(
        sum(map(bool, record["tokens"])) for record in records
    )


@pytest.mark.parametrize(
    ("model", "temperature"), [("gpt2", "tempnet"), ("llama", "tempnet"), ("llama", "0.8"), ("gpt2", "greedy")]
)
def test_a_text_owes_nothing_to_its_batch(
    model: str, temperature: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    directory = request.getfixturevalue(model)
    prompts = write_prompts(tmp_path / "p.jsonl")
    options = ["--temperature", temperature]
    if temperature != "greedy":
        options += ["--num-samples", "2", "--top-k", "50", "--top-p", "0.95"]
    for size in (1, 4):
        generate(directory, prompts, tmp_path / f"{size}.jsonl", "--batch-size", str(size), *options)
    generate(directory, write_prompts(tmp_path / "few-prompts.jsonl", PROMPTS[:2]), tmp_path / "few.jsonl", *options)
    one, four, few = (read(tmp_path / f"{name}.jsonl") for name in ("1", "4", "few"))
    assert [record["tokens"] for record in one] == [record["tokens"] for record in four]
    assert [record["text"] for record in few] == [record["text"] for record in one[: len(few)]]
    for first, second in zip(one, four, strict=True):
        if temperature == "tempnet":
            assert first["tau"] == pytest.approx(second["tau"], abs=1e-4)
        else:
            assert first["tau"] == (None if temperature == "greedy" else [0.8] * len(first["tokens"]))
    if temperature == "0.8":
        assert len({record["text"] for record in one}) > len(PROMPTS), "samples of a prompt differ"
        generate(directory, prompts, tmp_path / "seed.jsonl", "--seed", "1", *options)
        assert [record["text"] for record in read(tmp_path / "seed.jsonl")] != [record["text"] for record in one]


def test_a_text_ends_at_every_end_that_the_model_knows(gpt2: Path, caplog: pytest.LogCaptureFixture) -> None:
    base, tokenizer = AutoModelForCausalLM.from_pretrained(gpt2), PreTrainedTokenizerFast.from_pretrained(gpt2)
    assert base.generation_config._from_model_config
    assert end_ids(base, tokenizer) == [0]
    tokenizer.add_special_tokens({"bos_token": "<s>", "additional_special_tokens": ["<|im_end|>"]})
    start, turn = tokenizer.convert_tokens_to_ids(["<s>", "<|im_end|>"])
    assert end_ids(base, tokenizer) == [0, start], "the token between documents ends one"
    base.config.eos_token_id = [7, turn]
    assert end_ids(base, tokenizer) == [0, start, turn], "a configuration's default may be any word"
    assert "configuration names 7 as ends of a text, which the tokenizer does not: texts end at 0, " in caplog.text
    base.generation_config = GenerationConfig(eos_token_id=[9, 10**6])
    assert end_ids(base, tokenizer) == [0, 9, start, turn], "what was chosen for generation counts"


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
    recorder = EffectiveVocabulary(5, records_entropy=True)
    assert recorder(torch.empty(0), torch.zeros(2, 6))[:, 5].tolist() == [-torch.inf] * 2
    assert recorder.entropies[0].tolist() == pytest.approx([1.6094379] * 2)


def test_a_repeated_job_continues(
    gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal: Callable[..., str]
) -> None:
    prompts, output = write_prompts(tmp_path / "p.jsonl"), tmp_path / "out.jsonl"
    generate(gpt2, prompts, output, "--num-samples", "2", "--batch-size", "1")
    settings = json.loads((tmp_path / "out.jsonl.settings.json").read_text())["settings"]
    assert settings["weights"] == model_digest(str(gpt2))
    assert settings["tempnet"] == tempnet_digest(TempNet.from_pretrained(gpt2 / "tempnet"))
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
    before = output.read_bytes()
    words = ["generate", "--model", gpt2, "--output", output, "--max-new-tokens", "12", "--prompts"]
    message = refusal(*words, prompts, "--seed", "4", "--top-p", "0.5")
    assert "other settings (seed: 0 → 4; top_p: 1.0 → 0.5)" in message
    other = write_prompts(tmp_path / "other.jsonl", ["something else", *PROMPTS[1:]])
    assert "the text of id 'p0' belongs to another prompt" in refusal(*words, other)
    assert output.read_bytes() == before


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
    keys, prompts = [(i, 0, 0) for i in range(12)], [tokenizer("def").input_ids] * 12
    free, stopped = (Sampler(config, tokenizer, 1.0, stop)(keys, prompts) for stop in ((), ("e", "th")))
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


def test_alpaca_eval(
    gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal: Callable[..., str]
) -> None:
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
    # Another temperature beside it: its texts are those of a run of its own, and the judge's answers are about both.
    judged = [
        {"generator_2": name, "preference": preference, "instruction": "", "output_2": ""}
        for name, preferences in (("mine", (2.0, 1.4, None)), ("mine at 0.2", (1.0, 2.0, 0)))
        for preference in preferences
    ]
    (tmp_path / "annotations.json").write_text(json.dumps(judged))
    page = tmp_path / "page.html"
    beside = ["--beside", "0.2", "--html", str(page), "--judged", str(tmp_path / "annotations.json")]
    generate(gpt2, tmp_path / "in.json", output, *options, *beside)
    assert json.loads(output.read_text()) == written
    printed = capsys.readouterr().out
    assert "mine: win rate 70.00 % (standard error 30.00) of 2 instructions" in printed
    assert "mine at 0.2: win rate 50.00 % (standard error 28.87) of 3 instructions" in printed
    generate(gpt2, tmp_path / "in.json", tmp_path / "alone.json", "--format", "alpaca-eval", "--temperature", "0.2")
    alone = [record["text"] for record in read(tmp_path / "alone.json.records.jsonl")]
    assert [record["text"] for record in read(tmp_path / "out-0.2.json.records.jsonl")] == alone
    assert GenerateConfig(model="m", prompts="p", output="a.b/c", beside=("0.2",)).others()[0].output == "a.b/c-0.2"
    for value in ("abc", "0", "nan", "auto"):
        with pytest.raises(ValueError, match=rf"^beside.* = '?{value}"):
            GenerateConfig(model="m", prompts="p", output="o", beside=(value,))
    assert page.read_text().count("τ = 0.2): ") == len(PROMPTS[:3])
    assert "about 'mine', 'mine at 0.2': name it by --generator" in refusal(
        "generate", "--model", gpt2, "--prompts", tmp_path / "in.json", "--output", output, *options[:2], "--judged",
        tmp_path / "annotations.json", "--generator", "other", "--max-new-tokens", "12",
    )  # fmt: skip


def test_mt_bench_answers_the_second_turn_after_the_first(chat: Path, tmp_path: Path) -> None:
    questions = [
        {"question_id": 81 + i, "category": "writing", "turns": [prompt, "shorter"]}
        for i, prompt in enumerate(PROMPTS[:2])
    ]
    write_lines(tmp_path / "q.jsonl", questions)
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
    grades = [{"model": str(chat), "score": score, "turn": turn} for turn, score in ((1, 9), (2, 4.0), (1, -1))]
    judged = write_lines(tmp_path / "single.jsonl", grades)
    assert describe_judged(judged, "mt-bench", str(chat)).endswith("mean grade 6.50 of 2 answers")


def test_gsm8k_is_scored_by_majorities(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"question": f"What is {n} and {n}?", "answer": f"{n} + {n} = <<2>>.\n#### {2 * n:,}"} for n in (1, 700)]
    write_lines(tmp_path / "q.jsonl", lines)
    output = tmp_path / "out.jsonl"
    generate(llama, tmp_path / "q.jsonl", output, "--format", "gsm8k", "--num-samples", "4", "--chat", "off")
    records = read(output)
    assert [record["gold"] for record in records] == ["2"] * 4 + ["1400"] * 4
    assert all(record["prompt"].count("Q:") == 9 for record in records)
    assert all("Q:" not in record["text"] and "\n\n" not in record["text"] for record in records)
    said = capsys.readouterr().out
    for k in (1, 2, 4):
        assert f"maj@{k}: " in said
    # Texts that are kept are compared with the answers that the file of prompts has now.
    write_lines(output, [record | {"text": "The answer is 3."} for record in records])
    write_lines(tmp_path / "q.jsonl", [line | {"answer": "#### 3"} for line in lines])
    generate(llama, tmp_path / "q.jsonl", output, "--format", "gsm8k", "--num-samples", "4", "--chat", "off")
    assert "maj@1: 100.00% of 2 questions" in capsys.readouterr().out
    now = {"text": "The answer is 3.", "answer": "3", "gold": "3", "is_correct": True}
    assert read(output) == [record | now for record in records]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("She has 3 and 4, so 7. The answer is 7.", "7"),
        ("The answer is $1,450.00 a week.", "1450"),
        ("the answer is 8 - 3 = 5 dollars.", "5"),
        ("The answer is 2. Wait, no. The answer is 18.", "18"),
        ("21-15", "15"),
        ("It fell to -3", "-3"),
        ("He owes -$3.50", "-3.5"),
        ("5 apples. The answer is unknown.", "5"),
        ("nothing to count", None),
        ("The answer is 007", "7"),
        ("9" * 60, "9" * 60),
    ],
)
def test_the_answer_is_the_last_announced_number_or_else_the_last_one(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


def test_a_majority_is_the_first_most_frequent_answer_of_a_group() -> None:
    def score(gold: str, k: int, answers: tuple[str | None, ...] = ("3", "4", "4", None, "3", "3", "9", "4")) -> float:
        return majority_score([(answer, answer == gold) for answer in answers], k)

    assert score("4", 1) == score("3", 1) == 3 / 8
    # The groups of four are [3 4 4 -], whose majority is 4, and [3 3 9 4], whose majority is 3.
    assert score("4", 4) == 1 / 2
    # All eight hold three 3s and three 4s, and the 3 wins because it was seen first.
    assert (score("3", 8), score("4", 8)) == (1.0, 0.0)
    assert score("4", 2, (None, None)) == 0.0
