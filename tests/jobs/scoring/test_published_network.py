"""Tests that a published LLaMA-2-Chat network reads logits less their maximum wherever τ is computed."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from evaluation_support import TEXT
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from jobs.scoring.generation.config import GenerateConfig
from jobs.scoring.generation.sampling import Request, Sampler
from jobs.scoring.language_models.harness import TemperedLM
from jobs.scoring.language_models.scoring import score_windows
from jobs.scoring.language_models.temperatures import Temperature
from jobs.scoring.language_models.windows import Window
from jobs.scoring.temperatures.texts.config import PredictTemperaturesConfig
from jobs.scoring.temperatures.texts.predictor import Predictor
from jobs.scoring.temperatures.texts.settings import PredictionSettings
from pipelines.text.tokenization import train_bpe
from tempnet import TempNet
from tempnet.inference import TemperatureLogitsProcessor, can_fold, generate
from tempnet.loading import load_causal_lm
from tempnet.models.causal_lm import TemperatureCausalLM
from tempnet.softmax.reference import TemperatureLossConfig

VOCABULARY, WIDTH, CONTEXT = 32_000, 8, 32
IDS = [5, 31_999, 11, 230, 4_200, 7, 30, 8, 12_345, 1]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a directory with a tiny model of LLaMA's vocabulary and a network in a file of the published kind."""
    path = tmp_path_factory.mktemp("published")
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=CONTEXT, initializer_range=0.5, bos_token_id=0, eos_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    state = {
        "proj.0.weight": torch.randn(WIDTH, VOCABULARY),
        "proj.0.bias": torch.randn(WIDTH),
        "proj.3.weight": torch.randn(WIDTH, WIDTH) * 3,
        "proj.3.bias": torch.randn(WIDTH),
        "scaler": torch.tensor([-0.5]),
        "last.weight": torch.ones(1, WIDTH),
        "last.bias": torch.tensor([-3.0]),
    }
    (path / "network").mkdir()
    save_file({f"tempnet.{name}": value for name, value in state.items()}, path / "network" / "tempnet.safetensors")
    torch.save(state, path / "state.pt")
    return path


@pytest.fixture(scope="module")
def loaded(directory: Path) -> tuple[PreTrainedModel, TempNet]:
    base, network = load_causal_lm(directory, directory / "network")
    assert not can_fold(base, network)
    return base, network


def published_tau(directory: Path, logits: Tensor, *, shift: bool = True) -> Tensor:
    """Returns τ by the authors' formula in float64."""
    state = {name: value.double() for name, value in torch.load(directory / "state.pt", weights_only=True).items()}
    x = logits.double()
    x = x - x.max(-1, keepdim=True).values if shift else x
    x = x / x.square().sum(-1, keepdim=True).sqrt()
    u = torch.sigmoid(x @ state["proj.0.weight"].T + state["proj.0.bias"]) @ state["proj.3.weight"].T
    u = u + state["proj.3.bias"]
    pooled = (torch.softmax(u / state["scaler"].exp(), -1) - 1 / WIDTH) * u
    return 1.19 * torch.sigmoid((pooled @ state["last.weight"].T + state["last.bias"]).squeeze(-1)) + 0.01


def check(tau: Tensor, expected: Tensor) -> None:
    assert (tau.double() - expected).abs().max().item() < 1e-6


@torch.no_grad()
def logits_of(base: PreTrainedModel, ids: list[int]) -> Tensor:
    return base(input_ids=torch.tensor([ids])).logits[0]


@torch.no_grad()
def test_processor_and_generation(loaded: tuple[PreTrainedModel, TempNet], directory: Path) -> None:
    base, network = loaded
    raw = logits_of(base, IDS)
    expected = published_tau(directory, raw)
    assert (expected - published_tau(directory, raw, shift=False)).abs().max() > 0.01, "the shift would not be seen"
    processor = TemperatureLogitsProcessor(network)
    scores = processor(torch.tensor([IDS]).T, raw)
    check(processor.temperatures[:, 0], expected)
    torch.testing.assert_close(scores.double(), raw.double() / expected.unsqueeze(-1), rtol=1e-5, atol=1e-5)
    made = generate(base, network, input_ids=torch.tensor([IDS]), max_new_tokens=6, pad_token_id=0)
    of_made = logits_of(base, made.sequences[0].tolist())[len(IDS) - 1 : -1]
    check(made.temperatures[0], published_tau(directory, of_made))


