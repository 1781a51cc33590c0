"""Test what the headroom job measures of a model's tokens, what it keeps of them, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from clip_support import make_clip, make_dual_encoder
from prediction_support import CONTEXT_LENGTH, VOCAB_SIZE, save_tiny_model, some_texts
from transformers import AutoModelForCausalLM, DistilBertConfig, DistilBertModel

from jobs.calibrate import main
from jobs.scoring.headroom.config import Headroom
from jobs.scoring.headroom.report import figures, table, verdict
from jobs.scoring.headroom.tables import count_documents, measured_table, read_measured
from jobs.scoring.headroom.texts.measure import Measurer
from jobs.scoring.headroom.texts.measurement import token_question
from jobs.scoring.headroom.texts.settings import resolve_settings
from jobs.scoring.temperatures.tables import write_part
from tempnet.headroom.features import Tokens
from tempnet.headroom.run import run_headroom_test


@pytest.fixture(scope="module", params=[False, True])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), with_bias=request.param)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in some_texts(12)))
    return path


def documents() -> list[np.ndarray]:
    """Return documents from one token to several contexts."""
    rng = np.random.default_rng(0)
    return [rng.integers(1, VOCAB_SIZE, size=size).astype(np.int32) for size in (1, 40, 16, 0, 17, 5)]


def measurer(model: Path, text: Path, **changes: int) -> Measurer:
    return Measurer(resolve_settings(Headroom(model=str(model), text=str(text), **changes))[0])


def test_tokens_are_measured_as_the_model_predicts_them(model: Path, text: Path) -> None:
    """Compare the first context of every document with one forward pass over it."""
    tokens = measurer(model, text).measure(documents())
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


def test_measurements_do_not_depend_on_the_batch(model: Path, text: Path) -> None:
    one, other = (measurer(model, text, batch_size=size).measure(documents()) for size in (1, 7))
    torch.testing.assert_close(one.profiles.values, other.profiles.values, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(one.hidden, other.hidden, atol=1e-4, rtol=1e-4)
    assert one.profiles.target.allclose(other.profiles.target, atol=1e-4)


def test_tables_give_back_the_tokens_and_number_the_documents(model: Path, text: Path, tmp_path: Path) -> None:
    tokens = measurer(model, text).measure(documents())
    places = np.repeat(np.arange(6), [len(ids) for ids in documents()])
    for file in ("part-0.parquet", "part-1.parquet"):
        write_part(measured_table(tokens, places, num_documents=6), str(tmp_path), file)
    files = ["part-0.parquet", "part-1.parquet"]
    (first, numbers), (_, later) = read_measured(str(tmp_path), files)
    assert count_documents(str(tmp_path), files) == 12
    assert numbers.tolist() == places.tolist()
    assert later.tolist() == (places + 6).tolist()
    torch.testing.assert_close(first.profiles.values.float(), tokens.profiles.values, atol=0.0, rtol=0.0)
    torch.testing.assert_close(first.margin.float(), tokens.margin, atol=0.0, rtol=0.0)
    torch.testing.assert_close(first.hidden.float(), tokens.hidden, atol=2e-3, rtol=2e-3)


def test_the_verdict_says_what_the_interval_says() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(600, 20, generator=generator, dtype=torch.float64)
    hidden = torch.randn(600, 2, generator=generator, dtype=torch.float64)
    spread = (2.0 * hidden[:, 0]).exp().unsqueeze(-1)
    targets = torch.multinomial((logits * spread).softmax(-1), 1, generator=generator).squeeze(-1)
    top = logits.topk(2).values
    from tempnet.headroom.profile import Profiles

    tokens = Tokens(Profiles.of_logits(logits, targets), top[:, 0] - top[:, 1], top[:, 0], hidden)
    test = run_headroom_test(lambda: [(tokens, torch.arange(600) % 40)], 40, num_folds=4)
    asked = token_question([])
    values = figures(test, asked, least_gain=1.0)
    gain = values["per_token"]["hidden"]["gain"]
    assert gain["mean"] > gain["half_width"] > 0
    assert verdict(test, asked, "hidden", least_gain=1.0).startswith("worth it: ")
    assert f"{1000 * gain['mean']:.1f} ± {1000 * gain['half_width']:.1f}" in table(values, asked)
    assert verdict(test, asked, "hidden", least_gain=1000 * gain["mean"]).startswith("cannot be told: ")
    assert verdict(test, asked, "hidden", least_gain=1e4).startswith("not worth it: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--images", "pairs"], "are both given: give text for a language model, or images for an image–text model"),
        (["--captions", "c.json"], "captions = c.json has no meaning with text: leave it out"),
        (["--gallery-images", "500"], "gallery_images = 500 has no meaning with text: leave it out"),
        (["--folds", "2"], "folds = 2 must be at least 3"),
        (["--folds", "13"], "has 12 readable documents, fewer than folds = 13"),
        (["--context-length", "17"], "context_length = 17 must lie in 1 … 16"),
        (["--text", "missing.jsonl"], "missing.jsonl"),
        (["--model", "missing"], "missing"),
        (["--max-bad-share", "2"], "max_bad_share = 2 must lie in [0, 1]"),
    ],
)
def test_refusals_come_before_any_work(
    model: Path,
    text: Path,
    tmp_path: Path,
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["headroom", "--model", str(model), "--text", str(text), "--output", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--storage", str(tmp_path), *options])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def save_encoder(directory: Path) -> str:
    """Save a random DistilBERT with the tokenizer of a tiny model, and return its directory."""
    save_tiny_model(directory)
    config = DistilBertConfig(vocab_size=VOCAB_SIZE, dim=8, n_heads=2, n_layers=1, hidden_dim=8)
    DistilBertModel(config).save_pretrained(directory)
    return str(directory)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (make_dual_encoder, "is an image–text model, and text is for causal language models: give images in its place"),
        (make_clip, "is an image–text model, and text is for causal language models: give images in its place"),
        (save_encoder, "is an encoder (distilbert), and text is for causal language models"),
    ],
)
def test_text_is_for_language_models(
    make: Callable[[Path], str], message: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, output = make(tmp_path / "model"), str(tmp_path / "out")
    with pytest.raises(SystemExit) as stop:
        main(["headroom", "--model", directory, "--text", str(text), "--output", output, "--storage", str(tmp_path)])
    assert stop.value.code == 2
    assert f"error: model = {directory!r} {message}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
