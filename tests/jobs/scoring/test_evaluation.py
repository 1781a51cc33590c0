"""Test the evaluation of language models without Ray: windows, and sums against brute force."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from evaluation_support import LAMBADA, MAX_LENGTH, TEXT, BruteForce, write_lines
from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

from jobs.scoring.language_models.temperatures import Temperature, divide_
from jobs.scoring.language_models.windows import (
    Window,
    document_windows,
    num_words,
    pair_window,
    read_lambada,
    slices,
    wikitext_pages,
)
from tests.jobs.scoring.evaluation_cases import TEMPERATURES, scores


@pytest.mark.parametrize(
    ("text", "name", "needs_tempnet", "value"),
    [
        ("one", "one", False, 1.0),
        ("fixed:0.70", "fixed:0.7", False, 0.7),
        ("tempnet", "tempnet", True, None),
        ("tempnet:1.5", "tempnet:1.5", True, 1.5),
    ],
)
def test_temperatures_are_read(text: str, name: str, needs_tempnet: bool, value: float | None) -> None:
    assert Temperature.parse(text) == Temperature(name=name, needs_tempnet=needs_tempnet, value=value)


@pytest.mark.parametrize("text", ["fixed:0", "fixed:-1", "fixed", "fixed:x", "one:2", "hot", "tempnet:0", "fixed:inf"])
def test_other_temperatures_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="none of: one, fixed:VALUE, tempnet, tempnet:TAU_MAX"):
        Temperature.parse(text)


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


def test_slices_keep_every_window_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.scoring.language_models.windows.NUM_TOKENS_PER_SLICE", 10)
    windows = [Window((0,) * length, (0,)) for length in (3, 4, 3, 1, 12, 2)]
    parts = list(slices(windows))
    assert [len(part) for part in parts] == [3, 1, 1, 1]
    assert [window for part in parts for window in part] == windows


@pytest.mark.parametrize("name", TEMPERATURES)
def test_a_document_scores_as_by_brute_force(brute: BruteForce, name: str) -> None:
    text = wikitext_detokenizer({"page": wikitext_pages(TEXT)[0]})
    windows = document_windows(brute.tokenizer, wikitext_pages(TEXT)[0], max_length=MAX_LENGTH, detokenize=True)
    assert len(windows) >= 3
    score = scores(brute, windows, [name])[name]
    nll, tau, entropy, _ = zip(*brute.document(text, name), strict=True)
    assert score.num_tokens == len(nll)
    assert score.nll == pytest.approx(sum(nll), rel=1e-5)
    ours, ours_entropy = np.concatenate(score.tau), np.concatenate(score.entropy)
    assert sorted(ours) == pytest.approx(sorted(tau), rel=1e-4)
    # The sum of products shows that each τ stands beside the entropy of the same prediction.
    assert ours @ ours_entropy == pytest.approx(np.dot(tau, entropy), rel=1e-4)
    if name == "tempnet":
        assert max(tau) - min(tau) > 0.1  # A TempNet with one τ for all contexts would prove little.


def test_sums_depend_neither_on_batches_slices_nor_the_other_temperatures(brute: BruteForce) -> None:
    windows = [
        window
        for page in wikitext_pages(TEXT)
        for window in document_windows(brute.tokenizer, page, max_length=MAX_LENGTH, detokenize=True)
    ]
    reference = scores(brute, windows, TEMPERATURES)
    assert len({round(score.nll, 2) for score in reference.values()}) == len(TEMPERATURES)
    for batch_size in (1, 2, 100):
        for name, score in scores(brute, windows, TEMPERATURES[::-1], batch_size).items():
            assert score.nll == pytest.approx(reference[name].nll, rel=1e-5)
    parts = [scores(brute, part, ["tempnet"])["tempnet"] for part in (windows[:2], windows[2:3], windows[3:])]
    assert sum(part.nll for part in parts) == pytest.approx(reference["tempnet"].nll, rel=1e-5)
    assert sum(part.num_tokens for part in parts) == reference["tempnet"].num_tokens


def test_chunks_of_tokens_change_nothing(brute: BruteForce, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = document_windows(brute.tokenizer, TEXT, max_length=MAX_LENGTH, detokenize=True)
    whole = scores(brute, windows, ["tempnet"])["tempnet"]
    logits = torch.randn(2, 9, len(brute.tokenizer) + 5)[..., :-5] * 3
    function = Temperature.parse("tempnet").function(brute.network)
    divided = logits / function(logits).unsqueeze(-1)
    monkeypatch.setattr("jobs.scoring.language_models.temperatures._CHUNK_ELEMENTS", 4 * len(brute.tokenizer))
    assert scores(brute, windows, ["tempnet"])["tempnet"].nll == pytest.approx(whole.nll, rel=1e-6)
    assert scores(brute, windows, ["tempnet"])["tempnet"].num_greedy == whole.num_greedy
    torch.testing.assert_close(divide_(logits, function), divided)


@pytest.mark.parametrize("name", ["one", "tempnet"])
def test_lambada_scores_as_by_brute_force(brute: BruteForce, tmp_path: Path, name: str) -> None:
    # Two more lines end in the word that the model itself predicts, so that some answers are right.
    records = list(LAMBADA)
    for begin in ("the quick brown", "sphinx of black quartz , judge"):
        context = [brute.start, *brute.ids(begin)]
        ids = torch.argsort(brute.logits(context), descending=True).tolist()
        word = next(
            text for text in map(brute.tokenizer.decode, ids) if text.startswith(" ") and text.strip().isalpha()
        )
        records.append({"text": begin + word})
    pairs = read_lambada(write_lines(tmp_path / "lambada.jsonl", records), 0)
    assert pairs[2] == ("judge my vow , sphinx of black", "quartz")
    assert pairs[3] == ("", "wizards")
    windows = [
        pair_window(brute.tokenizer, context, f" {word}", max_length=MAX_LENGTH, document_start=True)
        for context, word in pairs
    ]
    score = scores(brute, windows, [name])[name]
    rows = [
        brute.continuation([brute.start, *brute.ids(context)], brute.ids(f" {word}"), name) for context, word in pairs
    ]
    assert score.nll == pytest.approx(sum(token[0] for row in rows for token in row), rel=1e-5)
    assert score.num_greedy == sum(all(token[3] for token in row) for row in rows)
    assert score.num_windows == len(records)


def test_greedy_windows_are_counted(brute: BruteForce) -> None:
    context = [brute.start, *brute.ids("the quick brown")]
    best = int(brute.logits(context).argmax())
    windows = [Window(tuple(context), (best,)), Window(tuple(context), ((best + 1) % 300,))]
    score = scores(brute, windows, ["tempnet"])["tempnet"]
    assert (score.num_greedy, score.num_windows, score.num_tokens) == (1, 2, 2)
