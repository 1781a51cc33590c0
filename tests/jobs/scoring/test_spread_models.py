"""Test that jobs which read a language model give with parts of it on a disk what they give with the whole model.

A machine without GPUs has no several devices, but a model that is spread over memory and disk has the same hooks, and
weights that are without data between calls.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from evaluation_support import BruteForce
from prediction_support import VOCAB_SIZE

from jobs.calibrate import main as calibrate
from jobs.scoring.config import LanguageModelPool
from jobs.scoring.generation.config import GenerateConfig, PlaygroundConfig
from jobs.scoring.generation.sampling import Sampler
from jobs.scoring.headroom.config import Headroom
from jobs.scoring.headroom.texts import Measurer, TextMeasurement
from jobs.scoring.language_models.windows import ScoredWindow
from jobs.scoring.playground.server import Playground
from jobs.scoring.temperatures.config import PredictTemperaturesConfig
from jobs.scoring.temperatures.texts import Predictor, resolve_settings
from pipelines.text.tokenization import load_tokenizer
from tempnet.base_model import load_base
from tempnet.devices import DeviceMap
from tempnet.loading import load_tempnet
from tests.jobs.scoring.evaluation_cases import harness, scores

# Parts of a GPT-2. Which of them are on the disk makes no difference to a job but for those that it reads itself.
SPREAD: DeviceMap = {
    "transformer.wte": "disk", "transformer.wpe": "disk", "transformer.h": "disk", "transformer.ln_f": "cpu",
    "lm_head": "disk",
}  # fmt: skip


def documents() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, VOCAB_SIZE, size=size).astype(np.int32) for size in (1, 40, 16)]


def test_predicted_temperatures_and_measured_tokens(model: Path, text: Path) -> None:
    def spread(settings: Any) -> Any:
        workers = LanguageModelPool(device_map=SPREAD)  # type: ignore[arg-type]
        return replace(settings, config=replace(settings.config, workers=workers))

    settings = resolve_settings(PredictTemperaturesConfig(model=str(model), text=str(text), output="unused"))
    whole, ours = (Predictor(one).predict(documents()) for one in (settings, spread(settings)))
    for one, other in zip(whole, ours, strict=True):
        np.testing.assert_allclose(other.tau, one.tau, atol=1e-6)
        np.testing.assert_allclose(other.entropy, one.entropy, atol=1e-5)
    headroom = TextMeasurement.resolve(Headroom(model=str(model), text=str(text), folds=3))
    expected, found = (Measurer(one).measure(documents()) for one in (headroom, spread(headroom)))
    torch.testing.assert_close(found.profiles.values, expected.profiles.values, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.hidden, expected.hidden, atol=1e-6, rtol=1e-6)


def test_generated_texts(gpt2: Path) -> None:
    config = GenerateConfig(model=str(gpt2), prompts="unused", output="unused", max_new_tokens=8)
    tokenizer = load_tokenizer(str(gpt2))
    texts = ("def", "the temperature of a token")
    prompts = [tokenizer(text).input_ids for text in texts]
    made = []
    for changed in (config, replace(config, device_map=SPREAD)):  # type: ignore[arg-type]
        made.append(Sampler(changed, tokenizer, load_tempnet(gpt2))([(text, 0, 0) for text in texts], prompts))
    assert [text.ids for text in made[0]] == [text.ids for text in made[1]]
    for one, other in zip(*made, strict=True):
        assert other.entropy == pytest.approx(one.entropy, abs=1e-5)
        assert other.tau == pytest.approx(one.tau, abs=1e-6)


def test_scores_and_the_harness(export: str, brute: BruteForce, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = [ScoredWindow(inputs=(1, 5, 9, 4), targets=(9, 4, 7)), ScoredWindow(inputs=(2, 3), targets=(3, 8))]
    names = ["one", "tempnet"]
    expected = scores(brute, windows, names)
    lm = harness(brute, "tempnet")
    ids = torch.tensor([[1, 5, 9]])
    logits = lm._model_call(ids)
    monkeypatch.setattr(brute, "base", load_base(export, device_map=SPREAD | {"transformer.drop": "cpu"}).eval())
    found = scores(brute, windows, names)
    for name in names:
        assert found[name].nll == pytest.approx(expected[name].nll, abs=1e-5)
        np.testing.assert_allclose(np.concatenate(found[name].tau), np.concatenate(expected[name].tau), atol=1e-6)
    lm = harness(brute, "tempnet")
    assert lm.device == torch.device("cpu")
    torch.testing.assert_close(lm._model_call(ids), logits)


def test_commands_know_the_option(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without GPUs `auto` is the CPU's memory, so that the result is that of the whole model."""
    (tmp_path / "prompts.txt").write_text("ab\ncd\n")
    sizes = ["--num-new-tokens", "4", "--tolerance", "0.2", "--mean-tau", "0.5", "--dry-run"]
    printed = []
    for option in ([], ["--device-map", "auto"]):
        command = ["tau-max", "--model", str(model), "--prompts", str(tmp_path / "prompts.txt"), *sizes, *option]
        assert calibrate(command) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    playground = Playground(PlaygroundConfig(model=str(model), device_map="auto"))
    assert playground.temperatures.device == torch.device("cpu")
