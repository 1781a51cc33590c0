"""Tests that a context has one τ in training, evaluation, prediction over archives and both ways of generation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from prediction_support import VOCAB_SIZE, save_tiny_model

from jobs.scoring.language_models.scoring import score_windows
from jobs.scoring.language_models.temperatures import Temperature
from jobs.scoring.language_models.windows import Window
from jobs.scoring.temperatures.texts.config import PredictTemperaturesConfig
from jobs.scoring.temperatures.texts.predictor import Predictor
from jobs.scoring.temperatures.texts.settings import resolve_settings
from tempnet.inference import TemperatureLogitsProcessor, generate
from tempnet.loading import load_causal_lm
from tempnet.models.causal_lm import TemperatureCausalLM
from tempnet.softmax.reference import TemperatureLossConfig

PROMPT = [0, 270, 31, 290]  # Token 0 is the document start.
NUM_NEW = 9


def test_five_ways_to_a_temperature_agree(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path)
    base, network = load_causal_lm(model)
    prompt = torch.tensor([PROMPT])
    options = {"max_new_tokens": NUM_NEW, "pad_token_id": 0, "eos_token_id": None, "attention_mask": prompt >= 0}

    torch.manual_seed(0)
    by_fold = generate(base, network, input_ids=prompt, **options)
    torch.manual_seed(0)
    processor = TemperatureLogitsProcessor(network)
    sequences = base.generate(prompt, do_sample=True, top_k=0, logits_processor=[processor], **options)
    assert torch.equal(by_fold.sequences, sequences)
    tokens = by_fold.sequences[0].tolist()

    text = tmp_path / "unused.txt"
    text.write_text("unused")
    settings, _ = resolve_settings(PredictTemperaturesConfig(model=str(model), text=str(text), output="unused"))
    (prediction,) = Predictor(settings).predict([np.array(tokens[1:], dtype=np.int32)])

    column = Temperature.parse("tempnet")
    window = Window(inputs=tuple(tokens[:-1]), targets=tuple(tokens[1:]))
    scores = score_windows(base, [window], {column.name: column.function(network)}, vocab_size=VOCAB_SIZE, batch_size=1)

    loss = TemperatureLossConfig(name="dro", rho=2.0)
    module = TemperatureCausalLM(base, network, loss, vocab_size=VOCAB_SIZE, freeze_base=True).train()
    ids = torch.tensor([tokens[:-1]])
    in_training = module(ids, torch.arange(ids.shape[1]).unsqueeze(0), torch.tensor([tokens[1:]]))["tau"][0]

    new = slice(len(PROMPT) - 1, None)
    ways = {
        "processor": processor.temperatures[0].numpy(),
        "fold": by_fold.temperatures[0].numpy(),
        "prediction": np.asarray(prediction.tau)[new],
        "evaluation": np.concatenate(scores[column.name].tau)[new],
        "training": in_training.numpy()[new],
    }
    assert ways["fold"].std() > 0.02
    for name, tau in ways.items():
        np.testing.assert_allclose(tau, ways["fold"], atol=1e-5, err_msg=name)
