"""The job: held-out data → tables of measured predictions → the test → figures, a verdict, a diagram and MLflow.

A table of measured predictions is one Parquet file per part with one row per token.

Shapes: N tokens, J nodes of a profile, d hidden size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import ray
import torch
from torch import Tensor

from jobs.engine.cluster import start_ray
from jobs.engine.report import markdown_table, picture
from jobs.engine.tracking import resolve_uri
from jobs.scoring.headroom.config import Headroom
from jobs.scoring.results import publish, write_results
from jobs.scoring.units import UnitStore, absolute_output, settings_digest
from pipelines.storage import resolve
from tempnet.headroom.features import FEATURE_SETS, Tokens
from tempnet.headroom.profile import NUM_NODES, TAU_RANGE, Profiles
from tempnet.headroom.run import CONSTANT, ONE, HeadroomTest, run_headroom_test
from tempnet.intervals import Interval, ratio_interval

# A best constant within this factor of an end of the range was looked for no further.
_AT_AN_END = 1.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One headroom test: where its measured predictions are, in which words it is reported, and in which unit of τ.

    The defaults are those of a text.
    """

    files: Sequence[str]
    with_end: bool = True
    """Whether end-of-text tokens are among the predictions."""
    name: str = ""
    """Key of its figures in headroom.json and in MLflow; empty if there is only one question, whose figures have no key."""
    title: str = ""
    """Heading of its table; empty for none."""
    noun: str = "token"
    """What would have a temperature of its own."""
    case: str = "token"
    """What the gains are means over."""
    document: str = "document"
    """What the folds and the interval are over."""
    candidate: str = "token"
    """What the probabilities are distributed over."""
    features: Mapping[str, str] = field(
        default_factory=lambda: {"scalars": "scalars of the logits", "hidden": "hidden state", "both": "both"}
    )
    """Feature set → its name in the table."""
    unit_tau: float = 1.0
    """Temperature that the logits were divided by before they were measured: τ = 1 of the test is this temperature."""
    own_name: str = "τ = 1"
    """Name of the temperature at which the model predicts by itself, which is `unit_tau`; empty if it has none."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What headroom.json says of the data besides."""


def figures(test: HeadroomTest, question: Question, *, least_gain: float) -> dict[str, Any]:
    """Returns all figures: gains and losses in nats per case, ECE as a share, each with its 95 % half-width.

    Without a temperature of the model's own, what compares with it is None, and the cross-entropy that at the best constant.
    `least_gain` is the gain in thousandths of a nat per case that is worth a TempNet.
    """
    sums, has_own = test.sums, bool(question.own_name)
    num_cases = sums.counts.sum().item()
    sets: dict[str, Any] = {}
    for name in FEATURE_SETS:
        sets[name] = {
            "gain": sums.gain(name, CONSTANT)._asdict(),
            "gain_second_order": ratio_interval(sums.second_order[name], sums.counts)._asdict(),
            "gain_mean_shift": sums.gain(f"{name}/mean", CONSTANT)._asdict(),
            "gain_shuffled": sums.gain(f"{name}/shuffled", CONSTANT)._asdict(),
            "tau_mean": question.unit_tau * sums.mean_tau(name),
            "ece": sums.calibration_error(name)._asdict(),
            "ece_gain": sums.calibration_gain(name, CONSTANT)._asdict(),
            "penalties": test.penalties[name],
        }
    best = max(FEATURE_SETS, key=lambda name: float(sets[name]["gain"]["mean"]))
    return {
        f"num_{question.document}s": int((sums.counts > 0).sum()),
        f"num_{question.case}s": int(num_cases),
        "cross_entropy": sums.losses[ONE if has_own else CONSTANT].sum().item() / num_cases,
        "best_constant": {
            "tau": question.unit_tau * test.tau,
            "gain": sums.gain(CONSTANT, ONE)._asdict() if has_own else None,
            "ece": sums.calibration_error(CONSTANT)._asdict(),
            "ece_gain": sums.calibration_gain(CONSTANT, ONE)._asdict() if has_own else None,
        },
        "ece": sums.calibration_error(ONE)._asdict() if has_own else None,
        f"per_{question.noun}": sets,
        "best_features": best,
        "verdict": verdict(test, question, best, least_gain=least_gain),
    }


