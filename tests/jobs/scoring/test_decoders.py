"""Test the bench of decoders in one process: what chooses and what reports, what is sampled, and what the table says."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from evaluation_support import write_lines
from transformers import AutoModelForCausalLM, TopPLogitsWarper

from jobs.scoring.analyses.config import Decoders
from jobs.scoring.decoders.bench import (
    AUTODECO,
    CONSTANT,
    ONE,
    PROPER,
    ROBUST,
    BenchSettings,
    BenchWorker,
    Comparison,
    FrozenModel,
    MeasuredText,
    SampledText,
    measure_prompts,
    published_rules,
    run_bench,
)
from jobs.scoring.decoders.job import conclusion, plot, resolve_settings, table
from jobs.scoring.generation.formats import FORMATS, Prompt
from pipelines.text.tokenization import load_tokenizer
from tempnet.decoders.rules import ConstantTemperature, Mirostat, Shuffled, Warped, temper
from tempnet.inference import record_hidden_states
from tests.jobs.scoring.generation_support import VOCABULARY, make_model

TOP_P = Warped("top-p 0.7", TopPLogitsWarper(0.7))
LEARNED = (ROBUST, PROPER, AUTODECO, "TempNet of the model")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    words = ["temperature", "network", "of", "a", "model", "the", "def", "return", "token", "class"]
    texts = [" ".join(rng.choice(words, size=2 if place in (1, 4) else rng.integers(8, 30))) for place in range(10)]
    return Path(write_lines(tmp_path_factory.mktemp("text") / "text.jsonl", [{"text": text} for text in texts]))


def config(gpt2: Path, text: Path, **changes: Any) -> Decoders:
    options = {"num_steps": 3, "num_samples": 4, "max_new_tokens": 6, "prompt_tokens": 4, "k": 2, "batch_size": 3}
    return Decoders(
        model=str(gpt2), text=str(text), output="decoders", **{**options, "tokens_per_document": 24, **changes}
    )


@pytest.fixture(scope="module")
def settings(gpt2: Path, text: Path) -> BenchSettings:
    return resolve_settings(config(gpt2, text))[0]


@pytest.fixture(scope="module", autouse=True)
def few_rules() -> Iterator[None]:
    """Leave each decoder one or two candidates, which is enough to test the bench and takes a tenth of the time."""
    few = {name: family[:2] for name, family in published_rules().items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jobs.scoring.decoders.bench.published_rules", lambda: few)
        patch.setattr("jobs.scoring.decoders.bench.SCALES", (0.7, 1.0))
        yield


def bench(settings: BenchSettings) -> Comparison:
    worker = BenchWorker(settings)
    return run_bench(settings, lambda units: [worker(unit).value for unit in units])


@pytest.fixture(scope="module")
def comparison(settings: BenchSettings) -> Comparison:
    return bench(settings)


def test_samples_are_those_of_a_loop_without_a_cache_and_do_not_depend_on_the_batch(settings: BenchSettings) -> None:
    prompts = [*settings.prompts[:3], settings.prompts[3][:2]]
    models = [FrozenModel(replace(settings.config, max_new_tokens=5, seed=4, batch_size=size)) for size in (1, 4)]
    for rule in (TOP_P, Mirostat(3.0), Shuffled(torch.tensor([0.3, 2.0]), "x")):
        one, other = ([text for row in model.sample(rule, prompts) for text in row] for model in models)
        assert [text.tokens for text in one] == [text.tokens for text in other]
        expected = [text.log_probability for text in other]
        np.testing.assert_allclose([text.log_probability for text in one], expected, atol=1e-3)
    base = AutoModelForCausalLM.from_pretrained(settings.config.model).eval()
    [[text, *_]] = models[0].sample(TOP_P, prompts[:1])
    ids, score = list(prompts[0]), 0.0
    for token in text.tokens:
        with torch.no_grad():
            row = base(input_ids=torch.tensor([ids])).logits[0, -1, :VOCABULARY]
        assert TOP_P.log_probabilities(row)[token] > -math.inf
        score += temper(row, 1.0)[token].item()
        ids.append(token)
    assert text.log_probability == pytest.approx(score, abs=1e-3) or text.num_drawn > len(text.tokens)


def test_measured_and_sampled_states_are_those_that_tempnets_are_trained_on(
    settings: BenchSettings, tmp_path: Path, text: Path
) -> None:
    """A model that scales its logits gives TempNets scaled hidden states everywhere."""
    place = make_model(tmp_path / "granite", "granite", 64, tempnet=False)
    values = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(values | {"logits_scaling": 8.0}))
    model, seen_by_rule = FrozenModel(config(place, text)), list[torch.Tensor]()
    measured = model.measure(settings.documents)

    class Seen(ConstantTemperature):
        def temperatures(self, logits: torch.Tensor, hidden: torch.Tensor | None = None) -> torch.Tensor:
            seen_by_rule.append(hidden)
            return torch.ones(len(logits))

    for number, ids in enumerate(settings.documents):
        part = measured.part(measured.documents == number)
        assert part.targets.tolist() == list(ids)
        with torch.no_grad(), record_hidden_states(model.base) as seen:
            logits = model.base(input_ids=torch.tensor([[0, *ids[:-1]]])).logits[0, :, :VOCABULARY]
        torch.testing.assert_close(part.hidden, seen[0][0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(model.logits(part.hidden), logits, atol=1e-4, rtol=1e-4)
    model.sample(Seen(), [(0, *ids[:-1])])
    torch.testing.assert_close(seen_by_rule[0][:1], seen[0][0, -1:], atol=1e-5, rtol=1e-5)


def test_texts_end_where_those_of_generation_end(
    settings: BenchSettings, gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the cost of a text nor its figures count what a model writes after the format's stop strings."""
    rule, chosen = ConstantTemperature(1.5), replace(settings.config, num_samples=6, max_new_tokens=12, seed=4)
    plain = FrozenModel(chosen).sample(rule, settings.prompts)
    monkeypatch.setitem(FORMATS, "text", replace(FORMATS["text"], stop=("e", "t ")))
    stopped, tokenizer = FrozenModel(chosen).sample(rule, settings.prompts), load_tokenizer(str(gpt2))
    num_shorter = 0
    for whole, text in zip(itertools.chain(*plain), itertools.chain(*stopped), strict=True):
        written = [tokenizer.decode(whole.tokens[:number]) for number in range(len(whole.tokens) + 1)]
        end = next((number for number, part in enumerate(written) if "e" in part or "t " in part), None)
        assert text.tokens == whole.tokens[:end]
        assert whole.text.startswith(text.text.rstrip("\ufffd"))
        assert "e" not in text.text
        assert text.num_drawn == (whole.num_drawn if end is None else end)
        assert (text.log_probability == pytest.approx(whole.log_probability)) == (text.num_drawn == whole.num_drawn)
        num_shorter += text.num_drawn < whole.num_drawn
    assert num_shorter > 5


