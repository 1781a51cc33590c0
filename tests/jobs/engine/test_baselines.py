"""Tests the verdict on a learned temperature in the report, the outcome and MLflow, for every kind of training."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from jobs.engine import report
from jobs.tasks.dual_encoder.validation import rivals as pair_rivals
from jobs.tasks.language_model.validation import LearnedSums
from jobs.tasks.language_model.validation import rivals as token_rivals
from jobs.tasks.sentence_encoder.task import rivals as span_rivals
from tempnet.contrastive.config import ContrastiveLossConfig
from tempnet.headroom.profile import Profiles
from tempnet.oracle import optimal_temperature
from tempnet.softmax.config import TemperatureLossConfig

BOTH = "beats both constants"
NEITHER = "does not beat the best constant τ nor MeanShift"
NUM_ROWS, NUM_TOKENS = 400, 64


def judged(figures: dict[str, float], tau: Tensor, loss: str = "robust") -> dict[str, Any]:
    scores = {"tau_mean": tau.mean().item(), "tau_std": tau.std().item()}
    if f"image/{loss}/loss" in figures:
        for name, part in zip(("image", "text"), tau, strict=True):
            scores |= {f"{name}_tau_mean": part.mean().item(), f"{name}_tau_std": part.std().item()}
    outcome: dict[str, Any] = {"validation": scores, "rivals": figures, "judged_by": loss}
    return outcome | {"temperature_verdict": report.verdict(outcome)}


def of_tokens(predict: Any, name: str = "dro") -> dict[str, Any]:
    generator = torch.Generator().manual_seed(4)
    spread = 0.5 + 4 * torch.rand(NUM_ROWS, 1, generator=generator)
    logits = spread * torch.randn(NUM_ROWS, NUM_TOKENS, generator=generator)
    targets = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)
    config = TemperatureLossConfig(name=name, rho=1.8)
    tau = predict(optimal_temperature(logits, config.rho))
    sums = LearnedSums({"documents": np.arange(NUM_ROWS) // 10, "targets": targets.numpy()}, 40)
    profiles = Profiles.of_logits(logits, targets, num_nodes=40)
    found = {"profiles": (profiles.values, profiles.target, None, None), "tau": tau}
    sums.add(0, targets, found | {"cross_entropy_tau": cross_entropy(logits / tau[:, None], targets, reduction="none")})
    return judged(token_rivals(sums, tau, config, NUM_TOKENS), tau, config.kind.objective)


def mirrored(tau: Tensor) -> Tensor:
    return (2 * tau.mean() - tau).clamp(min=0.05)


@pytest.mark.usefixtures("process_group")
def test_temperatures_with_the_right_mean_and_the_wrong_spread_are_not_approved() -> None:
    assert of_tokens(lambda best: best)["temperature_verdict"] == BOTH
    outcome = of_tokens(mirrored)
    assert outcome["temperature_verdict"] == NEITHER
    lines = dict(report.verdict_rows(outcome))
    assert lines["learned τ"] == f"{NEITHER} (robust loss on validation data)"
    assert any(name.startswith("  at MeanShift, ") for name in lines)
    assert "WARNING" not in lines
    assert report.verdict_rows({"validation": {}}) == []  # of a run without a TempNet
    too_warm = of_tokens(lambda best: 1.9 * best)
    assert too_warm["temperature_verdict"] == "does not beat the best constant τ"
    assert of_tokens(lambda best: torch.full_like(best, 0.9))["temperature_verdict"] == "constant"
    # Temperatures that the robust loss approves are judged by the cross-entropy if the training minimised that.
    assert of_tokens(lambda best: best, "ts_ce")["temperature_verdict"] != BOTH


@pytest.mark.parametrize(
    ("best", "at_bound", "said"),
    [
        (2.3, 0.9, "the best constant τ, 2.3, is capped by the range of τ, [0.001, 2]: raise temperature.tau-max = 2"),
        (1.2, 0.2, "20.0% of the temperatures lie at the upper end of the range of τ, [0.001, 2]: raise"),
        (0.001, 0.0, "the best constant τ, 0.001, is capped by the range of τ, [0.001, 2]: lower temperature.tau-min"),
        (1.2, 0.0, ""),
    ],
)
def test_a_warning_names_the_bound_that_holds_temperatures_back(best: float, at_bound: float, said: str) -> None:
    figures = {f"cross_entropy/{name}_{key}": 1.0 for name in ("best_constant", "mean_shift")
               for key in ("tau", "loss", "gain", "gain_half_width")}  # fmt: skip
    scores = {"tau_mean": 2.0, "tau_std": 1e-3, "tau_share_upper_bound": at_bound}
    outcome = {
        "rivals": figures | {"cross_entropy/best_constant_tau": best, "cross_entropy/loss": 1.0}, "validation": scores,
        "judged_by": "cross_entropy", "temperature_verdict": "constant", "tau_min": 0.001, "tau_max": 2.0,
    }  # fmt: skip
    *bounds, constant = [text for name, text in report.verdict_rows(outcome) if name == "WARNING"]
    assert [text.startswith(said) for text in bounds] == ([True] if said else [])
    assert ("learning-rate" in constant) == (not said)
    assert "ρ" not in constant


def test_a_gain_within_its_interval_is_none() -> None:
    figures = {"robust/best_constant_gain": 0.1, "robust/best_constant_gain_half_width": 0.2}
    assert not report.beats(figures, "robust", "best_constant")
    assert report.beats(figures | {"robust/best_constant_gain_half_width": 0.05}, "robust", "best_constant")
    assert not report.beats(figures | {"robust/best_constant_gain_half_width": math.nan}, "robust", "best_constant")


def unit_vectors(count: int, seed: int) -> Tensor:
    """Returns unit vectors in clusters of very different sizes, so that their best temperatures differ."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(12, 16, generator=generator)
    which = (12 * torch.rand(count, generator=generator) ** 3).long()
    return normalize(centres[which] + 0.5 * torch.randn(count, 16, generator=generator), dim=-1)


