"""Test generation: every way gives one context the same τ, and tokens follow softmax(L/τ)."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel

from tempnet import TempNet
from tempnet.inference import CachedFold, TemperatureLogitsProcessor, attach, can_fold, generate
from tempnet.models.causal_lm import TemperatureCausalLM
from tempnet.softmax.reference import TemperatureLossConfig
from tests.tempnet.tiny_language_models import PROMPTS, VOCABULARY, left_padded, make_base, make_tempnet

ARCHITECTURES = ["gpt2", "gpt_neox", "llama", "qwen2"]


def tau_of_training(base: PreTrainedModel, network: TempNet, tokens: Tensor, train: bool) -> Tensor:
    """Return τ (T,) of every position of one sequence, as the module that is trained computes it."""
    module = TemperatureCausalLM(
        base, network, TemperatureLossConfig(name="dro", rho=1.5), vocab_size=VOCABULARY, freeze_base=True
    ).train(train)
    positions = torch.arange(len(tokens)).unsqueeze(0)
    tau = module(tokens.unsqueeze(0), positions, tokens.unsqueeze(0))["tau"][0]
    network.eval()
    return tau


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_tau_for_one_context(architecture: str) -> None:
    base, network = make_base(architecture), make_tempnet()
    tied = base.get_output_embeddings().weight is base.get_input_embeddings().weight
    assert tied == (architecture == "gpt2")
    assert can_fold(base, network)
    batch, num_new = left_padded(PROMPTS), 7
    torch.manual_seed(3)
    made = generate(base, network, **batch, max_new_tokens=num_new)
    torch.manual_seed(3)
    plain = TemperatureLogitsProcessor(network)
    sequences = base.generate(
        **batch, max_new_tokens=num_new, do_sample=True, top_k=0, logits_processor=[plain], pad_token_id=0
    )
    assert made.sequences.tolist() == sequences.tolist()
    assert made.temperatures.shape == (len(PROMPTS), num_new)
    torch.testing.assert_close(made.temperatures, plain.temperatures, rtol=1e-5, atol=1e-5)
    width = batch["input_ids"].shape[1]
    for row, prompt in enumerate(PROMPTS):
        tokens = made.sequences[row, width - len(prompt) :]
        assert tokens[: len(prompt)].tolist() == prompt
        part = slice(len(prompt) - 1, len(prompt) - 1 + num_new)
        with torch.no_grad():
            raw = base(input_ids=tokens.unsqueeze(0)).logits[0, part, :VOCABULARY]
            expected = network(raw)
        assert expected.std() > 1e-3
        torch.testing.assert_close(made.temperatures[row], expected, rtol=1e-5, atol=1e-5)
        for train in (True, False):
            of_training = tau_of_training(base, network, tokens, train)[part]
            torch.testing.assert_close(made.temperatures[row], of_training, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [{}, {"normalize_input": False}, {"input_shift": "mean"}, {"depth": 4}, {"projection": False}],
    ids=str,
)
def test_the_fold_equals_the_network_on_the_logits(changes: dict) -> None:
    network = make_tempnet(**changes)
    torch.manual_seed(4)
    weight, hidden = torch.randn(64, 32) * 0.3, torch.randn(9, 5, 32)
    hidden[0] = 0.0  # no logit differs from 0
    fold = CachedFold(weight, network)
    torch.testing.assert_close(fold.temperatures(hidden), network(hidden @ weight[:VOCABULARY].T), rtol=1e-5, atol=1e-5)


def test_tau_max_eval_reaches_what_is_generated() -> None:
    base, network = make_base("gpt2"), make_tempnet()
    batch = left_padded(PROMPTS)
    before = generate(base, network, **batch, max_new_tokens=1).temperatures
    network.set_tau_max_eval(1.0)
    after = generate(base, network, **batch, max_new_tokens=1).temperatures
    torch.testing.assert_close((after - 0.001) / 0.999, (before - 0.001) / 1.999)


class Ban(LogitsProcessor):
    """Processor that sets some logits to −inf and changes others, as processors before ours do."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, 3:20] = -math.inf
        return scores


@pytest.mark.parametrize(("architecture", "changes"), [("gpt2", {}), ("gemma2", {"final_logit_softcapping": 2.0})])
def test_bans_and_penalties_before_it_change_no_tau(architecture: str, changes: dict) -> None:
    base, network = make_base(architecture, **changes), make_tempnet()
    assert can_fold(base, network) == (architecture == "gpt2")
    tokens = torch.tensor([PROMPTS[0]])
    made = generate(base, network, input_ids=tokens, max_new_tokens=9, logits_processor=[Ban()], repetition_penalty=1.7)
    new = made.sequences[0, tokens.shape[1] :]
    assert not bool(((new >= 3) & (new < 20)).any())
    with torch.no_grad():
        raw = base(input_ids=made.sequences).logits[0, tokens.shape[1] - 1 : -1, :VOCABULARY]
    torch.testing.assert_close(made.temperatures[0], network(raw), rtol=1e-5, atol=1e-5)
    processors = [Ban(), TemperatureLogitsProcessor(network)]
    with pytest.raises(ValueError, match="an earlier logits processor has put −inf"):
        base.generate(input_ids=tokens, max_new_tokens=1, do_sample=True, logits_processor=processors)
    base.generate(input_ids=tokens, max_new_tokens=1, do_sample=True, logits_processor=processors[::-1])


