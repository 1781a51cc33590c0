"""Test the temperatures of archives with Ray Data: runs give equal tables, and broken records are counted."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from prediction_support import save_tiny_model, some_texts
from support import run_until, write_jsonl_zst

from jobs.predict_temperatures import main
from jobs.scoring.config import LanguageModelPool
from jobs.scoring.temperatures.texts.config import PredictTemperaturesConfig
from jobs.scoring.temperatures.texts.job import predict_archives
from jobs.scoring.temperatures.texts.predictor import Predictor
from jobs.scoring.temperatures.texts.settings import claim_output, resolve_settings
from pipelines.problems import TooManyProblemsError
from pipelines.text.tokenization import load_tokenizer

pytestmark = [pytest.mark.cluster, pytest.mark.long]

TEXTS = some_texts(36, seed=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write three archives, of which the last has a record that is not JSON, and return their directory."""
    directory = tmp_path_factory.mktemp("source")
    for number in range(2):
        write_jsonl_zst(directory / f"{number}.jsonl.zst", TEXTS[12 * number : 12 * (number + 1)])
    lines = [json.dumps({"text": text}) for text in TEXTS[24:]]
    (directory / "2.jsonl").write_text("\n".join([*lines[:5], "no JSON", *lines[5:]]))
    return directory


def run(
    model: Path,
    source: Path,
    output: Path,
    *,
    num_workers: int = 1,
    batch_size: int = 4,
    max_bad_share: float = 0.1,
) -> tuple[dict[str, object], list[str]]:
    """Run a job that writes several parts per archive, and return its summary and the lines that it prints."""
    config = PredictTemperaturesConfig(
        model=str(model),
        text=str(source),
        output=str(output),
        per_token=True,
        batch_size=batch_size,
        part_characters=500,
        max_bad_share=max_bad_share,
        workers=LanguageModelPool(num_workers=num_workers, cpus_per_worker=0.5),
    )
    settings, archives = resolve_settings(config)
    claim_output(config.output, settings.record(archives))
    lines: list[str] = []
    summary = predict_archives(
        settings, archives, config.output, config.workers, max_bad_share=config.max_bad_share, say=lines.append
    )
    return summary, lines


def tables(output: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in output.glob("part-*.parquet")}


def test_tables_do_not_depend_on_how_the_job_was_run(
    cluster: dict[str, str], model: Path, source: Path, tmp_path: Path
) -> None:
    summary, lines = run(model, source, tmp_path / "whole")
    whole = tables(tmp_path / "whole")
    assert len(lines) == len(whole) == summary["num_parts"] > 6
    rows = [row for name in sorted(whole) for row in pq.read_table(tmp_path / "whole" / name).to_pylist()]

    # The rows are the documents in their order, with the predictions of a model in this process.
    tokenizer = load_tokenizer(str(model))
    ids = [np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.int32) for text in TEXTS]
    assert [row["token_ids"] for row in rows] == [array.tolist() for array in ids]
    assert [row["key"] for row in rows[:12]] == [f"0.jsonl.zst:{number}" for number in range(12)]
    assert [row["source"] for row in rows[::12]] == ["0.jsonl.zst", "1.jsonl.zst", "2.jsonl"]
    config = PredictTemperaturesConfig(model=str(model), text=str(source), output="unused")
    for row, prediction in zip(rows, Predictor(resolve_settings(config)[0]).predict(ids), strict=True):
        np.testing.assert_allclose(row["tau"], prediction.tau, atol=1e-5)
        np.testing.assert_allclose(row["entropy"], prediction.entropy, atol=1e-4)

    everything = np.concatenate([row["tau"] for row in rows])
    assert summary["num_documents"] == len(TEXTS)
    assert summary["num_tokens"] == len(everything)
    assert summary["tau_mean"] == pytest.approx(everything.mean(), abs=1e-6)
    assert summary["tau_q50"] == pytest.approx(np.median(everything), abs=2e-3)
    assert summary["problems"] == {"invalid_json": 1}
    assert json.loads((tmp_path / "whole" / "_summary.json").read_text())["tau_mean"] == summary["tau_mean"]

    # A job that is killed after the first part and continued by two workers keeps that part and writes the same bytes.
    arguments = ["--model", str(model), "--text", str(source), "--output", str(tmp_path / "parts"), "--per-token"]
    arguments += ["--batch-size", "4", "--part-characters", "500", "--max-bad-share", "0.1"]
    arguments += ["--workers.cpus-per-worker", "0.5"]
    run_until(lambda: bool(tables(tmp_path / "parts")), "jobs.predict_temperatures", arguments, cluster)
    first = {path: path.stat().st_mtime_ns for path in (tmp_path / "parts").glob("part-*.parquet")}
    assert len(first) > 0
    # If reading was quick, all parts exist, so the last one is deleted.
    (tmp_path / "parts" / sorted(whole)[-1]).unlink(missing_ok=True)
    first = {path: time for path, time in first.items() if path.exists()}
    continued, lines = run(model, source, tmp_path / "parts", num_workers=2)
    assert tables(tmp_path / "parts") == whole
    num_kept = int(re.match(r".* holds (\d+) parts;", lines[0]).group(1))  # type: ignore[union-attr]
    assert len(first) <= num_kept == len(whole) - len(lines[1:])
    assert {path: path.stat().st_mtime_ns for path in first} == first
    assert {**continued, **dict.fromkeys(("num_tokens_now", "seconds_now"))} == {
        **summary,
        **dict.fromkeys(("num_tokens_now", "seconds_now")),
    }

    # A finished job that is started again has nothing to do, but it still checks a stricter share.
    again, _ = run(model, source, tmp_path / "parts")
    assert again["num_tokens_now"] == 0
    with pytest.raises(TooManyProblemsError, match=r"max_bad_share = 0\.00%.*2\.jsonl.*invalid_json"):
        run(model, source, tmp_path / "parts", max_bad_share=0.0)


def test_a_plain_text_file_is_one_document_and_the_batch_size_changes_nothing(
    cluster: dict[str, str], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, output, page = tmp_path / "note.txt", tmp_path / "output", tmp_path / "page.html"
    text.write_text("\n".join(TEXTS[:8]))
    words = f"--per-token --html-tokens 30 --batch-size 3 --workers.cpus-per-worker 0.5 --html {page} --output {output}"
    assert main(["--model", str(model), "--text", str(text), *words.split()]) == 0
    (row,) = pq.read_table(output / "part-00000-00000.parquet").to_pylist()
    assert row["key"] == "note.txt:0"
    assert f"{row['num_tokens']} tokens in 1 parts; unreadable: none" in capsys.readouterr().out
    assert page.read_text().count('title="τ ') == 30
    config = PredictTemperaturesConfig(model=str(model), text=str(text), output="unused", batch_size=16)
    ids = np.array(row["token_ids"], dtype=np.int32)
    (prediction,) = Predictor(resolve_settings(config)[0]).predict([ids])
    np.testing.assert_allclose(row["tau"], prediction.tau, atol=1e-5)
    assert row["tau_std"] > 0.02
