"""Tests that what the sections about temperatures say reaches the library's configurations that are made from them."""

from __future__ import annotations

import dataclasses
from typing import Any

from jobs.engine.contrastive import ContrastiveSection
from jobs.tasks.language_model.config import TemperatureSection


def test_every_option_of_the_section_reaches_the_network() -> None:
    changed: dict[str, Any] = {
        "hidden_size": 8,
        "num_prototypes": 4,
        "phi_init": 0.5,
        "normalize_input": False,
        "transform": False,
        "projection": False,
        "pooling": "linear",
        "stop_gradient": False,
        "tau_min": 0.2,
        "tau_max": 0.9,
    }
    network = dataclasses.asdict(TemperatureSection(rho=2.0, **changed).network_config(100, 3.0, 8))
    assert {name: network[name] for name in changed} == changed
    assert (network["rho"], network["input_size"]) == (3.0, 100)
    section = ContrastiveSection(loss="tempnet", rho=2.0, **changed)
    network = dataclasses.asdict(section.network_config(16))
    assert {name: network[name] for name in changed} == changed
    assert network["rho"] == 2.0
    assert (section.loss_config.rho, section.loss_config.tau_max) == (2.0, 0.9)
