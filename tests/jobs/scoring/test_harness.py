"""Test that lm-evaluation-harness sees a model at a temperature: its scores, its samples and the shipped tasks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from evaluation_support import MAX_LENGTH, QUESTIONS, TEXT, BruteForce
from lm_eval.api.instance import Instance

from jobs.scoring.language_models.harness import Tasks, run_task
from jobs.scoring.language_models.windows import document_windows, wikitext_pages
from tests.jobs.scoring.evaluation_cases import EXAMPLES, TEMPERATURES, harness, scores, write_tasks


def request(kind: str, *arguments: str) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", TEMPERATURES)
def test_the_harness_sees_our_log_likelihoods(brute: BruteForce, name: str) -> None:
    lm = harness(brute, name)
    pairs = [("the quick brown", " fox jumps"), ("the five ", "boxing"), ("", " wizards"), ("the dog", " sleeps")]
    answers = lm.loglikelihood([request("loglikelihood", *pair) for pair in pairs], disable_tqdm=True)
    pairs[1] = ("the five", " boxing")  # The harness moves trailing spaces to the continuation.
    for (context, continuation), (value, is_greedy) in zip(pairs, answers, strict=True):
        rows = brute.continuation([brute.start, *brute.ids(context)], brute.ids(continuation), name)
        assert value == pytest.approx(-sum(row[0] for row in rows), rel=1e-4)
        assert is_greedy == all(row[3] for row in rows)
    # A rolling request is scored in the harness's own windows, which begin with exactly one document-start token.
    page = wikitext_pages(TEXT)[1]
    windows = document_windows(brute.tokenizer, page, max_length=MAX_LENGTH, detokenize=False)
    (rolling,) = lm.loglikelihood_rolling([request("loglikelihood_rolling", page)], disable_tqdm=True)
    assert rolling == pytest.approx(-scores(brute, windows, [name])[name].nll, rel=1e-5)


def test_without_document_start_contexts_are_the_tokenizers(brute: BruteForce) -> None:
    lm = harness(brute, "one", document_start=False)
    (answer,) = lm.loglikelihood([request("loglikelihood", "the quick", " brown")], disable_tqdm=True)
    rows = brute.continuation(brute.ids("the quick"), brute.ids(" brown"), "one")
    assert answer[0] == pytest.approx(-sum(row[0] for row in rows), rel=1e-4)


@pytest.fixture
def own_tasks(tmp_path: Path) -> Tasks:
    return write_tasks(tmp_path)


@pytest.mark.parametrize("name", ["one", "tempnet"])
def test_accuracy_is_that_of_direct_scoring(brute: BruteForce, own_tasks: Tasks, name: str) -> None:
    figures = run_task(harness(brute, name), own_tasks, "local_arc_easy", limit=0, num_fewshot=-1)
    num_right = 0
    for question in QUESTIONS:
        context = [brute.start, *brute.ids(f"{question['query']}\nAnswer:")]
        sums = [
            sum(row[0] for row in brute.continuation(context, brute.ids(f" {choice}"), name))
            for choice in question["choices"]
        ]
        num_right += sums.index(min(sums)) == question["gold"]
    assert figures["local_arc_easy/acc"] == pytest.approx(num_right / len(QUESTIONS))
    assert 0 < num_right < len(QUESTIONS)
    assert figures["local_arc_easy/acc_stderr"] > 0


def test_every_shipped_task_runs(brute: BruteForce, own_tasks: Tasks) -> None:
    metrics: dict[str, float] = {}
    for path in EXAMPLES.glob("*.yaml"):
        metrics |= run_task(harness(brute, "tempnet"), own_tasks, path.stem, limit=2, num_fewshot=1)
    assert {
        "local_arc_easy/acc_norm", "local_arc_challenge/acc", "local_openbookqa/acc",
        "local_gsm8k/exact_match.strict-match", "local_gsm8k/exact_match.flexible-extract",
    } <= set(metrics)  # fmt: skip


@pytest.mark.parametrize("penalty", [1.0, 3.0])
@torch.no_grad()
def test_sampling_in_the_harness_draws_at_the_temperature_of_the_column(
    brute: BruteForce, penalty: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(brute.base.generation_config, "repetition_penalty", penalty)
    context, mask = harness(brute, "one").tok_batch_encode(["the quick"])
    assert context[0].tolist() == [brute.start, *brute.ids("the quick")]
    for name in TEMPERATURES:
        torch.manual_seed(3)
        drawn = harness(brute, name)._model_generate(
            context, 14, [], attention_mask=mask, do_sample=True, temperature=0.3, top_k=0
        )
        torch.manual_seed(3)
        expected = context[0].tolist()
        while len(expected) < drawn.shape[1]:
            logits = brute.base(torch.tensor([expected])).logits[0, -1]
            # τ comes from the model's own logits, before the repetition penalty changes them.
            tau = brute.tau(logits[: len(brute.tokenizer)], name)
            logits[expected] = torch.where(logits < 0, logits * penalty, logits / penalty)[expected]
            if name.startswith("tempnet"):  # Only TempNets hide the padding from generate().
                logits[len(brute.tokenizer) :] = -torch.inf
            expected.append(int(torch.multinomial(torch.softmax(logits / tau, -1), 1)))
        assert drawn[0].tolist() == expected


def test_the_names_of_shipped_tasks_are_not_the_harness_s_own(own_tasks: Tasks) -> None:
    # No task of the harness may have such a name. Loading all of them takes ten seconds, so their files are searched.
    import lm_eval.tasks

    own = {f"task: {path.stem}" for path in EXAMPLES.glob("*.yaml")}
    assert all(path.read_text().count(f"task: {path.stem}\n") == 1 for path in EXAMPLES.glob("*.yaml"))
    for path in Path(lm_eval.tasks.__file__).parent.rglob("*local*.yaml"):
        assert not own & set(path.read_text().splitlines())