@pytest.mark.parametrize("changes", [{"final_logit_softcapping": 5.0}, {"logit_scale": 0.25}, {"logits_scaling": 4.0}])
def test_logits_that_are_more_than_a_product_do_not_fold(changes: dict) -> None:
    architecture = {"final_logit_softcapping": "gemma2", "logit_scale": "cohere", "logits_scaling": "granite"}
    base, network = make_base(architecture[next(iter(changes))], **changes), make_tempnet()
    with pytest.raises(ValueError, match="not W h"):
        CachedFold.attach(base, network)
    tokens = torch.tensor([PROMPTS[0]])
    with attach(base, network) as attached, torch.no_grad():
        raw = base(input_ids=tokens).logits[:, -1, :VOCABULARY]
        torch.testing.assert_close(attached.last, network(raw), rtol=1e-5, atol=1e-5)
        before = attached.last
    base(input_ids=tokens[:, :2])
    assert attached.last is before, "it still listens after its end"


def test_an_output_bias_and_a_missing_transform_do_not_fold() -> None:
    base = make_base("phi", partial_rotary_factor=0.5)
    assert base.get_output_embeddings().bias is not None
    assert not can_fold(base, make_tempnet())
    assert can_fold(make_base("gpt2"), make_tempnet())
    assert not can_fold(make_base("gpt2"), make_tempnet(transform=False))
    assert not can_fold(make_base("gpt2"), make_tempnet(input_shift="max"))
    for changes in ({"transform": False}, {"input_shift": "max"}):
        with pytest.raises(ValueError, match="no transform layer, or input_shift = 'max'"):
            CachedFold(torch.randn(64, 32), make_tempnet(**changes))


def test_padding_of_the_vocabulary_is_never_drawn() -> None:
    base, network = make_base("gpt_neox"), make_tempnet()
    with torch.no_grad():
        base.get_output_embeddings().weight[VOCABULARY:] = base.get_output_embeddings().weight[:3] * 50
    tokens = torch.tensor([PROMPTS[0]] * 64)
    raw = base(input_ids=tokens[:1]).logits[0, -1]
    assert raw.argmax() >= VOCABULARY, "the padding would win"
    made = generate(base, network, input_ids=tokens, max_new_tokens=8)
    assert int(made.sequences.max()) < VOCABULARY
    torch.testing.assert_close(made.temperatures[:, 0], network(raw[:VOCABULARY]).expand(64), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tau_max_eval", [None, 0.4])
def test_tokens_are_drawn_from_the_softmax_of_the_logits_over_tau(tau_max_eval: float | None) -> None:
    base, network = make_base("gpt2", vocab_size=12, initializer_range=0.3), make_tempnet(11)
    network.set_tau_max_eval(tau_max_eval)
    num_draws = 4000
    tokens = torch.tensor([[3, 7, 1]] * num_draws)
    torch.manual_seed(5)
    made = generate(base, network, input_ids=tokens, max_new_tokens=1)
    with torch.no_grad():
        raw = base(input_ids=tokens[:1]).logits[0, -1, :11].double()
        tau = float(network(raw.float()))
    counts = torch.bincount(made.sequences[:, -1], minlength=11).double()

    def statistic(temperature: float) -> tuple[float, int]:
        expected = torch.softmax(raw / temperature, -1) * num_draws
        often = expected >= 5
        seen = torch.cat([counts[often], counts[~often].sum().view(1)])
        wanted = torch.cat([expected[often], expected[~often].sum().view(1)])
        seen, wanted = seen[wanted > 0], wanted[wanted > 0]
        return float(((seen - wanted) ** 2 / wanted).sum()), len(seen) - 1

    value, freedom = statistic(tau)
    assert chi2.sf(value, freedom) > 1e-3
    for wrong in (1.0, tau * 1.25, tau / 1.25):
        value, freedom = statistic(wrong)
        assert chi2.sf(value, freedom) < 1e-3


def test_nothing_is_cut_off_by_default() -> None:
    base = make_base("gpt2", vocab_size=200, initializer_range=1e-4)
    network = make_tempnet(200)
    tokens = torch.tensor([[3]] * 1500)
    made = generate(base, network, input_ids=tokens, max_new_tokens=1)
    assert len(set(made.sequences[:, -1].tolist())) > 150
    cut = generate(base, network, input_ids=tokens, max_new_tokens=1, top_k=5)
    assert len(set(cut.sequences[:, -1].tolist())) <= 5


def test_a_fold_made_once_serves_many_calls() -> None:
    base, network = make_base("llama"), make_tempnet()
    fold = CachedFold.of(base, network)
    first, second = (
        generate(base, network, fold=fold, input_ids=torch.tensor([prompt]), max_new_tokens=2, top_k=1)
        for prompt in PROMPTS[:2]
    )
    again = generate(base, network, input_ids=torch.tensor([PROMPTS[1]]), max_new_tokens=2, top_k=1)
    assert first.sequences.shape[1] == len(PROMPTS[0]) + 2
    assert second.sequences.tolist() == again.sequences.tolist()
    assert not base.get_output_embeddings()._forward_pre_hooks
