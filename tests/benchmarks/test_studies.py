"""The benchmarks of docs/results.md: tasks verify answers, intervals are over seeds, and the search finds its band."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t as student

from benchmarks import decoders, product_paths, promise
from benchmarks.band_search import KINDS, draw_worlds, run_search
from benchmarks.decoders import held_out_texts, show_differences
from benchmarks.measure import ratios, spread
from benchmarks.product_paths import FACTORS, TARGETS, WORDS, check, split_targets
from benchmarks.softmax_loss import fused_losses

# ---- peers -----------------------------------------------------------------------------------------------------------


def test_a_fused_cross_entropy_takes_a_temperature_for_every_token() -> None:
    """τ, hidden states and weight get the gradients of the cross-entropy of z/τ from a peer that knows no temperature."""
    hidden, weight, tau = torch.randn(40, 8).double(), torch.randn(50, 8).double(), 0.5 + torch.rand(40).double()
    leaves = [leaf.requires_grad_() for leaf in (hidden, weight, tau)]
    targets = torch.randint(50, (40,))
    expected = F.cross_entropy(hidden @ weight.T / tau.unsqueeze(-1), targets)
    found = fused_losses("cpu")["torch, chunked"](hidden / tau.unsqueeze(-1), weight, targets)
    torch.testing.assert_close(found, expected)
    for own, other in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(own, other)


# ---- tasks -----------------------------------------------------------------------------------------------------------

FACTOR = st.sampled_from(FACTORS)


@given(st.sampled_from(TARGETS), FACTOR, FACTOR, st.integers(0, 99), st.sampled_from("+-"), st.integers(0, 99))
def test_a_right_product_is_what_python_computes(
    target: int, first: int, second: int, product: int, sign: str, distance: int
) -> None:
    for shown, apart in ((product, distance), (first * second, abs(target - first * second))):
        text = f"{first} * {second} = {' '.join(str(shown))} {sign} {' '.join(str(apart))}"
        reached = shown + apart if sign == "+" else shown - apart
        # Nothing is written as "+ 0", so that no path has two forms.
        is_right = first * second == shown and reached == target and (sign, apart) != ("-", 0)
        assert check(target, text) == ((first, second), is_right)
        assert product_paths.verify({"target": target, "text": text}) == float(is_right)


def test_other_forms_of_a_product_have_no_answer() -> None:
    assert check(57, "6 * 8 = 4 8 + 9") == ((6, 8), True)
    for text in ("", "6 * 8 = 4 8", "6 * 8 = 4 8 + 9 9 9", "1 * 8 = 8 + 4 9", "6 * 8 = 4 8 + 9 :", "6 * 8 = 48 + 9",
                 "__import__('os')", "5 7 : 6 * 8 = 4 8 + 9"):  # fmt: skip
        assert check(57, text) == (None, False), text


def test_parts_share_no_target_and_every_one_has_64_right_paths() -> None:
    parts = split_targets()
    assert {name: len(part) for name, part in parts.items()} == {"train": 60, "development": 15, "test": 15}
    assert sorted(target for part in parts.values() for target in part) == list(TARGETS)
    for target in TARGETS:
        paths = {product_paths.path_of(target, first, second) for first in FACTORS for second in FACTORS}
        assert len(paths) == 64
        assert all(check(target, path)[1] for path in paths)
    # What chooses and what reports are apart: even texts are of development targets, and odd ones of test targets.
    for place, tokens in enumerate(held_out_texts(3)):
        words = [WORDS[token] for token in tokens]
        target = int(words[0] + words[1])
        assert target in parts["test" if place % 2 else "development"]
        assert check(target, " ".join(words[3 : words.index("<end>")]))[1]
    assert held_out_texts(3) != held_out_texts(4)


def test_demonstrations_prefer_near_products_as_they_are_said_to() -> None:
    rng = np.random.default_rng(0)
    texts = [[WORDS[token] for token in row] for row in product_paths.draw_texts(4000, (57,), rng).tolist()]
    pairs = [check(57, " ".join(words[4 : words.index("<end>", 1)])) for words in texts]
    assert all(is_right for _, is_right in pairs)
    weights = {(a, b): 1 / (1 + abs(a * b - 57)) for a in FACTORS for b in FACTORS}
    for pair, weight in weights.items():
        share = weight / sum(weights.values())
        assert pairs.count((pair, True)) / 4000 == pytest.approx(share, abs=5 * (share / 4000) ** 0.5)


# ---- rounds, means and intervals -------------------------------------------------------------------------------------


def test_ratios_are_taken_within_a_round() -> None:
    assert spread(ratios([1.0, 4.0, 9.0], [2.0, 2.0, 3.0])) == "2.000 (0.500 to 3.000)"


def half_width(values: list[float] | np.ndarray) -> float:
    return float(student.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values)))


def test_differences_are_paired_over_seeds() -> None:
    """A rival that moves with the seed as the learned one does has a narrow interval, however wide those of both are."""
    ours, theirs = np.array([0.50, 0.70, 0.60]), np.array([0.40, 0.61, 0.49])
    measures = ("correct", "distinct_correct", "pass_at_k", "maj_at_k")
    runs = []
    for own, other in zip(ours, theirs, strict=True):
        values = {"TempNet, reward each": own, "TempNet, reward distinct": own + 0.1, "min-p": other}
        means = {name: {measure: {"mean": value} for measure in measures} for name, value in values.items()}
        runs.append({"decoders": {name: {"prompts": prompts} for name, prompts in means.items()}})
    row = next(line for line in show_differences(runs).splitlines() if line.startswith("| min-p")).split("|")
    gaps = 100 * (ours - theirs)
    for cell, mean in zip(row[2:-1], [gaps.mean()] * 4 + [gaps.mean() + 10] * 4, strict=True):
        assert list(map(float, cell.split(" ± "))) == pytest.approx([mean, half_width(gaps)], abs=0.06)


def test_means_and_intervals_are_over_seeds_and_not_over_documents() -> None:
    gains, losses, rules = [0.1, 0.4, 0.3], (2.0, None, 3.0), ("a", "b", "a")
    runs = []
    for loss, gain, rule in zip(losses, gains, rules, strict=True):
        text = {"rule": rule, "loss": {"mean": loss, "half_width": 0.1}, "gain": {"mean": gain, "half_width": 9.0}}
        prompts = {"rule": rule, "length": gain, "correct": None}
        found = {"min-p": {"text": text, "prompts": prompts}}
        runs.append({"num_tokens": 10, "human_loss": 1.0, "decoders": found, "tried": [{"decoder": "min-p"}]})
    values = decoders.combine(runs)
    found = values["decoders"]["min-p"]
    assert found["text"]["gain"] == pytest.approx({"mean": np.mean(gains), "half_width": half_width(gains)})
    assert found["text"]["loss"] == {"mean": None, "half_width": None}
    assert found["text"]["rule"] == "a; b"
    assert found["prompts"] == {"rule": "a; b", "length": pytest.approx(np.mean(gains)), "correct": None}
    assert (values["num_tokens"], len(values["tried"])) == (30, 3)


# ---- the search of a band --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_search_stays_within_a_quarter_of_the_grid_and_mostly_finds_the_band(kind: str) -> None:
    outcomes = [run_search(world) for world in draw_worlds(kind, 10)]
    assert all(outcome.share <= 0.25 + 1e-9 for outcome in outcomes)
    assert sum(outcome.found for outcome in outcomes) >= 6


# ---- promise and delivery --------------------------------------------------------------------------------------------


def test_nothing_is_promised_or_delivered_on_text_that_a_model_has_sampled_itself(tmp_path: Path) -> None:
    """One small cell of the table in docs/when.md: a LLaMA that begins documents with <s> and never ends them."""
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefgh"), size=rng.integers(2, 6))) for _ in range(60)]
    texts = [" ".join(rng.choice(words[number % 7 :: 7], size=60)) for number in range(150)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    job = promise.Arguments(
        text=str(tmp_path / "text.jsonl"), shifted=str(tmp_path / "text.jsonl"), output=str(tmp_path / "out"),
        vocab_size=80, num_steps=60, num_samples=300, num_shifted=20, num_tempnet_steps=15,
    )  # fmt: skip
    known = promise.run_cell(job, "llama", 0, "own")
    assert known["verdict"] != "worth it"
    assert not any(promise.realised(known, kind).low > 0.001 for kind in promise.INPUTS)
    assert promise.row_of(known, "llama")[-1] == "yes"
    assert 0.9 < known["best_constant"] < 1.1
    assert promise.run_cell(job, "llama", 0, "own") == json.loads(json.dumps(known))  # it is not made again
