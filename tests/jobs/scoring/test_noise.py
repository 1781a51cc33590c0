"""Tests of the analysis of noisy captions: its groups are those of the noise, its intervals those of scipy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm, ttest_ind

from jobs.scoring.analyses.config import Noise
from jobs.scoring.analyses.noise import conclude, figures, group_pairs, plot
from pipelines.images.captions import CaptionNoise


def test_groups_are_those_of_the_noise_and_of_the_median(tmp_path: Path) -> None:
    noise = CaptionNoise(share=0.3, seed=5)
    ids, numbers = np.arange(1000, 1400), np.random.default_rng(0).permutation(400).astype(float)
    numbers[7] = np.nan
    groups = group_pairs(ids, numbers, noise)
    noisy = [noise.apply("one two three", int(pair))[0] != "one two three" for pair in ids]
    assert groups["noisy"].tolist() == noisy
    assert groups["clean"].tolist() == [not of_pair for of_pair in noisy]
    assert groups["noisy and frequent"].tolist() == list(np.array(noisy) & (numbers > np.nanmedian(numbers)))
    tau = {name: np.random.default_rng(1).normal(1.0, 0.1, 400) for name in ("images", "captions")}
    plot(groups, tau, tmp_path / "noise.png")
    assert (tmp_path / "noise.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="every group needs 2 pairs; of 3 pairs are noisy 0, noisy and frequent 0"):
        group_pairs(np.arange(3), np.arange(3.0), CaptionNoise(share=1e-9))


def test_differences_have_the_error_of_welch() -> None:
    rng = np.random.default_rng(2)
    is_noisy = np.arange(300) < 60
    groups = {"clean": ~is_noisy, "noisy": is_noisy, "noisy and frequent": np.arange(300) < 20}
    tau = {"images": rng.normal(1.0, 0.2, 300), "captions": rng.normal(1.0, 0.2, 300) + is_noisy}
    values = figures(groups, tau)
    for noun, of_kind in tau.items():
        welch = ttest_ind(of_kind[is_noisy], of_kind[~is_noisy], equal_var=False)
        difference = values["differences"][noun]
        error = difference["half_width"] / 1.96
        assert difference["mean"] / error == pytest.approx(welch.statistic)
        assert difference["half_width"] / error == pytest.approx(norm.ppf(0.975), abs=1e-3)
    assert [row["num_pairs"] for row in values["groups"]] == [240, 60, 20]
    assert values["groups"][2]["images"]["mean"] == pytest.approx(tau["images"][:20].mean())
    assert "τ of noisy pairs' images is not seen to differ" in conclude(values)
    assert "τ of noisy pairs' captions is higher (+1" in conclude(values)


def test_a_share_outside_of_its_range_is_refused() -> None:
    for share in (0.0, 1.0, -0.1):
        with pytest.raises(ValueError, match=rf"share = {share:g} must lie in \(0, 1\)"):
            Noise(model="m", images="i", label="l", output="o", share=share)