def judge(gains: Sequence[Interval], least_gain: float) -> str:
    """Returns whether one of several gains is certainly worth it, may be, or is not."""
    if any(gain.low > least_gain for gain in gains):
        return "worth it"
    return "not worth it" if all(gain.high <= least_gain for gain in gains) else "cannot be told"


def verdict(test: HeadroomTest, question: Question, best: str, *, least_gain: float) -> str:
    """Returns one line that says whether a temperature of its own is worth learning, and whether a constant is."""
    gain = test.sums.gain(best, CONSTANT)
    low, high = TAU_RANGE
    doubt = ""
    if not low * _AT_AN_END < test.tau < high / _AT_AN_END:
        low, high = low * question.unit_tau, high * question.unit_tau
        doubt = (
            f"; the best constant lies at an end of what was looked at, {low:.3g} to {high:.3g}, so gains may be larger"
        )
    constant = (
        f"which gains {milli(test.sums.gain(CONSTANT, ONE))} mnat over {question.own_name}"
        if question.own_name
        else "with which the model is compared because it has no constant temperature of its own"
    )
    return (
        f"{judge([gain], least_gain / 1000)}: a temperature per {question.noun} gains {milli(gain)} mnat over the best "
        f"constant (from {question.features[best]}), {constant}{doubt}"
    )


def table(values: dict[str, Any], question: Question) -> str:
    constant = values["best_constant"]
    rows = [["temperature", "gain, mnat", "second order", "MeanShift", "shuffled", "ECE, %"]]
    if question.own_name:
        rows.append([question.own_name, "", "", "", "", _percent(values["ece"])])
    over = f"{_milli(constant['gain'])} over {question.own_name}" if question.own_name else ""
    rows.append([f"best constant, {_tau(constant['tau'], question)}", over, "", "", "", _percent(constant["ece"])])
    for name, title in question.features.items():
        found = values[f"per_{question.noun}"][name]
        controls = [_milli(found[f"gain_{kind}"]) for kind in ("second_order", "mean_shift", "shuffled")]
        rows.append([f"per {question.noun}: {title}", _milli(found["gain"]), *controls, _percent(found["ece"])])
    return markdown_table(rows)


def summary(question: Question, values: dict[str, Any]) -> str:
    """Returns the heading, the table, the verdict and the number of cases, as they are printed and logged."""
    heading = f"{question.title}\n\n" if question.title else ""
    counts = [f"{values[f'num_{noun}s']:,} {noun}s" for noun in (question.case, question.document)]
    return f"{heading}{table(values, question)}\n\n{values['verdict']}\n{' of '.join(counts)}"


def metrics(question: Question, values: dict[str, Any]) -> dict[str, float]:
    """Returns the figures for MLflow, with the question's name before theirs; gains in thousandths of a nat per case."""
    constant = values["best_constant"]
    found = {"best_constant/tau": constant["tau"], "cross_entropy": values["cross_entropy"]}
    for name, row in {"best_constant": constant, **values[f"per_{question.noun}"]}.items():
        found[f"{name}/ece"] = row["ece"]["mean"]
        if row["gain"] is not None:
            found[f"{name}/gain_mnat"] = 1000 * row["gain"]["mean"]
            if name != "best_constant":
                found[f"{name}/gain_half_width_mnat"] = 1000 * row["gain"]["half_width"]
    return {f"{question.name}/{name}" if question.name else name: value for name, value in found.items()}


