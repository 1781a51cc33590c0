"""A pretrained model that is divided while it is loaded trains as one that was loaded whole, also with compiled blocks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from tempnet.weights import WeightFiles
from tests.local_training import Call

SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    "mistral": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "sliding_window": 8, "tie_word_embeddings": True,
    },
    # LLaMA-2 70B has 80 layers and 64 heads, of which eight share a key, and is 128 times as wide.
    "llama": {
        "hidden_size": 8192 // 128, "intermediate_size": 28_672 // 128, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 1, "max_position_embeddings": 64,
    },
}  # fmt: skip


def save_model(kind: str, directory: Path, vocab_size: int = 90, **options: Any) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=vocab_size, bos_token_id=0, eos_token_id=0, **SIZES[kind])
    AutoModelForCausalLM.from_config(config).save_pretrained(directory, **options)
    return directory


BATCH_SIZE, LENGTH = 4, 16
NONE_WHOLE = ("stage3_param_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance")


def losses(rank: int, world_size: int, directory: str, how: str) -> list[float]:
    """Train for four steps on one rank of a process group, and return losses averaged over the ranks.

    With `how` = "whole" every rank loads the model, which ZeRO 3 then divides. With "compiled" it is divided while it is
    loaded, and its blocks become one graph without breaks. ZeRO 3 divides small weights, too, and keeps none whole after use.
    """
    import deepspeed
    from torch._dynamo.utils import counters

    from jobs.engine import deepspeed_engine  # noqa: F401 — keeps DeepSpeed from compiling an extension
    from jobs.engine.deepspeed_engine import base_without_weights, gather_together, load_partitioned
    from jobs.engine.task import with_and_without_decay
    from tempnet.models.causal_lm import compile_blocks

    config = {
        "train_batch_size": BATCH_SIZE, "train_micro_batch_size_per_gpu": BATCH_SIZE // world_size,
        "zero_optimization": {"stage": 3, **dict.fromkeys(NONE_WHOLE, 0)}, "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 60,
    }  # fmt: skip
    dtype = AutoConfig.from_pretrained(directory).dtype or torch.float32
    if how == "whole":
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        parameters = list(model.parameters())
        groups = [
            {"params": [weight for weight in parameters if (weight.ndim >= 2) == decays], "weight_decay": 10.0 * decays}
            for decays in (True, False)
        ]
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        deepspeed.zero.Init(module=model, config_dict_or_path=config)
    else:
        model = base_without_weights(directory, dtype=dtype)
        if how == "compiled":
            torch._dynamo.reset()
            counters.clear()
            # A run without compiled blocks, which the same process may have trained before, switches TorchDynamo off.
            with patch.dict(os.environ, {"TORCHDYNAMO_DISABLE": "0"}):
                gather_together(compile_blocks(model.train(), backend="aot_eager"))
        files = WeightFiles.find(directory)
        assert files is not None
        load_partitioned(model, files, config, rank=rank)
        base = {"name": "base", "parameters": list(model.parameters()), "learning_rate": 1e-3}
        groups = with_and_without_decay([base], 10.0)
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    generator = torch.Generator().manual_seed(0)
    means = []
    for _ in range(4):
        ids = torch.randint(model.config.vocab_size, (BATCH_SIZE, LENGTH), generator=generator).chunk(world_size)[rank]
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        mean = loss.detach().double() / world_size
        torch.distributed.all_reduce(mean)
        means.append(float(mean))
    if how == "compiled":
        assert counters["stats"]["unique_graphs"] == 1
        assert not counters["graph_break"]
    return means


@pytest.mark.parametrize("kind", SIZES)
def test_losses_are_those_of_a_model_that_was_loaded_whole(kind: str, tmp_path: Path, together: Call) -> None:
    directory = str(save_model(kind, tmp_path / kind, max_shard_size="20KB"))
    whole, divided, compiled = (together(losses, directory, how) for how in ("whole", "divided", "compiled"))
    assert len(set(whole[0])) == 4
    for rank in range(2):
        assert divided[rank] == pytest.approx(whole[rank], abs=1e-6)
        assert compiled[rank] == pytest.approx(whole[rank], abs=1e-5)


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
