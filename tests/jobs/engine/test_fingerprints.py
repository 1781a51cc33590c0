"""Tests that a copy has the same fingerprint and that other weights have another one, whatever the size of the file."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from jobs.engine.fingerprints import model_digest, tempnet_digest
from tempnet import TempNet, TempNetConfig
from tempnet.fingerprints import files_digest


@pytest.mark.parametrize("size", [10, 5 << 20])
def test_a_copy_is_the_same_and_a_changed_end_is_not(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a" / "model.safetensors"
    path.parent.mkdir()
    path.write_bytes(os.urandom(size))
    shutil.copytree(path.parent, tmp_path / "b")
    before = model_digest(str(path.parent))
    assert model_digest(str(tmp_path / "b")) == before == files_digest([path])
    content = bytearray(path.read_bytes())
    for place in (0, size - 1):
        changed = bytearray(content)
        changed[place] ^= 1
        path.write_bytes(changed)
        assert model_digest(str(path.parent)) != before


def test_configuration_and_weights_of_a_network_both_count() -> None:
    network = TempNet(TempNetConfig.for_logits(30, rho=1.0, hidden_size=4, num_prototypes=3))
    before = tempnet_digest(network)
    assert tempnet_digest(network) == before
    network.set_tau_max_eval(1.5)
    assert tempnet_digest(network) != before
    network.set_tau_max_eval(None)
    network.pool_bias.data += 1e-3
    assert tempnet_digest(network) != before