def plot(results: Sequence[tuple[Question, HeadroomTest, dict[str, Any]]], path: Path) -> None:
    """Plot accuracy over confidence of the most probable candidate, a column per question: at the model's own temperature, if
    it has one, at the best constant, and at those of the best features.
    """
    size = (5 * len(results), 6)
    with picture(path, 2, len(results), figsize=size, height_ratios=(3, 1), sharex=True) as axes:
        for (question, test, values), upper, lower in zip(results, *axes, strict=True):
            best = values["best_features"]
            labels = {ONE: question.own_name} if question.own_name else {}
            labels |= {CONSTANT: f"best constant, {_tau(values['best_constant']['tau'], question)}"}
            labels |= {best: f"per {question.noun}, from {question.features[best]}"}
            upper.plot([0, 1], [0, 1], linestyle=":", color="black", label="calibrated")
            for name, label in labels.items():
                bins, error = test.sums.calibration(name), test.sums.calibration_error(name)
                label = f"{label}: ECE {100 * error.mean:.2f} %"
                upper.plot(bins["confidence"], bins["accuracy"], marker=".", label=label)
                lower.plot(bins["confidence"], bins["num_tokens"], marker=".")
            upper.set(title=question.title, ylabel=f"accuracy of the most probable {question.candidate}", ylim=(0, 1))
            upper.legend()
            lower.set(xlabel="its probability", ylabel=f"{question.case}s", yscale="log", xlim=(0, 1))


def milli(interval: Interval) -> str:
    return f"{1000 * interval.mean:.1f} ± {1000 * interval.half_width:.1f}"


def _tau(tau: float, question: Question) -> str:
    """Returns a temperature with three digits behind the point, or more where the unit is small."""
    return f"{tau:.{3 + max(0, math.ceil(-math.log10(question.unit_tau)))}f}"


def _milli(pair: dict[str, float]) -> str:
    return milli(Interval(**pair))


def _percent(pair: dict[str, float]) -> str:
    return f"{100 * pair['mean']:.2f} ± {100 * pair['half_width']:.2f}"


def measure_headroom(config: Headroom) -> dict[str, Any]:
    """Run or continue the job, print its tables and verdicts, and return what headroom.json holds."""
    from jobs.scoring.headroom.pairs import PairMeasurement
    from jobs.scoring.headroom.texts import TextMeasurement

    uri = resolve_uri(config.tracking, config.run.resolved_storage)
    measurement = PairMeasurement.resolve(config) if config.images else TextMeasurement.resolve(config)
    output, record = absolute_output(config.output), measurement.record()
    UnitStore(output).claim(record)
    started = time.monotonic()
    questions = measurement.measure(output)
    start_ray()
    cpus = config.workers.cpus_per_worker
    run = ray.remote(num_cpus=cpus)(run_test)
    tests = ray.get([run.remote(output, question, config.folds, max(1, int(cpus))) for question in questions])
    found, logged, parts = [], dict[str, float](), []
    values: dict[str, Any] = {}
    for question, test in zip(questions, tests, strict=True):
        part = figures(test, question, least_gain=config.least_gain)
        found.append((question, test, part))
        values |= {question.name: part} if question.name else part
        logged |= metrics(question, part)
        parts.append(summary(question, part) + measurement.advice(test, question))
    values |= {"folds": config.folds, **questions[0].facts, "settings": record}
    said = "\n\n".join(parts)
    asked = {name: getattr(config, name) for name in ("folds", "end_of_document", "least_gain")}

    def write(directory: Path) -> None:
        write_results(directory / "headroom.json", values)
        plot(found, directory / "reliability.png")

    publish(
        config,
        output,
        write,
        uri=uri,
        name="headroom",
        digest=settings_digest(record | asked),
        metrics=logged,
        note=said,
        data_sets={"evaluation": ("images" if config.images else "text", settings_digest(record), measurement.source)},
    )
    if measurement.warning:
        print(f"\n{measurement.warning}")
    print(
        f"\n{said}\n{time.monotonic() - started:.0f} s; gains per {questions[0].case}, ± 95 % over "
        f"{questions[0].document}s\n{output}/headroom.json and reliability.png"
    )
    return values


def run_test(output: str, question: Question, num_folds: int, num_threads: int) -> HeadroomTest:
    torch.set_num_threads(num_threads)
    return run_headroom_test(
        lambda: read_measured(output, question.files, with_end=question.with_end),
        count_documents(output, question.files),
        num_folds=num_folds,
    )


