"""TempNet against a transcription of its formula, its parameter counts, its switches, and its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tempnet import TempNet, TempNetConfig
from tests.tempnet.formula import temperatures


def num_parameters(config: TempNetConfig) -> int:
    return sum(parameter.numel() for parameter in TempNet(config).parameters())


def test_parameter_counts_are_those_of_table_13() -> None:
    assert num_parameters(TempNetConfig.for_logits(32_000)) == 8_258_050
    assert num_parameters(TempNetConfig.for_logits(50_304)) == 12_943_874
    d0, d1, d2 = 256, 256, 256
    count = num_parameters(TempNetConfig.for_embeddings(d0))
    assert count == d0 * d1 + d1 + d1 * d2 + d2 + 2
    assert round(2 * count / 1e6, 2) == 0.26


@pytest.mark.parametrize(
    ("kind", "shift"), [("logits", "none"), ("logits", "mean"), ("logits", "max"), ("embeddings", "none")]
)
def test_forward_equals_the_formula(kind: str, shift: str) -> None:
    torch.manual_seed(0)
    make = TempNetConfig.for_logits if kind == "logits" else TempNetConfig.for_embeddings
    config = make(40, rho=2.0, hidden_size=16, num_prototypes=12, input_shift=shift)
    network = TempNet(config).double()
    with torch.no_grad():
        network.pool_weight.uniform_(0.5, 1.5)
        network.pool_bias.fill_(0.3)
    x = torch.randn(9, 40)
    expected = temperatures(network, x.double())
    torch.testing.assert_close(network(x), expected, rtol=1e-6, atol=1e-8)


def test_computes_in_float32_under_autocast_and_without_a_gradient_to_its_input() -> None:
    network = TempNet(TempNetConfig.for_logits(40, rho=2.0))
    x = torch.randn(5, 40, requires_grad=True)
    plain = network(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(network(x), plain, rtol=0, atol=0)
    plain.sum().backward()
    assert x.grad is None
    assert all(parameter.grad is not None for parameter in network.parameters())
    free = TempNet(TempNetConfig.for_logits(40, rho=2.0, stop_gradient=False))
    free(x).sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0


ABLATIONS = [
    {"transform": False},
    {"projection": False},
    {"transform": False, "projection": False},
    {"pooling": "linear"},
    {"normalize_input": False},
    {"input_shift": "mean"},
    {"input_shift": "max"},
    {"depth": 4},
    {"hidden_size": 64, "num_prototypes": 64},
    {"stop_gradient": False},
]


@pytest.mark.parametrize("kind", ["logits", "embeddings"])
def test_every_ablation_runs_learns_is_saved_and_changes_the_result(kind: str, tmp_path: Path) -> None:
    make = TempNetConfig.for_logits if kind == "logits" else TempNetConfig.for_embeddings
    results, x = {}, torch.randn(6, 48) * 5
    for number, changes in enumerate(({}, *ABLATIONS)):
        if kind == "embeddings" and "input_shift" in changes:
            with pytest.raises(ValueError, match=r"TempNetConfig\.input_shift = 'm\w+' shifts logits"):
                make(48, rho=2.0, **changes)
            continue
        torch.manual_seed(0)
        network = TempNet(make(48, rho=2.0, **changes))
        tau = network(x)
        assert tau.shape == (6,)
        assert bool(((tau > network.config.tau_min) & (tau < network.config.tau_max)).all())
        tau.sum().backward()
        assert all(parameter.grad is not None for parameter in network.parameters())
        network.save_pretrained(tmp_path / str(number))
        loaded = TempNet.from_pretrained(tmp_path / str(number))
        assert loaded.config == network.config
        torch.testing.assert_close(loaded(x), network.eval()(x), rtol=0, atol=0)
        if changes != {"stop_gradient": False}:
            results[str(changes)] = tuple(tau.tolist())
    assert len(set(results.values())) == len(results)


def test_tau_max_eval_rescales_in_eval_only() -> None:
    network = TempNet(TempNetConfig.for_logits(30, rho=1.0))
    x = torch.randn(3, 30)
    trained = network(x)
    network.set_tau_max_eval(1.3)
    torch.testing.assert_close(network(x), trained)
    share = (trained - 0.001) / (2.0 - 0.001)
    torch.testing.assert_close(network.eval()(x), share * (1.3 - 0.001) + 0.001)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rho": 10.0}, "rho = 10 is outside"),
        ({"rho": -1.0}, "rho = -1"),
        ({"tau_min": 0.0}, "0 < tau_min < tau_max"),
        ({"tau_max": 0.0005}, "0 < tau_min < tau_max"),
        ({"tau_max_eval": 0.0001}, "tau_max_eval"),
        ({"phi_init": 0.0}, "phi_init"),
        ({"depth": 5}, "depth = 5"),
        ({"depth": 4, "transform": False}, "second transform"),
        ({"pooling": "max"}, "pooling = 'max'"),
        ({"hidden_size": 0}, "hidden_size = 0"),
        ({"input_shift": "median"}, r"input_shift = 'median' is none of \('none', 'mean', 'max'\)"),
        ({"kind": "hidden"}, "state_size = 0 must be the dimension of the hidden state"),
        ({"kind": "logits", "state_size": 4}, "state_size = 4 must be"),
        ({"kind": "hidden", "state_size": 4, "transform": False}, "needs transform = True"),
        ({"kind": "both", "state_size": 4, "stop_gradient": False}, "needs transform = True and stop_gradient = True"),
        ({"kind": "hidden", "state_size": 4, "input_shift": "mean"}, "a network on hidden takes 'none' only"),
    ],
)
def test_bad_configurations_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TempNetConfig(input_size=2048, **{"kind": "logits", "rho": 2.0, "tau_max": 2.0, **changes})


def test_a_network_on_hidden_states_survives_saving_and_says_what_it_reads(tmp_path: Path) -> None:
    network = TempNet(TempNetConfig.for_hidden(23, 6, with_logits=True, rho=1.0, hidden_size=7)).eval()
    network.save_pretrained(tmp_path)
    logits, hidden = torch.randn(3, 23), torch.randn(3, 6)
    again = TempNet.from_pretrained(tmp_path)
    assert torch.equal(again(logits, hidden), network(logits, hidden))
    with pytest.raises(ValueError, match=r"reads hidden states \(kind = 'both'\), and only logits are known here"):
        again(logits)


def test_a_wrong_vocabulary_and_broken_files_are_refused(tmp_path: Path) -> None:
    network = TempNet(TempNetConfig.for_logits(64, rho=2.0))
    with pytest.raises(ValueError, match="for a TempNet on embeddings"):
        network.init_prototypes(torch.randn(9, 64))
    with pytest.raises(ValueError, match="effective vocabulary"):
        network(torch.randn(2, 65))
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        TempNet.from_pretrained(tmp_path)
    network.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"new_field": 1}))
    with pytest.raises(ValueError, match="unknown fields \\['new_field'\\]"):
        TempNet.from_pretrained(tmp_path)
    del values["input_shift"]  # a network that was saved before there was a shift
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert TempNet.from_pretrained(tmp_path).config.input_shift == "none"
