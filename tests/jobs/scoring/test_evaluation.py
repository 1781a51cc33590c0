"""Test the evaluation of language models without Ray: windows, sums against brute force, units, and the harness."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from evaluation_support import LAMBADA, MAX_LENGTH, TEXT, BruteForce, make_export, write_lines
from lm_eval.api.instance import Instance
from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

from jobs.engine.config import TrackingSection
from jobs.scoring.language_models.config import EvaluateConfig, Temperature
from jobs.scoring.language_models.evaluate import _task_digest, make_plan
from jobs.scoring.language_models.harness import Tasks, run_task
from jobs.scoring.language_models.windows import (
    ScoredWindow,
    divide_,
    document_windows,
    num_words,
    pair_window,
    read_lambada,
    wikitext_pages,
)
from tests.jobs.scoring.evaluation_cases import EXAMPLES, harness, scores, write_tasks


def test_pages_and_words_are_those_of_the_harness() -> None:
    first, second = wikitext_pages(TEXT)
    assert first.startswith(" = First title =")
    assert " = = A section = =" in first
    assert second.startswith(" = Second title =")
    assert wikitext_pages("no heading\nat all") == ["no heading\nat all"]
    assert num_words("a b\n c") == 3
    assert num_words(" a  b\n") == 4  # The harness counts the empty pieces at both ends.


def test_every_token_is_a_target_once_and_no_window_is_too_long(brute: BruteForce) -> None:
    for page in [*wikitext_pages(TEXT), "a", " ".join(["fox"] * MAX_LENGTH)]:
        windows = document_windows(brute.tokenizer, page, max_length=MAX_LENGTH, detokenize=False)
        assert [target for window in windows for target in window.targets] == brute.ids(page)
        assert windows[0].inputs[0] == brute.start
        assert max(len(window.inputs) for window in windows) <= MAX_LENGTH


@pytest.mark.parametrize("export", ["both"], indirect=True)
def test_a_document_scores_as_by_brute_force_in_any_batch(brute: BruteForce) -> None:
    text = wikitext_detokenizer({"page": wikitext_pages(TEXT)[0]})
    windows = document_windows(brute.tokenizer, wikitext_pages(TEXT)[0], max_length=MAX_LENGTH, detokenize=True)
    assert len(windows) >= 3
    names = ["one", "fixed:0.7", "tempnet", "tempnet:1.2"]
    found = scores(brute, windows, names)
    for batch_size in (1, 100):
        for name, score in scores(brute, windows, names[::-1], batch_size).items():
            assert score.nll == pytest.approx(found[name].nll, rel=1e-5)
    for name, score in found.items():
        nll, tau, entropy, _ = zip(*brute.document(text, name), strict=True)
        assert score.num_tokens == len(nll)
        assert score.nll == pytest.approx(sum(nll), rel=1e-5)
        ours, ours_entropy = np.concatenate(score.tau), np.concatenate(score.entropy)
        assert sorted(ours) == pytest.approx(sorted(tau), rel=1e-4)
        # The sum of products shows that each τ stands beside the entropy of the same prediction.
        assert ours @ ours_entropy == pytest.approx(np.dot(tau, entropy), rel=1e-4)
        if name == "tempnet":
            assert max(tau) - min(tau) > 0.1  # A TempNet with one τ for all contexts would prove little.


def test_chunks_of_tokens_change_nothing(brute: BruteForce, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = document_windows(brute.tokenizer, TEXT, max_length=MAX_LENGTH, detokenize=True)
    whole = scores(brute, windows, ["tempnet"])["tempnet"]
    logits = torch.randn(2, 9, len(brute.tokenizer) + 5)[..., :-5] * 3
    function = Temperature.parse("tempnet").function(brute.network)
    hidden = torch.randn(2, 9, 32)
    divided = logits / function(logits, hidden).unsqueeze(-1)
    monkeypatch.setattr("jobs.scoring.language_models.windows._CHUNK_ELEMENTS", 4 * len(brute.tokenizer))
    assert scores(brute, windows, ["tempnet"])["tempnet"].nll == pytest.approx(whole.nll, rel=1e-6)
    assert scores(brute, windows, ["tempnet"])["tempnet"].num_greedy == whole.num_greedy
    torch.testing.assert_close(divide_(logits, hidden, function), divided)


def test_lambada_scores_as_by_brute_force_and_greedy_answers_are_counted(brute: BruteForce, tmp_path: Path) -> None:
    pairs = read_lambada(write_lines(tmp_path / "lambada.jsonl", LAMBADA), 0)
    assert pairs[2:4] == [("judge my vow , sphinx of black", "quartz"), ("", "wizards")]
    (tmp_path / "more.jsonl").write_text('\ufeff{"text": "a \u2028 b"}\n')  # A line ends at a line feed only.
    assert read_lambada(str(tmp_path / "more.jsonl"), 0) == [("a", "b")]
    windows, rows = [], []
    for context, word in pairs:
        windows.append(pair_window(brute.tokenizer, context, f" {word}", max_length=MAX_LENGTH, document_start=True))
        rows.append(brute.continuation([brute.start, *brute.ids(context)], brute.ids(f" {word}"), "tempnet"))
    score = scores(brute, windows, ["tempnet"])["tempnet"]
    assert score.nll == pytest.approx(sum(token[0] for row in rows for token in row), rel=1e-5)
    assert score.num_windows == len(LAMBADA)
    context = (brute.start, *brute.ids("the quick brown"))
    best = int(brute.logits(list(context)).argmax())
    windows = [ScoredWindow(context, (best,)), ScoredWindow(context, ((best + 1) % 300,))]
    assert scores(brute, windows, ["tempnet"])["tempnet"].num_greedy == 1


def config(export: str, tmp_path: Path, **changes: Any) -> EvaluateConfig:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    fields: dict[str, Any] = {"models": (export,), "wikitext": str(text), "storage": str(tmp_path / "runs"), **changes}
    return EvaluateConfig(tracking=TrackingSection(enabled=False), **fields)


def test_the_hash_of_a_unit_changes_with_what_decides_it(export: str, tmp_path: Path) -> None:
    def keys(**changes: Any) -> set[str]:
        return set(make_plan(config(export, tmp_path, **changes)).keys)

    reference = keys(temperatures=("one", "tempnet"))
    assert len(reference) == 2
    assert keys(temperatures=("tempnet", "one")) == reference
    assert keys(temperatures=("tempnet", "one"), batch_size=1, name="other") == reference
    assert keys() < reference
    for changes in ({"temperatures": ("fixed:2",)}, {"max_length": 8}, {"limit": 1}, {"detokenize": False}):
        assert not keys(**changes) & reference
    assert not keys(tempnets=("none",)) & reference  # Without a network the padding counts, too.
    other = make_export(tmp_path / "other", seed=1)
    assert not keys(models=(other,), temperatures=("one", "tempnet")) & reference
    # Another network beside the same base changes only its own column.
    assert len(keys(temperatures=("one", "tempnet"), tempnets=(f"{other}/tempnet",)) & reference) == 1


def request(kind: str, *arguments: str) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("export", ["both"], indirect=True)
@pytest.mark.parametrize("name", ["fixed:0.7", "tempnet:1.2"])
def test_the_harness_sees_our_log_likelihoods(brute: BruteForce, name: str) -> None:
    lm = harness(brute, name)
    pairs = [("the quick brown", " fox jumps"), ("the five ", "boxing"), ("", " wizards"), ("the dog", " sleeps")]
    answers = lm.loglikelihood([request("loglikelihood", *pair) for pair in pairs], disable_tqdm=True)
    pairs[1] = ("the five", " boxing")  # The harness moves trailing spaces to the continuation.
    for (context, continuation), (value, is_greedy) in zip(pairs, answers, strict=True):
        rows = brute.continuation([brute.start, *brute.ids(context)], brute.ids(continuation), name)
        assert value == pytest.approx(-sum(row[0] for row in rows), rel=1e-4)
        assert is_greedy == all(row[3] for row in rows)
    unopened = harness(brute, name, document_start=False)
    (answer,) = unopened.loglikelihood([request("loglikelihood", *pairs[0])], disable_tqdm=True)
    rows = brute.continuation(brute.ids(pairs[0][0]), brute.ids(pairs[0][1]), name)
    assert answer[0] == pytest.approx(-sum(row[0] for row in rows), rel=1e-4)
    # A rolling request is scored in the harness's own windows, which begin with exactly one document-start token.
    page = wikitext_pages(TEXT)[1]
    windows = document_windows(brute.tokenizer, page, max_length=MAX_LENGTH, detokenize=False)
    (rolling,) = lm.loglikelihood_rolling([request("loglikelihood_rolling", page)], disable_tqdm=True)
    assert rolling == pytest.approx(-scores(brute, windows, [name])[name].nll, rel=1e-5)


def test_every_shipped_task_runs(brute: BruteForce, tmp_path: Path) -> None:
    own_tasks, metrics = write_tasks(tmp_path), dict[str, float]()
    for path in EXAMPLES.glob("*.yaml"):
        metrics |= run_task(harness(brute, "tempnet"), own_tasks, path.stem, limit=2, num_fewshot=1)
    assert {
        "local_arc_easy/acc_norm", "local_arc_challenge/acc", "local_openbookqa/acc",
        "local_gsm8k/exact_match.strict-match", "local_gsm8k/exact_match.flexible-extract",
    } <= set(metrics)  # fmt: skip


def test_groups_and_tags_are_run_and_known_by_the_data_of_their_tasks(brute: BruteForce, tmp_path: Path) -> None:
    write_tasks(tmp_path)
    place = tmp_path / "tasks"
    place.mkdir()
    for name in ("local_arc_easy", "local_openbookqa"):
        (place / f"{name}.yaml").write_text((EXAMPLES / f"{name}.yaml").read_text() + "tag: tagged\n")
    entry = {"task": "local_arc_easy", "dataset_kwargs": {"data_files": {"test": "big.jsonl"}}}
    (place / "group.yaml").write_text(json.dumps({"group": "grouped", "task": [entry, "local_openbookqa"]}))
    big = tmp_path / "big.jsonl"
    big.write_bytes((tmp_path / "arc_easy_test.jsonl").read_bytes())
    tasks = Tasks(str(place), str(tmp_path))
    assert [path.name for path in tasks.data_files("tagged")] == ["arc_easy_test.jsonl", "openbook_qa_test.jsonl"]
    assert [path.name for path in tasks.data_files("grouped")] == ["big.jsonl", "openbook_qa_test.jsonl"]
    for name in ("tagged", "grouped"):
        metrics = run_task(harness(brute, "one"), tasks, name, limit=2, num_fewshot=0)
        assert {"local_arc_easy/acc", "local_openbookqa/acc"} <= set(metrics)
    content = bytearray(4 << 20)
    big.write_bytes(content)
    before = _task_digest(tasks, "grouped")
    content[100_000] = 1  # between the samples of a large file
    big.write_bytes(content)
    assert _task_digest(tasks, "grouped") != before
    big.unlink()
    with pytest.raises(ValueError, match=r"task 'grouped' reads .*big.jsonl, which is no file"):
        tasks.data_files("grouped")


@pytest.mark.parametrize("export", ["logits", "both"], indirect=True)
@torch.no_grad()
def test_sampling_in_the_harness_draws_at_the_temperature_of_the_column(
    brute: BruteForce, monkeypatch: pytest.MonkeyPatch
) -> None:
    penalty = 3.0
    monkeypatch.setattr(brute.base.generation_config, "repetition_penalty", penalty)
    context, mask = harness(brute, "one").tok_batch_encode(["the quick"])
    assert context[0].tolist() == [brute.start, *brute.ids("the quick")]
    for name in ("fixed:0.7", "tempnet:1.2"):
        torch.manual_seed(3)
        drawn = harness(brute, name)._model_generate(
            context, 14, [], attention_mask=mask, do_sample=True, temperature=0.3, top_k=0
        )
        torch.manual_seed(3)
        expected = context[0].tolist()
        while len(expected) < drawn.shape[1]:
            logits = brute.all_logits(expected)
            # τ comes from the model's own logits, before the repetition penalty changes them.
            tau = brute.tau(logits[: len(brute.tokenizer)], name)
            logits[expected] = torch.where(logits < 0, logits * penalty, logits / penalty)[expected]
            logits[len(brute.tokenizer) :] = -torch.inf
            expected.append(int(torch.multinomial(torch.softmax(logits / tau, -1), 1)))
        assert drawn[0].tolist() == expected
