"""Test that settings of generation that do not go with a TempNet are refused, and prompts that cannot be continued."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig

from tempnet.inference import TemperatureLogitsProcessor, attach, check_generation, generate
from tests.tempnet.tiny_language_models import PROMPTS, VOCABULARY, left_padded, make_base, make_tempnet


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"do_sample": False}, "do_sample = False: greedy"),
        ({"temperature": 0.7}, r"temperature = 0\.7 would divide the logits a second time"),
        ({"num_beams": 3}, "generation mode 'beam_sample'"),
        ({"prompt_lookup_num_tokens": 2}, "generation mode 'assisted_generation'"),
        ({"guidance_scale": 1.5}, r"guidance_scale = 1\.5 mixes"),
        ({"generation_config": GenerationConfig(do_sample=False)}, "do_sample = False"),
        ({"generation_config": GenerationConfig(do_sample=True, temperature=0.5)}, r"temperature = 0\.5"),
    ],
    ids=str,
)
def test_settings_that_do_not_go_with_it_are_refused(options: dict, message: str) -> None:
    base, network = make_base("gpt2"), make_tempnet()
    with pytest.raises(ValueError, match=message):
        generate(base, network, input_ids=torch.tensor([[1, 2]]), max_new_tokens=1, **options)
    assert not base.get_output_embeddings()._forward_pre_hooks


@pytest.mark.parametrize(
    ("shipped", "message"),
    [
        ({"num_beams": 3}, "generation mode 'beam_sample'"),
        ({"prompt_lookup_num_tokens": 2}, "generation mode 'assisted_generation'"),
        ({"guidance_scale": 1.5}, r"guidance_scale = 1\.5 mixes"),
    ],
    ids=str,
)
def test_what_generate_takes_from_the_model_is_refused_unless_overridden(shipped: dict, message: str) -> None:
    base, network = make_base("gpt2"), make_tempnet()
    base.generation_config = GenerationConfig(pad_token_id=0, **shipped)
    tokens, given = torch.tensor([PROMPTS[0]] * 2), GenerationConfig(max_new_tokens=3)
    with pytest.raises(ValueError, match=message):
        generate(base, network, input_ids=tokens, generation_config=given)
    if "prompt_lookup_num_tokens" not in shipped:  # None says nothing to generate(), so this one cannot be overridden
        own = GenerationConfig(max_new_tokens=3, **dict.fromkeys(shipped, 1))
        made = generate(base, network, input_ids=tokens, generation_config=own)
        assert made.temperatures.shape == (2, 3)


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"do_sample": False}, "do_sample = False: greedy"),
        ({"do_sample": True, "num_beams": 3}, "generation mode 'beam_sample'"),
        ({"do_sample": True, "temperature": 0.5}, r"temperature = 0\.5"),
        (
            {"do_sample": True, "max_new_tokens": 60},
            "prompt of 6 tokens and max_new_tokens = 60 do not fit .* 64 tokens",
        ),
    ],
    ids=str,
)
def test_inside_attach_the_models_own_generate_refuses_the_same(options: dict, message: str) -> None:
    base, network = make_base("gpt2"), make_tempnet()
    tokens = torch.tensor([PROMPTS[0]])
    with attach(base, network) as attached:
        with pytest.raises(ValueError, match=message):
            base.generate(tokens, logits_processor=[attached.processor()], **{"max_new_tokens": 2, **options})
        with pytest.raises(ValueError, match="prompt 0 of 1 is empty"):
            base.generate(tokens[:, :0], do_sample=True, logits_processor=[attached.processor()])
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


def test_empty_and_long_prompts_are_named() -> None:
    base, network = make_base("gpt2"), make_tempnet()
    batch = left_padded([[4, 5], [], [6]])
    with pytest.raises(ValueError, match="prompt 1 of 3 is empty"):
        generate(base, network, **batch, max_new_tokens=2)
    with pytest.raises(ValueError, match="prompt 0 of 1 is empty"):
        generate(base, network, input_ids=torch.zeros(1, 0, dtype=torch.int64), max_new_tokens=2)
    with pytest.raises(
        ValueError, match="longest prompt of 65 tokens and max_new_tokens = 1 do not fit into the context of 64"
    ):
        generate(base, network, input_ids=torch.ones(1, 65, dtype=torch.int64), max_new_tokens=1)
