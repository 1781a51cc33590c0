"""Test that compiled transformer blocks train what eager ones do, in one graph without breaks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from tempnet.models.causal_lm import TemperatureCausalLM, compile_blocks
from tempnet.network import TempNet
from tempnet.network_config import TempNetConfig
from tempnet.softmax.config import TemperatureLossConfig
from tests.tempnet.tiny_language_models import make_base

VOCABULARY, LENGTH, NUM_STEPS, NUM_LAYERS = 64, 16, 20, 3


def train(base: PreTrainedModel, *, compiled: bool) -> list[float]:
    """Train a base with its TempNet in bfloat16, with documents of changing lengths; validate once in between."""
    torch.manual_seed(1)
    network = TempNet(TempNetConfig.for_logits(VOCABULARY, rho=1.0))
    loss = TemperatureLossConfig(name="dro", rho=1.0)
    module = TemperatureCausalLM(base, network, loss, vocab_size=VOCABULARY, autocast_dtype=torch.bfloat16)
    if compiled:
        assert len(compile_blocks(base, backend="aot_eager")) == NUM_LAYERS
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    losses = []
    for step in range(NUM_STEPS):
        torch.manual_seed(step)
        ids = torch.randint(VOCABULARY, (2, LENGTH + 1))
        cut = 3 + step % 5
        positions = torch.cat([torch.arange(cut), torch.arange(LENGTH - cut)]).expand(2, -1)
        value = module(ids[:, :-1], positions, ids[:, 1:])["loss"]
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
        if step == 10:
            module.eval()
            with torch.no_grad():
                module(ids[:, :-1], positions, ids[:, 1:], with_statistics=True)
            module.train()
    return losses


@pytest.mark.parametrize(
    ("name", "with_checkpointing"),
    [("gpt2", False), ("llama", True)],
    ids=["gpt2", "llama with activation checkpointing"],
)
def test_compiled_blocks_share_one_graph_and_train_as_eager_ones_do(name: str, with_checkpointing: bool) -> None:
    dropout = dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0) if name == "gpt2" else {}
    eager = make_base(name, num_hidden_layers=NUM_LAYERS, initializer_range=0.02, **dropout).train()
    compiled = copy.deepcopy(eager)
    names = list(compiled.state_dict())
    if with_checkpointing:
        compiled.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    torch._dynamo.reset()
    counters.clear()
    assert train(compiled, compiled=True) == pytest.approx(train(eager, compiled=False), abs=2e-3)
    # One graph for training and one for validation, whatever the number of layers, documents and steps. With activation
    # checkpointing, the first block's input requires a gradient even in validation, which takes one more.
    assert counters["stats"]["unique_graphs"] <= (3 if with_checkpointing else 2)
    assert not counters["graph_break"]
    assert list(compiled.state_dict()) == names
