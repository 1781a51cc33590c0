"""The results of a headroom test: figures as plain values, a table, one line of verdict, and a reliability diagram."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jobs.engine.tables import markdown_table
from tempnet.headroom.features import FEATURE_SETS
from tempnet.headroom.gains import DocumentSums, Interval, ratio_interval
from tempnet.headroom.run import CONSTANT, ONE, HeadroomTest

TITLES = {"scalars": "scalars of the logits", "hidden": "hidden state", "both": "both"}


def figures(test: HeadroomTest, *, least_gain: float) -> dict[str, Any]:
    """Returns all figures: gains and losses in nats per token, ECE as a share, each with its 95 % half-width.

    Args:
        test: the result of the test.
        least_gain: gain in thousandths of a nat per token that is worth a TempNet.
    """
    sums = test.sums
    num_tokens = sums.counts.sum().item()
    sets: dict[str, Any] = {}
    for name in FEATURE_SETS:
        sets[name] = {
            "gain": _pair(sums.gain(name, CONSTANT)),
            "gain_second_order": _pair(ratio_interval(sums.second_order[name], sums.counts)),
            "gain_mean_shift": _pair(sums.gain(f"{name}/mean", CONSTANT)),
            "gain_shuffled": _pair(sums.gain(f"{name}/shuffled", CONSTANT)),
            "tau_mean": sums.mean_tau(name),
            "ece": _pair(sums.calibration_error(name)),
            "ece_gain": _pair(sums.calibration_gain(name, CONSTANT)),
            "penalties": test.penalties[name],
        }
    best = max(FEATURE_SETS, key=lambda name: float(sets[name]["gain"]["mean"]))
    return {
        "num_documents": int((sums.counts > 0).sum()),
        "num_tokens": int(num_tokens),
        "cross_entropy": sums.losses[ONE].sum().item() / num_tokens,
        "best_constant": {
            "tau": test.tau,
            "gain": _pair(sums.gain(CONSTANT, ONE)),
            "ece": _pair(sums.calibration_error(CONSTANT)),
            "ece_gain": _pair(sums.calibration_gain(CONSTANT, ONE)),
        },
        "ece": _pair(sums.calibration_error(ONE)),
        "per_token": sets,
        "best_features": best,
        "verdict": verdict(sums, best, least_gain=least_gain),
    }


def verdict(sums: DocumentSums, best: str, *, least_gain: float) -> str:
    """Returns one line that says whether a temperature per token is worth learning, and whether a constant is."""
    gain, constant = sums.gain(best, CONSTANT), sums.gain(CONSTANT, ONE)
    if 1000 * gain.low > least_gain:
        word = "worth it"
    elif 1000 * (gain.mean + gain.half_width) > least_gain:
        word = "cannot be told"
    else:
        word = "not worth it"
    return (
        f"{word}: a temperature per token gains {milli(gain)} mnat over the best constant (from {TITLES[best]}), which "
        f"gains {milli(constant)} mnat over τ = 1"
    )


def table(values: dict[str, Any]) -> str:
    """Returns the figures as a Markdown table: gains in thousandths of a nat per token, ECE in per cent."""
    constant = values["best_constant"]
    rows = [
        ["temperature", "gain, mnat", "second order", "MeanShift", "shuffled", "ECE, %"],
        ["τ = 1", "", "", "", "", _percent(values["ece"])],
        [
            f"best constant, {constant['tau']:.3f}",
            f"{_milli(constant['gain'])} over τ = 1",
            "",
            "",
            "",
            _percent(constant["ece"]),
        ],
    ]
    for name, title in TITLES.items():
        found = values["per_token"][name]
        controls = [_milli(found[f"gain_{kind}"]) for kind in ("second_order", "mean_shift", "shuffled")]
        rows.append([f"per token: {title}", _milli(found["gain"]), *controls, _percent(found["ece"])])
    return markdown_table(rows)


def plot(test: HeadroomTest, best: str, path: Path) -> None:
    """Plot accuracy over confidence of the most probable token, at τ = 1, the best constant and per token."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (upper, lower) = plt.subplots(2, 1, figsize=(5, 6), layout="constrained", height_ratios=(3, 1), sharex=True)
    upper.plot([0, 1], [0, 1], linestyle=":", color="black", label="calibrated")
    labels = {ONE: "τ = 1", CONSTANT: f"best constant, {test.tau:.3f}", best: f"per token, from {TITLES[best]}"}
    for name, label in labels.items():
        bins = test.sums.calibration(name)
        error = test.sums.calibration_error(name)
        upper.plot(bins["confidence"], bins["accuracy"], marker=".", label=f"{label}: ECE {100 * error.mean:.2f} %")
        lower.plot(bins["confidence"], bins["num_tokens"], marker=".")
    upper.set(ylabel="accuracy of the most probable token", ylim=(0, 1))
    upper.legend()
    lower.set(xlabel="its probability", ylabel="tokens", yscale="log", xlim=(0, 1))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def milli(interval: Interval) -> str:
    """Returns an interval in nats as text in thousandths."""
    return f"{1000 * interval.mean:.1f} ± {1000 * interval.half_width:.1f}"


def _pair(interval: Interval) -> dict[str, float]:
    return interval._asdict()


def _milli(pair: dict[str, float]) -> str:
    return milli(Interval(**pair))


def _percent(pair: dict[str, float]) -> str:
    return f"{100 * pair['mean']:.2f} ± {100 * pair['half_width']:.2f}"