def best_of_anchors(cosines: Tensor, rho: float) -> Tensor:
    """Returns the optimal temperature τ* of every row, whose negatives are all other rows."""
    others = ~torch.eye(len(cosines), dtype=torch.bool)
    return optimal_temperature(cosines[others].view(len(cosines), -1), rho, 0.001, 1.0)


@pytest.mark.parametrize("kind", ["pairs", "spans"])
def test_contrastive_temperatures_are_judged_by_their_held_out_loss(kind: str) -> None:
    config = ContrastiveLossConfig(rho=2.0, tau_max=1.0)
    first = unit_vectors(200, 0)
    second = normalize(first + 0.1 * unit_vectors(200, 1), dim=-1)
    if kind == "pairs":
        best = torch.stack(
            [best_of_anchors(first @ second.T, config.rho), best_of_anchors(second @ first.T, config.rho)]
        )
        found = [of_pairs(first, second, tau, config) for tau in (best, torch.stack([*map(mirrored, best)]))]
    else:
        both = torch.cat([first, second])
        best = best_of_anchors(both @ both.T, config.rho).view(2, -1)
        found = [
            judged(span_rivals(torch.stack([first, second]), tau, config, num_anchors=2), tau)
            for tau in (best, mirrored(best))
        ]
    kinds = ("image", "text") if kind == "pairs" else ("",)
    assert [report.verdicts(outcome) for outcome in found] == [
        dict.fromkeys(kinds, BOTH),
        dict.fromkeys(kinds, NEITHER),
    ]
    assert found[0]["rivals"]["num_pairs"] == 200
    # A τ* that counts its own positive among the contrasts is not exactly the best one, and no constant comes near it.
    prefix = "text/" if kind == "pairs" else ""
    gain, half_width = (found[0]["rivals"][f"{prefix}robust/mean_shift_gain{end}"] for end in ("", "_half_width"))
    assert gain > 10 * half_width


def of_pairs(first: Tensor, second: Tensor, tau: Tensor, config: ContrastiveLossConfig) -> dict[str, Any]:
    return judged(pair_rivals(first, second, torch.arange(len(first)), tau, config), tau)


def test_images_and_captions_are_judged_apart() -> None:
    """Pooled, a constant beside temperatures that vary would be approved, and two different constants would vary."""
    config = ContrastiveLossConfig(rho=2.0, tau_max=1.0)
    first = unit_vectors(200, 0)
    second = normalize(first + 0.1 * unit_vectors(200, 1), dim=-1)
    best = best_of_anchors(second @ first.T, config.rho)
    constant = torch.full_like(best, best.mean().item())
    outcome = of_pairs(first, second, torch.stack([constant, best]), config)
    said = "the image TempNet is constant; the caption TempNet beats both constants"
    assert outcome["temperature_verdict"] == said
    figures = report.verdict_metrics(outcome)
    assert [figures[f"{kind}beats_both_constants"] for kind in ("image/", "text/", "")] == [0.0, 1.0, 0.0]
    lines = dict(report.verdict_rows(outcome))
    assert lines["verdict"] == said
    assert lines["WARNING"].startswith("the image TempNet is constant: τ spreads by 0.00% of its mean")
    different = of_pairs(first, second, torch.stack([constant, 0.3 * constant]), config)
    assert set(report.verdicts(different).values()) == {"is constant"}
    stored = different | {"judged_on": "training"}
    assert report.verdict(stored) == "the stored τ of images is constant; the stored τ of captions is constant"