def test_the_generation_job(loaded: tuple[PreTrainedModel, TempNet], directory: Path) -> None:
    tokenizer = train_bpe([TEXT], 300)
    tokenizer.add_tokens([f"<{number}>" for number in range(VOCABULARY - len(tokenizer))])
    config = GenerateConfig(model=str(directory), prompts="", output="", max_new_tokens=6)
    sampler = Sampler(config, tokenizer, loaded[1])
    assert sampler.fold is None
    (made,) = sampler([Request(key=("a", 0), prompt="", ids=IDS)])
    raw = logits_of(loaded[0], IDS + made.ids)[len(IDS) - 1 : -1]
    # The job writes τ to six digits.
    torch.testing.assert_close(
        torch.tensor(made.tau, dtype=torch.float64), published_tau(directory, raw), rtol=5e-6, atol=0
    )


@torch.no_grad()
def test_evaluation(loaded: tuple[PreTrainedModel, TempNet], directory: Path) -> None:
    base, network = loaded
    raw = logits_of(base, IDS)
    expected = published_tau(directory, raw)
    temperature = Temperature.parse("tempnet")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    harness = TemperedLM(
        base, train_bpe([TEXT], 300), temperature=temperature, network=network, vocab_size=VOCABULARY,
        max_length=CONTEXT, batch_size=1, document_start=True,
    )  # fmt: skip
    scaled = harness._model_call(torch.tensor([IDS]))[0]
    best = raw.argmax(-1, keepdim=True)
    check((raw.gather(-1, best) / scaled.gather(-1, best)).squeeze(-1), expected)
    windows = [Window(inputs=tuple(IDS), targets=(*IDS[1:], 3))]
    score = score_windows(
        base, windows, {"tempnet": temperature.function(network)}, vocab_size=VOCABULARY, batch_size=1
    )
    check(torch.from_numpy(np.concatenate(score["tempnet"].tau)), expected)


@pytest.mark.parametrize("with_entropy", [True, False])
def test_prediction(loaded: tuple[PreTrainedModel, TempNet], directory: Path, with_entropy: bool) -> None:
    unused = dict.fromkeys(("source", "text_field", "model_digest", "tempnet_digest", "tokenizer_digest"), "")
    settings = PredictionSettings(
        **unused, model=str(directory), tempnet=str(directory / "network"), context_length=CONTEXT, stride=CONTEXT,
        batch_size=2, precision="fp32", with_entropy=with_entropy, per_token=True, max_documents=0,
        part_characters=PredictTemperaturesConfig.part_characters, bos_id=0, tau_min=0.01, tau_max=1.2,
    )  # fmt: skip
    (prediction,) = Predictor(settings).predict([np.array(IDS)])
    check(torch.from_numpy(prediction.tau), published_tau(directory, logits_of(loaded[0], [0, *IDS[:-1]])))


@torch.no_grad()
@pytest.mark.parametrize("materialize", [True, False])
def test_the_loss(loaded: tuple[PreTrainedModel, TempNet], directory: Path, materialize: bool) -> None:
    base, network = loaded
    module = TemperatureCausalLM(
        base, network, TemperatureLossConfig(name="dro", rho=4.0), vocab_size=VOCABULARY, freeze_base=True,
        materialize=materialize,
    ).eval()  # fmt: skip
    ids = torch.tensor([IDS])
    tau = module(ids, torch.arange(len(IDS)).unsqueeze(0), ids)["tau"][0]
    check(tau, published_tau(directory, logits_of(base, IDS)))
