"""Tests that the logged sums of a sentence encoder's step, added over ranks, give the figures of the whole batch."""

from __future__ import annotations

import pytest
import torch

from jobs.tasks.sentence_encoder.statistics import SpanStatistics
from tempnet.contrastive.config import ContrastiveLossConfig
from tempnet.contrastive.losses import ContrastiveOutput
from tempnet.models.temperature_sentence_encoder import SpanOutput

TAU = torch.tensor([[0.02, 0.04, 0.03, 0.05], [0.1, 0.2, 0.1, 0.2]])


def output_of(tau: torch.Tensor | None, mlm_loss: float | None) -> SpanOutput:
    contrastive: ContrastiveOutput | None = None
    if tau is not None:
        contrastive = {"loss": torch.tensor(1.0), "tau": tau, "log_u": None, "dual_gradient": None}
    return {
        "loss": torch.tensor(1.0),
        "mlm_loss": None if mlm_loss is None else torch.tensor(mlm_loss),
        "contrastive": contrastive,
    }


def summary(name: str, parts: list[torch.Tensor] | list[None], mlm_loss: float | None) -> dict[str, float]:
    config = ContrastiveLossConfig.for_name(name)
    found = [
        SpanStatistics.of(output_of(tau, mlm_loss), config, num_documents=4, num_crowded=number)
        for number, tau in enumerate(parts)
    ]
    found[0].sums.add_(found[1].sums)  # The training loop adds up ranks in the same way.
    return found[0].summary()


def test_means_are_those_of_all_ranks() -> None:
    found = summary("clip", [TAU[:, :2], TAU[:, 2:]], 2.5)
    assert found["mlm_loss"] == pytest.approx(2.5)
    assert found["share_crowded"] == pytest.approx(1 / 8)
    assert found["tau_mean"] == pytest.approx(float(TAU.mean()), rel=1e-6)
    assert found["tau_mean_anchor"] == pytest.approx(float(TAU[0].mean()), rel=1e-6)
    assert found["tau_mean_positive"] == pytest.approx(float(TAU[1].mean()), rel=1e-6)


def test_what_there_is_none_of_is_left_out() -> None:
    assert summary("clip", [None, None], 2.5).keys() == {"share_crowded", "mlm_loss"}
    free = summary("temperature_free", [torch.ones(2, 2), torch.ones(2, 2)], None)
    assert free == {"share_crowded": pytest.approx(1 / 8)}