def test_every_decoder_has_its_place_and_every_learned_one_its_controls(comparison: Comparison) -> None:
    expected = [*published_rules(), *LEARNED]
    expected += [f"{name}: {control}" for name in LEARNED for control in ("MeanShift", "shuffled")]
    assert (
        set(comparison.for_text) == set(comparison.for_prompts) == set(comparison.values["decoders"]) == set(expected)
    )
    for name in LEARNED:
        shift, pool = (comparison.for_text[f"{name}: {control}"] for control in ("MeanShift", "shuffled"))
        assert isinstance(shift, Warped if name == AUTODECO else ConstantTemperature)
        assert isinstance(pool, Shuffled)
        assert shift.tau == pytest.approx(pool.pool.mean().item(), rel=1e-5)


def test_the_reporting_half_changes_no_choice_and_nothing_learned(
    settings: BenchSettings, comparison: Comparison
) -> None:
    """Documents and prompts at odd places report, so a bench in which these are turned round makes the same choices."""
    documents, prompts = (
        tuple(ids[::-1] if place % 2 else ids for place, ids in enumerate(texts))
        for texts in (settings.documents, settings.prompts)
    )
    other = bench(replace(settings, documents=documents, prompts=prompts))
    logits, hidden = torch.randn(5, VOCABULARY), torch.randn(5, 32)
    for ours, theirs in ((comparison.for_text, other.for_text), (comparison.for_prompts, other.for_prompts)):
        assert {name: rule.label for name, rule in ours.items()} == {name: rule.label for name, rule in theirs.items()}
        for name in LEARNED:
            found = ours[name].log_probabilities(logits, hidden)
            assert found.equal(theirs[name].log_probabilities(logits, hidden)), name
    ours, theirs = (one.values["decoders"][ONE] for one in (comparison, other))
    assert ours["text"]["loss"] != theirs["text"]["loss"]
    assert ours["prompts"]["log_probability"] != theirs["prompts"]["log_probability"]


