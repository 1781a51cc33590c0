"""Test that a pretrained model that is divided while it is loaded trains as one that was loaded whole, digit by digit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from killing import at_the_same_time, kill_workers_after_checkpoints
from language_model_support import Make, assert_same_losses, history, train
from loading_support import run_ranks
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from jobs.tasks.language_model.models import find_divisible_base
from jobs.tasks.presets.language_models import PRESETS
from tempnet.weights import WeightFiles

pytestmark = pytest.mark.cluster

SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    "llama": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    "mistral": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "sliding_window": 8, "tie_word_embeddings": True,
    },
    # LLaMA-2 70B has 80 layers and 64 heads, of which eight share a key, and is 128 times as wide.
    "70B": {
        "hidden_size": 8192 // 128, "intermediate_size": 28_672 // 128, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 1, "max_position_embeddings": 64,
    },
}  # fmt: skip


def save_model(kind: str, directory: Path, vocab_size: int = 90, **options: Any) -> Path:
    torch.manual_seed(0)
    architecture = "llama" if kind == "70B" else kind
    config = AutoConfig.for_model(architecture, vocab_size=vocab_size, bos_token_id=0, eos_token_id=0, **SIZES[kind])
    AutoModelForCausalLM.from_config(config).save_pretrained(directory, **options)
    return directory


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [
        ("llama", 2),
        *(
            pytest.param(kind, world_size, marks=pytest.mark.long)
            for kind in SIZES
            for world_size in (1, 2, 4)
            if (kind, world_size) != ("llama", 2)
        ),
    ],
)
def test_losses_are_those_of_a_model_that_was_loaded_whole(kind: str, world_size: int, tmp_path: Path) -> None:
    directory = save_model(kind, tmp_path / kind, max_shard_size="20KB")
    whole, divided = (run_ranks(directory, how, world_size) for how in ("whole", "divided"))
    assert len(set(whole[0]["losses"])) == 4
    for rank in range(world_size):
        assert divided[rank]["losses"] == pytest.approx(whole[rank]["losses"], abs=1e-6)


def test_weights_have_their_parameters_or_none_is_divided(tmp_path: Path) -> None:
    """GPT-2's own files name the weights without the prefix of the body; a tied weight has one of its two names."""
    directory = save_model("gpt2", tmp_path / "gpt2")
    files = WeightFiles.find(directory)
    assert files is not None
    model = AutoModelForCausalLM.from_pretrained(directory)
    matches = files.match(model)
    assert matches is not None
    for name, parameter in model.named_parameters():
        assert torch.equal(files.read(matches[name]), parameter)
    AutoModel.from_pretrained(directory).save_pretrained(tmp_path / "body")
    body = WeightFiles.find(tmp_path / "body")
    assert body is not None
    assert body.match(model) == {name: name.removeprefix("transformer.") for name in matches}
    larger = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gpt2", vocab_size=91, bos_token_id=0, eos_token_id=0, **SIZES["gpt2"])
    )
    assert files.match(larger) is None
    (directory / "model.safetensors").unlink()
    assert WeightFiles.find(directory) is None
    (directory / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json is damaged: it must map names of weights"):
        WeightFiles.find(directory)


@pytest.mark.long
@pytest.mark.parametrize("freeze", [True, False], ids=["frozen", "trained"])
def test_a_run_on_a_divided_base_is_that_on_a_whole_one(
    cluster: dict[str, str], tiny: Make, home: Path, reference: dict[str, Any], freeze: bool
) -> None:
    """Under ZeRO 3 the base is divided while it is loaded, under ZeRO 0 every worker loads it whole."""
    name = "frozen" if freeze else "trained"
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": str(home / "runs" / "gpt2-scratch-small" / "export"), "freeze": freeze},
        "temperature": {"rho": 1.0, "target_entropy": None},
        "run": {"num_steps": 10, "checkpoint_every": 5},
    }
    configs = {
        stage: tiny(f"{name}-{stage}", **sections, workers={"num_workers": 2, "zero_stage": stage}) for stage in (0, 3)
    }
    assert find_divisible_base(configs[0]) is None
    assert find_divisible_base(configs[3]) is not None
    whole, divided = (train(config) for config in configs.values())
    assert history(divided, "train/loss") == pytest.approx(history(whole, "train/loss"), abs=1e-6)
    assert divided["validation"]["cross_entropy_tau"] == pytest.approx(
        whole["validation"]["cross_entropy_tau"], abs=1e-6
    )


@pytest.mark.long
def test_the_largest_preset_survives_a_kill_on_a_small_model_of_its_shape(
    cluster: dict[str, str], tiny: Make, tmp_path: Path
) -> None:
    """The settings are those of `llama2-chat-70b-frozen`, but for sizes, data and the eight GPUs."""
    preset, small = PRESETS["llama2-chat-70b-frozen"](), tiny("whole")
    directory = save_model("70B", tmp_path / "llama", vocab_size=512, max_shard_size="100KB")
    assert len(list(directory.glob("*.safetensors"))) > 2
    config = replace(
        preset,
        run=small.run,
        data=small.data,
        model=replace(preset.model, path=str(directory)),
        temperature=replace(preset.temperature, rho=1.0, hidden_size=32, num_prototypes=16),
        workers=replace(
            preset.workers, num_workers=2, use_gpu=False, cpus_per_worker=0.5, precision="fp32", num_threads=1
        ),
        validation=small.validation,
    )
    assert config.workers.zero_stage == 3
    assert find_divisible_base(config) is not None
    whole = train(config)
    assert len(set(history(whole, "train/loss").values())) > 1
    killed = replace(config, run=replace(config.run, name="killed"))
    with at_the_same_time(lambda: kill_workers_after_checkpoints(cluster, f"{killed.run.storage}/killed", times=1)):
        outcome = train(killed)
    assert 5 <= outcome["resumed_from_step"] < 40
    assert_same_losses(outcome, whole)