_NUM_DOCUMENTS = b"num_documents"
_ROWS_AT_ONCE = 4096
# Hidden states are stored in half precision, whose largest number this is.
_MAX_HALF = 65504.0


def measured_table(
    tokens: Tokens, documents: np.ndarray, *, num_documents: int, is_end: np.ndarray | None = None
) -> pa.Table:
    """Returns the table of the N tokens of a part."""
    columns = {
        "document": pa.array(documents.astype(np.int32)),
        "is_end": pa.array(np.zeros(len(documents), dtype=bool) if is_end is None else is_end),
        "target": pa.array(tokens.profiles.target.float().numpy()),
        "margin": pa.array(tokens.margin.float().numpy()),
        "maximum": pa.array(tokens.maximum.float().numpy()),
        "profile": _rows(tokens.profiles.values.float().flatten(1).numpy()),
        "hidden": _rows(tokens.hidden.clamp(-_MAX_HALF, _MAX_HALF).half().numpy()),
    }
    return pa.table(columns).replace_schema_metadata({_NUM_DOCUMENTS: str(num_documents)})


def read_measured(output: str, files: Sequence[str], *, with_end: bool = True) -> Iterator[tuple[Tokens, Tensor]]:
    """Yields the tokens of the tables in order, with the number (N,) of each token's document among all documents."""
    num_before = 0
    for file in files:
        for batch in _batches(output, file):
            if not with_end and "is_end" in batch.schema.names:
                batch = batch.filter(pc.invert(batch["is_end"]))
            if batch.num_rows:
                yield _tokens(batch), torch.from_numpy(batch["document"].to_numpy().astype(np.int64)) + num_before
        num_before += count_documents(output, [file])


def end_losses(output: str, files: Sequence[str]) -> Tensor:
    """Returns the cross-entropies at τ = 1 of all end-of-text tokens: (n,)."""
    columns = ["is_end", "profile", "target"]
    ends = [batch.filter(batch["is_end"]) for file in files for batch in _batches(output, file, columns)]
    found = [_profiles(batch).cross_entropy(0.0) for batch in ends if batch.num_rows]
    return torch.cat([torch.empty(0, dtype=torch.float64), *found])


def count_documents(output: str, files: Sequence[str]) -> int:
    total = 0
    for file in files:
        filesystem, path = resolve(f"{output}/{file}")
        total += int(pq.read_schema(path, filesystem=filesystem).metadata[_NUM_DOCUMENTS])
    return total


def _batches(output: str, file: str, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
    filesystem, path = resolve(f"{output}/{file}")
    with filesystem.open_input_file(path) as stream:
        yield from pq.ParquetFile(stream).iter_batches(batch_size=_ROWS_AT_ONCE, columns=columns)


def _tokens(batch: pa.RecordBatch) -> Tokens:
    return Tokens(
        _profiles(batch),
        _vector(batch["margin"]),
        _vector(batch["maximum"]),
        torch.from_numpy(_matrix(batch["hidden"], np.float16)).double(),
    )


def _profiles(batch: pa.RecordBatch) -> Profiles:
    values = _matrix(batch["profile"], np.float32).reshape(batch.num_rows, NUM_NODES, 3)
    return Profiles(torch.from_numpy(values).double(), _vector(batch["target"]))


def _rows(matrix: np.ndarray) -> pa.Array:
    """Returns the rows of a matrix as binary values of fixed size, which Parquet stores as they are."""
    matrix = np.ascontiguousarray(matrix)
    size = matrix.shape[1] * matrix.itemsize
    return pa.Array.from_buffers(pa.binary(size), len(matrix), [None, pa.py_buffer(matrix)])


def _matrix(column: pa.Array, dtype: type) -> np.ndarray:
    size = column.type.byte_width // np.dtype(dtype).itemsize
    flat: np.ndarray = np.frombuffer(column.buffers()[1], dtype=dtype)
    return flat[column.offset * size : (column.offset + len(column)) * size].reshape(len(column), size).copy()


def _vector(column: pa.Array) -> Tensor:
    return torch.from_numpy(column.to_numpy().astype(np.float64))