def test_the_best_constant_is_the_best_of_those_tried_on_the_choosing_half(
    settings: BenchSettings, comparison: Comparison
) -> None:
    model = FrozenModel(settings.config)
    choosing, reporting = model.measure(settings.documents).halves()
    assert not set(choosing.documents.tolist()) & set(reporting.documents.tolist())

    def losses(part: MeasuredText, tau: float) -> float:
        return torch.nn.functional.cross_entropy(model.logits(part.hidden) / tau, part.targets).item()

    candidates = [rule.tau for rule in published_rules()[CONSTANT][:2] if isinstance(rule, ConstantTemperature)]
    chosen = comparison.for_text[CONSTANT]
    assert isinstance(chosen, ConstantTemperature)
    found = comparison.values["decoders"][CONSTANT]["text"]["loss"]["mean"]
    assert found == pytest.approx(losses(reporting, chosen.tau), rel=1e-4)
    assert comparison.values["human_loss"] == pytest.approx(losses(choosing, 1.0), rel=1e-4)
    assert losses(choosing, chosen.tau) == pytest.approx(min(losses(choosing, tau) for tau in candidates), rel=1e-2)


def test_table_and_plot_show_every_decoder(comparison: Comparison, tmp_path: Path) -> None:
    values = json.loads(json.dumps(comparison.values, allow_nan=False))
    shown = table(values)
    assert all(f"| {name} " in shown for name in comparison.for_text)
    assert shown.count("\n") == len(comparison.for_text) + 1
    assert conclusion(values).count("\n") == 2
    plot(values, tmp_path / "frontier.png")
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")


def test_figures_of_prompts_with_a_verifier() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 4, size=(5, 8, 3)).tolist()
    texts = [[SampledText(str(ids[0]), ids, 3, -6.0) for ids in row] for row in tokens]

    def grade(prompt: Prompt, text: str) -> dict[str, Any]:
        return {"answer": text, "is_correct": int(text) % 2 == 0}

    prompts = [Prompt(id=number, turns=()) for number in range(5)]
    found = measure_prompts(texts, prompts, k=2, reference_length=6.0, grade=grade)
    assert found["num_counted"] == 4, "texts of half the length: twice as many of them cost the same"
    firsts = np.array([[text.tokens[0] for text in samples] for samples in texts])
    groups = firsts.reshape(-1, 4).tolist()
    expected = {
        "log_probability": -2.0,
        "correct": (firsts % 2 == 0).mean(),
        "distinct_correct": np.mean([len({*row} & {0, 2}) / 8 for row in firsts.tolist()]),
        "maj_at_k": np.mean([max(group, key=group.count) % 2 == 0 for group in groups]),
    }
    assert {name: found[name]["mean"] for name in expected} == pytest.approx(expected)


def test_answers_of_gsm8k_are_graded(
    settings: BenchSettings, comparison: Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, grade: Any, **__: Any) -> None:
        raise InterruptedError(grade)

    monkeypatch.setattr("jobs.scoring.decoders.bench.measure_prompts", refuse)
    answers = iter([([(ONE, ConstantTemperature(1.0))], comparison), [[SampledText("2", [1], 1, -1.0)]]])
    asked = replace(settings, config=replace(settings.config, format="gsm8k", prompts="q.jsonl"))
    with pytest.raises(InterruptedError) as caught:
        run_bench(asked, lambda units: [next(answers)])
    assert caught.value.args == (FORMATS["gsm8k"].grade,)


def test_prompts_are_beginnings_of_documents_of_their_own_half(gpt2: Path, text: Path) -> None:
    settings = resolve_settings(config(gpt2, text, prompt_tokens=20, max_documents=9))[0]
    longer = [len(ids) > 20 for ids in settings.documents]
    assert 0 < sum(longer) < len(longer), "some documents are too short, so places of prompts and documents differ"
    for place, ids in enumerate(settings.prompts):
        assert ids[0] == 0
        owners = [number for number, document in enumerate(settings.documents) if document[:20] == ids[1:]]
        assert [number % 2 for number in owners] == [place % 2]
