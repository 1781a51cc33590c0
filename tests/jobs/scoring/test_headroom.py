"""Test what the headroom job measures of a model's tokens, and what it keeps of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from evaluation_support import write_lines
from prediction_support import CONTEXT_LENGTH, VOCAB_SIZE, some_texts
from transformers import AutoModelForCausalLM

from jobs.scoring.headroom.config import Headroom
from jobs.scoring.headroom.job import Question, figures, run_test, table, verdict
from jobs.scoring.headroom.texts import Measurer, TextMeasurement
from jobs.scoring.text_parts import read_parts
from jobs.scoring.units import UnitStore
from jobs.tasks.language_model.config import EndOfDocument
from jobs.tasks.language_model.validation import validate
from pipelines.text.packing import IGNORE_INDEX
from pipelines.text.tokenization import load_tokenizer
from pipelines.text.windows import WindowConfig
from tempnet import TempNet, TempNetConfig
from tempnet.headroom.features import Tokens
from tempnet.headroom.profile import Profiles
from tempnet.headroom.run import CONSTANT, ONE, run_headroom_test
from tempnet.models.causal_lm import TemperatureCausalLM
from tempnet.softmax.config import TemperatureLossConfig


def documents() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, VOCAB_SIZE, size=size).astype(np.int32) for size in (1, 40, 16, 0, 17, 5)]


def measurer(model: Path, text: Path, **changes: int) -> Measurer:
    return Measurer(TextMeasurement.resolve(Headroom(model=str(model), text=str(text), **changes)))


@pytest.mark.parametrize("model", [False, True], indirect=True, ids=["without a bias", "with a bias"])
def test_tokens_are_measured_as_the_model_predicts_them_in_any_batch(model: Path, text: Path) -> None:
    """Compare the first context of every document with one forward pass over it."""
    tokens = measurer(model, text, batch_size=7).measure(documents())
    base = AutoModelForCausalLM.from_pretrained(model).eval()
    start = 0
    for ids in documents():
        first = torch.from_numpy(ids[:CONTEXT_LENGTH].astype(np.int64))
        if len(first):
            inputs = torch.cat([torch.zeros(1, dtype=torch.long), first])[: len(first)]
            with torch.no_grad():
                output = base(input_ids=inputs.unsqueeze(0), output_hidden_states=True)
            logits, part = output.logits[0, :, :VOCAB_SIZE], slice(start, start + len(first))
            expected = F.cross_entropy(logits / 0.7, first, reduction="none")
            ours = tokens.profiles.cross_entropy(-float(np.log(0.7)))[part]
            torch.testing.assert_close(ours, expected, atol=2e-3, rtol=1e-3)
            torch.testing.assert_close(tokens.maximum[part], logits.amax(-1), atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(tokens.hidden[part], output.hidden_states[-1][0], atol=1e-4, rtol=1e-4)
        start += len(ids)
    assert start == len(tokens.margin)
    alone = measurer(model, text, batch_size=1).measure(documents())
    torch.testing.assert_close(alone.profiles.values, tokens.profiles.values, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(alone.profiles.target, tokens.profiles.target, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(alone.hidden, tokens.hidden, atol=1e-4, rtol=1e-4)


def test_the_verdict_says_what_the_interval_says() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(600, 20, generator=generator, dtype=torch.float64)
    hidden = torch.randn(600, 2, generator=generator, dtype=torch.float64)
    spread = (2.0 * hidden[:, 0]).exp().unsqueeze(-1)
    targets = torch.multinomial((logits * spread).softmax(-1), 1, generator=generator).squeeze(-1)
    top = logits.topk(2).values
    tokens = Tokens(Profiles.of_logits(logits, targets), top[:, 0] - top[:, 1], top[:, 0], hidden)
    test = run_headroom_test(lambda: [(tokens, torch.arange(600) % 40)], 40, num_folds=4)
    asked = Question(files=[])
    values = figures(test, asked, least_gain=1.0)
    gain = values["per_token"]["hidden"]["gain"]
    assert gain["mean"] > gain["half_width"] > 0
    assert verdict(test, asked, "hidden", least_gain=1.0).startswith("worth it: ")
    assert f"{1000 * gain['mean']:.1f} ± {1000 * gain['half_width']:.1f}" in table(values, asked)
    assert verdict(test, asked, "hidden", least_gain=1000 * gain["mean"]).startswith("cannot be told: ")
    assert verdict(test, asked, "hidden", least_gain=1e4).startswith("not worth it: ")


def test_logits_that_are_not_finite_are_refused_where_they_are_measured(
    model: Path, text: Path, tmp_path: Path
) -> None:
    measure = measurer(model, text)
    next(measure._base.parameters()).data[:] = torch.nan
    part = next(iter(read_parts(measure._settings, 0, str(tmp_path))))
    with pytest.raises(ValueError, match=r"the logits of \d+ of \d+ tokens are not finite"):
        measure(part)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("with_end", [True, False])
def test_a_runs_validation_has_the_numbers_of_the_headroom_test(model: Path, tmp_path: Path, *, with_end: bool) -> None:
    """The same text, once as the job of the test measures it, once as a run validates on it, with other batches."""
    texts = some_texts(12)
    rule: Any = "target" if with_end else "ignored"
    text = write_lines(tmp_path / "text.jsonl", [{"body": text} for text in texts])
    config = Headroom(model=str(model), text=text, text_field="body", end_of_document=rule, folds=3)
    measurement = TextMeasurement.resolve(config)
    measure, files = Measurer(measurement), []
    for part in read_parts(measurement, 0, str(tmp_path)):
        UnitStore(str(tmp_path)).write(measure(part).files)
        files.append(part.file)
    question = measurement.question(str(tmp_path), files)
    promised = run_test(str(tmp_path), question, 3, 1)
    assert " --data.text-field body " in measurement.command(promised, question)
    ids = [np.array(load_tokenizer(str(model))(text, add_special_tokens=False).input_ids) for text in texts]
    layout = WindowConfig(
        context_length=CONTEXT_LENGTH, bos_id=0, eos_id=0, vocab_size=VOCAB_SIZE, stride=CONTEXT_LENGTH // 2
    )
    arrays = layout.unpack(pa.Table.from_batches(list(layout.rows(ids))))
    if not with_end:
        arrays["targets"][arrays["targets"] == 0] = IGNORE_INDEX
    network = TempNet(TempNetConfig.for_logits(VOCAB_SIZE, rho=0.0, hidden_size=8, num_prototypes=4))
    loss = TemperatureLossConfig(name="proper", rho=0.0)
    base = AutoModelForCausalLM.from_pretrained(model)
    module = TemperatureCausalLM(base, network, loss, vocab_size=VOCAB_SIZE, freeze_base=True).eval()
    with torch.no_grad():
        (tally,) = validate(
            lambda num_profile_nodes, **batch: [module(**batch, num_profile_nodes=num_profile_nodes[0])],
            arrays, [loss], vocab_size=VOCAB_SIZE, micro_batch_size=3, num_oracle_tokens=4, with_details=True,
            device=torch.device("cpu"),
        )  # fmt: skip
        scores, details = tally.scores()
    assert details is not None
    sums, found = promised.sums, details["rivals"]
    number = sum(len(values) + with_end for values in ids)
    assert sums.counts.sum() == found["num_tokens"] == number
    assert (sums.counts > 0).sum() == found["num_documents"] == 12
    at_one = sums.losses[ONE].sum().item() / number
    assert (scores["cross_entropy"], found["cross_entropy/tau_one_loss"]) == pytest.approx((at_one, at_one), rel=1e-6)
    assert found["cross_entropy/best_constant_tau"] == pytest.approx(promised.tau, rel=1e-4)
    at_best = sums.losses[CONSTANT].sum().item() / number
    assert found["cross_entropy/best_constant_loss"] == pytest.approx(at_best, rel=1e-6)
    gain = sums.gain(CONSTANT, ONE)
    assert found["cross_entropy/tau_one_loss"] - at_best == pytest.approx(gain.mean, abs=1e-6)
    assert "robust/loss" not in found


def test_the_end_of_a_document_counts_where_the_model_knows_it() -> None:
    known, unknown = (EndOfDocument(probability=value, num_documents=9) for value in (0.02, 5e-12))
    assert known.is_target
    assert not unknown.is_target
    assert unknown.describe().startswith(
        "no target: over the ends of 9 documents the model gives the end-of-text token"
    )
