"""In one process, batch norm equals nn.BatchNorm; `test_contrastive_ranks.py` tests it over ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel

from tempnet.models.batch_norm import SynchronizedBatchNorm, synchronize_batch_norm


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize(("kind", "shape"), [(nn.BatchNorm1d, (6, 5)), (nn.BatchNorm2d, (4, 5, 3, 2))])
def test_alone_it_is_batch_norm(kind: type[nn.BatchNorm2d], shape: tuple[int, ...], momentum: float | None) -> None:
    torch.manual_seed(0)
    theirs = kind(5, momentum=momentum)
    nn.init.normal_(theirs.weight)
    ours = synchronize_batch_norm(copy.deepcopy(theirs))
    assert isinstance(ours, SynchronizedBatchNorm)
    for _ in range(3):
        x = torch.randn(shape) * 3 + 2
        for norm in (ours, theirs):
            norm.zero_grad()
            norm(x).sin().sum().backward()
        torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=0, atol=0)
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=0, atol=0)
    ours.eval(), theirs.eval()
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"shape \(5,\)"):
        ours.train()(torch.zeros(5))


def test_a_whole_model_keeps_its_names_and_weights() -> None:
    torch.manual_seed(0)
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 1], "layer_type": "basic"}
    plain = AutoModel.from_config(AutoConfig.for_model("resnet", **sizes)).train()
    ours = synchronize_batch_norm(copy.deepcopy(plain))
    x = torch.randn(4, 3, 16, 16)
    assert torch.equal(ours(x).pooler_output, plain(x).pooler_output)
    assert not any(type(part) is nn.BatchNorm2d for part in ours.modules())
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in plain.named_parameters()]
    other = AutoModel.from_config(plain.config)
    other.load_state_dict(ours.state_dict())
    assert torch.equal(other.eval()(x).pooler_output, ours.eval()(x).pooler_output)
