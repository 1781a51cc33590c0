"""Generation: every way gives one context the same τ, tokens follow softmax(L/τ), and what does not go with it is refused.

A base model whose weights lie on a disk between calls is used as the same model in memory is.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor, PreTrainedModel

from tempnet import TempNet, TempNetConfig
from tempnet.devices import is_spread
from tempnet.inference import (
    CachedFold,
    TemperatureLogitsProcessor,
    attach,
    can_fold,
    check_generation,
    generate,
    record_hidden_states,
)
from tempnet.loading import load_causal_lm
from tempnet.models.causal_lm import TemperatureCausalLM
from tempnet.softmax.config import TemperatureLossConfig
from tests.tempnet.tiny_language_models import PROMPTS, VOCABULARY, left_padded, make_base, make_composite, make_tempnet

ARCHITECTURES = ["gpt2", "gpt_neox", "llama"]


def tau_of_training(base: PreTrainedModel, network: TempNet, tokens: Tensor, train: bool) -> Tensor:
    """Return τ (T,) of every position of one sequence, as the module that is trained computes it."""
    module = TemperatureCausalLM(
        base, network, TemperatureLossConfig(name="dro", rho=1.5), vocab_size=VOCABULARY, freeze_base=True
    ).train(train)
    positions = torch.arange(len(tokens)).unsqueeze(0)
    tau = module(tokens.unsqueeze(0), positions, tokens.unsqueeze(0))["tau"][0]
    network.eval()
    return tau


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "composite"])
def test_one_tau_for_one_context(architecture: str) -> None:
    base, network = make_composite() if architecture == "composite" else make_base(architecture), make_tempnet()
    tied = base.get_output_embeddings().weight is base.get_input_embeddings().weight
    assert tied == (architecture in ("gpt2", "composite"))
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
    ("changes", "common"),
    [
        ({}, 0.0),
        ({"normalize_input": False}, 0.0),
        ({"input_shift": "mean"}, 0.0),
        ({"input_shift": "mean"}, 100.0),  # The logits lie near ±600 and differ by a few.
        ({"depth": 4}, 0.0),
        ({"projection": False}, 0.0),
    ],
    ids=str,
)
def test_the_fold_equals_the_network_on_the_logits(changes: dict, common: float) -> None:
    network = make_tempnet(**changes)
    torch.manual_seed(4)
    weight, hidden = torch.randn(64, 32) * 0.3 + common * torch.randn(32), torch.randn(9, 5, 32)
    hidden[0] = 0.0  # no logit differs from 0
    found = CachedFold(weight, network).temperatures(hidden)
    expected = network.double()(hidden.double() @ weight[:VOCABULARY].double().T)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


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


def test_logits_that_are_more_than_a_product_do_not_fold() -> None:
    tokens = torch.tensor([PROMPTS[0]])
    for architecture, changes in (
        ("gemma2", {"final_logit_softcapping": 5.0}),
        ("cohere", {"logit_scale": 0.25}),
        ("granite", {"logits_scaling": 4.0}),
        ("phi", {"partial_rotary_factor": 0.5}),  # an output bias
    ):
        base, network = make_base(architecture, **changes), make_tempnet()
        assert not can_fold(base, network)
        assert CachedFold.of(base, network) is None
        with attach(base, network) as attached, torch.no_grad():
            raw = base(input_ids=tokens).logits[:, -1, :VOCABULARY]
            torch.testing.assert_close(attached.last, network(raw), rtol=1e-5, atol=1e-5)
            before = attached.last
        base(input_ids=tokens[:, :2])
        assert attached.last is before, "it still listens after its end"
        state_size = base.config.hidden_size
        network = TempNet(TempNetConfig.for_hidden(VOCABULARY, state_size, with_logits=True, rho=1.0, hidden_size=8))
        for options in ({}, {"normalize_input": False}):
            network = make_tempnet(kind="both", state_size=state_size, **options)
            expected = tau_of_training(base, network, tokens[0], train=True)
            with attach(base, network) as attached, record_hidden_states(base) as seen, torch.no_grad():
                logits = base(input_ids=tokens).logits[0, :, :VOCABULARY]
                torch.testing.assert_close(attached.last, expected[-1:], rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(network(logits, seen[0][0]), expected, rtol=1e-5, atol=1e-5)
    for changes in ({"transform": False}, {"input_shift": "max"}):
        assert not can_fold(make_base("gpt2"), make_tempnet(**changes))
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


def test_scores_are_divided_by_tau_which_tau_max_moves() -> None:
    network, scores = make_tempnet(11), 3 * torch.randn(4, 12)
    processor = TemperatureLogitsProcessor(network)
    for tau_max in (None, 0.4):
        network.set_tau_max_eval(tau_max)
        tau = network(scores[:, :11])
        made = processor(torch.zeros(4, 1), scores)
        torch.testing.assert_close(made[:, :11], scores[:, :11] / tau.unsqueeze(-1))
        assert made[:, 11].isneginf().all()
        assert torch.equal(processor.steps[-1], tau)


def test_nothing_is_cut_off_by_default() -> None:
    base = make_base("gpt2", vocab_size=200, initializer_range=1e-4)
    network = make_tempnet(200)
    tokens = torch.tensor([[3]] * 1500)
    made = generate(base, network, input_ids=tokens, max_new_tokens=1)
    assert len(set(made.sequences[:, -1].tolist())) > 150
    cut = generate(base, network, input_ids=tokens, max_new_tokens=1, top_k=5)
    assert len(set(cut.sequences[:, -1].tolist())) <= 5


REFUSED: dict[str, tuple[dict, str]] = {
    "greedy": ({"do_sample": False}, "do_sample = False: greedy"),
    "temperature": ({"temperature": 0.7}, r"temperature = 0\.7 would divide the logits a second time"),
    "beams": ({"num_beams": 3}, "generation mode 'beam_sample'"),
    "lookup": ({"prompt_lookup_num_tokens": 2}, "generation mode 'assisted_generation'"),
    "guidance": ({"guidance_scale": 1.5}, r"guidance_scale = 1\.5 mixes"),
    "length": ({"max_new_tokens": 60}, "prompt of 6 tokens and max_new_tokens = 60 do not fit .* 64 tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_do_not_go_with_it_are_refused_however_they_are_given(name: str) -> None:
    base, network, tokens = make_base("gpt2"), make_tempnet(), torch.tensor([PROMPTS[0]])
    (options, message), both = REFUSED[name], {"max_new_tokens": 1, "do_sample": True, "pad_token_id": 0}
    with pytest.raises(ValueError, match=message):
        generate(base, network, input_ids=tokens, **{"max_new_tokens": 1, **options})
    with pytest.raises(ValueError, match=message):
        generate(base, network, input_ids=tokens, generation_config=GenerationConfig(**{**both, **options}))
    assert not base.get_output_embeddings()._forward_pre_hooks
    with attach(base, network) as attached:
        with pytest.raises(ValueError, match=message):
            base.generate(tokens, logits_processor=[attached.processor()], **{**both, **options})
        with pytest.raises(ValueError, match=message):
            base.generate(tokens, GenerationConfig(**{**both, **options}), [attached.processor()])
    if name in (
        "beams",
        "lookup",
        "guidance",
    ):  # what the model is shipped with is refused too, unless it is overridden
        base.generation_config = GenerationConfig(pad_token_id=0, **options)
        with pytest.raises(ValueError, match=message):
            generate(base, network, input_ids=tokens, generation_config=GenerationConfig(max_new_tokens=3))
        if name != "lookup":  # None says nothing to generate(), so it cannot be overridden
            own = GenerationConfig(max_new_tokens=3, **dict.fromkeys(options, 1))
            assert generate(base, network, input_ids=tokens, generation_config=own).temperatures.shape == (1, 3)


def test_what_a_model_is_shipped_with_gives_way() -> None:
    base, network = make_base("gpt2"), make_tempnet()
    base.generation_config = GenerationConfig(do_sample=True, temperature=0.6, top_k=1, pad_token_id=0)
    tokens = torch.tensor([PROMPTS[0]] * 2)
    made = generate(base, network, input_ids=tokens, max_new_tokens=4)
    assert made.sequences[0].tolist() == made.sequences[1].tolist(), "its top_k stays"
    made = generate(
        base, network, input_ids=tokens, generation_config=GenerationConfig(max_new_tokens=3, pad_token_id=0)
    )
    assert made.temperatures.shape == (2, 3)
    assert base.generation_config.temperature == 0.6
    check_generation(GenerationConfig(do_sample=True))


def test_inside_attach_the_models_own_generate_has_temperatures() -> None:
    base, network, tokens = make_base("gpt2"), make_tempnet(), torch.tensor([PROMPTS[0]])
    with attach(base, network) as attached:
        processor = attached.processor()
        base.generate(tokens, do_sample=True, max_new_tokens=2, repetition_penalty=1.7, logits_processor=[processor])
        base.generate(tokens, do_sample=False, max_new_tokens=2)
    assert processor.temperatures.shape == (1, 2)
    assert "generate" not in vars(base)


def test_a_processor_by_itself_refuses_the_scores_of_beam_search() -> None:
    base, network = make_base("gpt2", vocab_size=VOCABULARY), make_tempnet()
    processors = [TemperatureLogitsProcessor(network)]
    with pytest.raises(ValueError, match="log-probabilities, as beam search passes them"):
        base.generate(torch.tensor([PROMPTS[0]]), num_beams=3, max_new_tokens=2, logits_processor=processors)


def test_empty_padded_and_long_prompts_are_named() -> None:
    base, network = make_base("gpt2"), make_tempnet()
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    with pytest.raises(ValueError, match="prompt 1 of 2 is padded on the right"):
        generate(base, network, input_ids=torch.ones(2, 3, dtype=torch.int64), attention_mask=mask, max_new_tokens=2)
    with pytest.raises(ValueError, match="prompt 0 of 2 is padded on the right"):
        generate(base, network, input_ids=torch.tensor([[4, 5, 0], [4, 5, 6]]), max_new_tokens=2)
    batch = left_padded([[4, 5], [], [6]])
    with pytest.raises(ValueError, match="prompt 1 of 3 is empty"):
        generate(base, network, **batch, max_new_tokens=2)
    with pytest.raises(ValueError, match="prompt 0 of 1 is empty"):
        generate(base, network, input_ids=torch.zeros(1, 0, dtype=torch.int64), max_new_tokens=2)
    with pytest.raises(
        ValueError, match="longest prompt of 65 tokens and max_new_tokens = 1 do not fit into the context of 64"
    ):
        generate(base, network, input_ids=torch.ones(1, 65, dtype=torch.int64), max_new_tokens=1)


PARTS = {
    "gpt2": [*(f"transformer.{name}" for name in ("wte", "wpe", "h.0", "h.1", "ln_f")), "lm_head"],
    "llama": [*(f"model.{name}" for name in ("embed_tokens", "layers.0", "layers.1", "norm", "rotary_emb")), "lm_head"],
}
# architecture, and the parts that are on the disk
CASES = [
    pytest.param(("gpt2", ["wte", "wpe", "h.0", "h.1", "ln_f", "lm_head"]), id="all, with a tied output weight"),
    pytest.param(("llama", ["embed_tokens", "layers.0"]), id="the input embeddings"),
    pytest.param(("llama", ["layers.1", "lm_head"]), id="the output layer"),
]


def device_map(architecture: str, on_disk: list[str]) -> dict[str, str | int]:
    return {part: "disk" if part.split(".", 1)[-1] in on_disk else "cpu" for part in PARTS[architecture]}


@pytest.fixture(params=CASES)
def models(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[PreTrainedModel, PreTrainedModel, TempNet]:
    """Return a model in memory, the same one with parts on the disk, and its TempNet."""
    architecture, on_disk = request.param
    make_base(architecture).save_pretrained(tmp_path)
    make_tempnet().save_pretrained(tmp_path / "tempnet")
    spread, network = load_causal_lm(tmp_path, device_map=device_map(architecture, on_disk))
    assert is_spread(spread)
    assert any(parameter.is_meta for parameter in spread.parameters()), "nothing is on the disk"
    return AutoModelForCausalLM.from_pretrained(tmp_path).eval(), spread, network


@pytest.mark.parametrize("shift", ["mean", "max"])
def test_temperatures_are_those_of_the_whole_model(
    models: tuple[PreTrainedModel, PreTrainedModel, TempNet], shift: str
) -> None:
    """A TempNet with the shift `max` cannot be folded, so that a hook reads the logits instead of the hidden state."""
    whole, spread, _ = models
    network = make_tempnet(input_shift=shift)
    assert can_fold(spread, network) == can_fold(whole, network) == (shift == "mean")
    drawn = []
    for base in (whole, spread):
        torch.manual_seed(0)
        drawn.append(generate(base, network, **left_padded(PROMPTS), max_new_tokens=4))
    assert torch.equal(drawn[0].sequences, drawn[1].sequences)
    torch.testing.assert_close(drawn[0].temperatures, drawn[1].temperatures, atol=1e-6, rtol=0)
    with torch.inference_mode(), attach(spread, network) as attached:
        spread(torch.tensor(PROMPTS[:1]))
    with torch.no_grad():
        expected = network(whole(torch.tensor(PROMPTS[:1])).logits[:, -1, :VOCABULARY])
    assert attached.last is not None
    torch.testing.assert_close(attached.last, expected, atol=1e-5, rtol=0)


def test_the_fold_and_the_loss_read_the_offloaded_output_weight(
    models: tuple[PreTrainedModel, PreTrainedModel, TempNet],
) -> None:
    whole, spread, network = models
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    ours, theirs = (CachedFold.of(base, network).temperatures(hidden) for base in (spread, whole))
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    inputs, config = torch.tensor(PROMPTS[:1]), TemperatureLossConfig(name="dro", rho=1.5)
    positions = torch.arange(inputs.shape[1]).unsqueeze(0)
    outputs = [
        TemperatureCausalLM(base, network, config, vocab_size=VOCABULARY, freeze_base=True)(
            inputs, positions, inputs.roll(-1, 1), with_statistics=True
        )
        for base in (spread, whole)
    ]
    for name in ("loss", "tau", "entropy"):
        torch.testing.assert_close(outputs[0][name], outputs[1][name], atol=1e-6, rtol=1e-6)
