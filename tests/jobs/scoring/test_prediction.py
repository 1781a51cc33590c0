"""Test predicted temperatures against a direct forward pass of each window, the windows, and the figures of tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from prediction_support import CONTEXT_LENGTH, NUM_LOGITS, VOCAB_SIZE, save_tiny_model, some_texts
from scipy.stats import spearmanr
from transformers import AutoModelForCausalLM

from jobs.predict_temperatures import main
from jobs.scoring.config import LanguageModelPool
from jobs.scoring.temperatures import pairs
from jobs.scoring.temperatures.config import PredictTemperaturesConfig
from jobs.scoring.temperatures.texts import (
    Prediction,
    Predictor,
    part_table,
    resolve_settings,
    total_figures,
)
from jobs.scoring.text_parts import Part, list_sources
from jobs.scoring.units import UnitStore, absolute_output, part_file, to_parquet
from pipelines.text.tokenization import load_tokenizer
from tempnet.inference import can_fold
from tempnet.network import PAIRED_DIRECTORY, TempNet
from tempnet.network_config import TempNetConfig
from tests.tempnet.tiny_language_models import make_base


def config_of(model: Path, text: Path, **changes: object) -> PredictTemperaturesConfig:
    return PredictTemperaturesConfig(**{"model": str(model), "text": str(text), "output": "unused", **changes})  # type: ignore[arg-type]


def token_ids(model: Path, texts: list[str]) -> list[np.ndarray]:
    tokenizer = load_tokenizer(str(model))
    return [np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.int32) for text in texts]


@torch.no_grad()
def direct(model: Path, ids: np.ndarray, stride: int) -> tuple[np.ndarray, ...]:
    """Returns `Prediction` by definition: each window goes through the whole model, without batches or folding."""
    base = AutoModelForCausalLM.from_pretrained(model).eval()
    network = TempNet.from_pretrained(model / PAIRED_DIRECTORY)
    stream = torch.tensor([0, *ids.tolist()])
    taus, entropies, rest = (np.full(shape, np.nan) for shape in (len(ids), len(ids), (7, len(ids))))
    for start in range(0, len(ids), stride):
        window = stream[start : min(start + CONTEXT_LENGTH, len(ids))]
        output = base(window.unsqueeze(0), output_hidden_states=True)
        logits = output.logits[0, :, :VOCAB_SIZE].double()
        tau = network(logits.float(), output.hidden_states[-1][0] * getattr(base.config, "logit_scale", 1.0))
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        at_tau = torch.distributions.Categorical(logits=logits / tau[:, None])
        for place in range(len(window)):
            if np.isnan(taus[start + place]):
                taus[start + place], entropies[start + place] = tau[place], entropy[place]
                likeliest = at_tau.probs[place].topk(3)
                rest[:, start + place] = torch.tensor([at_tau.entropy()[place], *likeliest.values, *likeliest.indices])
    return taus, entropies, rest


@pytest.mark.parametrize(
    ("stride", "with_bias", "reads"), [(1, False, ""), (8, True, ""), (16, False, "hidden"), (16, True, "both")]
)
def test_every_token_has_the_temperature_of_a_direct_forward(
    tmp_path: Path, text: Path, stride: int, with_bias: bool, reads: str
) -> None:
    model, has_scale = save_tiny_model(tmp_path, with_bias=with_bias), reads == "both"
    if has_scale:
        scaled = make_base("cohere", logit_scale=0.05, vocab_size=NUM_LOGITS, max_position_embeddings=CONTEXT_LENGTH)
        scaled.save_pretrained(model)
    base = AutoModelForCausalLM.from_pretrained(model)
    if reads:
        sizes = {"rho": 1.0, "hidden_size": 8, "num_prototypes": 4, "with_logits": reads == "both"}
        sizes["normalize_input"] = not has_scale  # else no scale is seen
        network = TempNet(TempNetConfig.for_hidden(VOCAB_SIZE, base.config.hidden_size, **sizes))
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, std=1.5)
        network.save_pretrained(model / PAIRED_DIRECTORY)
    assert can_fold(base, TempNet.from_pretrained(model / PAIRED_DIRECTORY)) != with_bias
    settings = resolve_settings(config_of(model, text, stride=stride, batch_size=4))
    lengths = [3, 0, CONTEXT_LENGTH, 1, CONTEXT_LENGTH + 1, 4 * CONTEXT_LENGTH - 2]
    (ids,) = token_ids(model, [" ".join(some_texts(9, seed=2))])
    documents = [ids[10 * place :][:length] for place, length in enumerate(lengths)]
    assert list(map(len, documents)) == lengths
    predictions = Predictor(settings, at_tau=True).predict(documents)
    one_by_one = replace(settings.config, batch_size=1, with_entropy=False)
    alone = Predictor(replace(settings, config=one_by_one)).predict(documents)
    for ids, prediction, single in zip(documents, predictions, alone, strict=True):
        tau, entropy, rest = direct(model, ids, stride)
        np.testing.assert_allclose(np.stack(prediction.at_tau), rest, atol=1e-4)
        np.testing.assert_allclose(prediction.tau, tau, atol=1e-5)
        np.testing.assert_allclose(prediction.entropy, entropy, atol=1e-4)
        np.testing.assert_allclose(single.tau, tau, atol=1e-5)
        assert single.entropy is None
    assert np.concatenate([prediction.tau for prediction in predictions]).std() > 0.02


def test_temperatures_that_are_not_finite_are_refused(model: Path, text: Path) -> None:
    predictor = Predictor(resolve_settings(config_of(model, text)))
    next(predictor._base.parameters()).data.fill_(torch.nan)
    with pytest.raises(ValueError, match="τ of 3 of 3 tokens is not finite"):
        predictor.predict([np.array([1, 2, 3], dtype=np.int32)])


def predicted_part(num_tokens: list[int]) -> tuple[Part, list[Prediction]]:
    rng = np.random.default_rng(0)
    ids = pa.array([rng.integers(0, 300, n) for n in num_tokens], pa.list_(pa.int32()))
    keys = [f"a.jsonl:{number}" for number in range(len(num_tokens))]
    values = [[rng.uniform(low, high, n).astype(np.float32) for low, high in ((0.1, 1.9), (0, 5))] for n in num_tokens]
    return Part(0, 0, "a.jsonl", pa.table({"key": keys, "token_ids": ids})), [Prediction(*one, []) for one in values]


def test_figures_of_a_table_are_those_of_its_lists(model: Path, text: Path, tmp_path: Path) -> None:
    settings = resolve_settings(config_of(model, text, per_token=True))
    part, predictions = predicted_part([50, 1, 0, 333])
    table = part_table(part, predictions, settings)
    for row in table.to_pylist():
        assert len(row["token_ids"]) == len(row["tau"]) == len(row["entropy"]) == row["num_tokens"]
        if row["num_tokens"] == 0:
            assert row["tau_mean"] is row["tau_q50"] is row["entropy_mean"] is row["tau_entropy_spearman"] is None
            continue
        assert row["tau_mean"] == pytest.approx(np.mean(row["tau"]))
        assert row["tau_std"] == pytest.approx(np.std(row["tau"]))
        for name, share in {"q05": 0.05, "q25": 0.25, "q50": 0.5, "q75": 0.75, "q95": 0.95}.items():
            assert row[f"tau_{name}"] == pytest.approx(np.quantile(row["tau"], share))
        assert row["entropy_mean"] == pytest.approx(np.mean(row["entropy"]))
        expected = spearmanr(row["tau"], row["entropy"]).statistic if row["num_tokens"] > 1 else 0.0
        assert row["tau_entropy_spearman"] == pytest.approx(expected)
    files = [part_file(0, 0), part_file(0, 1)]
    UnitStore(str(tmp_path)).write(dict.fromkeys(files, to_parquet(table)))
    assert {path.name for path in tmp_path.iterdir()} == {"part-00000-00000.parquet", "part-00000-00001.parquet"}
    assert all(b"unit" in table.schema.field(name).metadata for name in table.schema.names)

    everything = np.concatenate([one.tau for one in predictions])
    figures = total_figures(str(tmp_path), files, settings)
    assert (figures["num_documents"], figures["num_tokens"]) == (8, 2 * len(everything))
    assert figures["entropy_mean"] == pytest.approx(np.concatenate([one.entropy for one in predictions]).mean())
    assert figures["tau_mean"] == pytest.approx(everything.mean())
    assert figures["tau_std"] == pytest.approx(everything.std(), rel=1e-6)
    for name in ("q05", "q25", "q50", "q75", "q95"):
        # The neighbours of a quantile among few tokens lie further apart than a bin is wide.
        exact = np.quantile(np.repeat(everything, 2), int(name[1:]) / 100)
        assert figures[f"tau_{name}"] == pytest.approx(exact, abs=0.01)


def test_a_plain_text_file_becomes_a_page_of_its_first_tokens(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = " ".join(some_texts(5, seed=4)) + " naïve <b>"
    Path("note.md").write_text(text, encoding="utf-8")
    assert main(["--model", str(model), "--text", "note.md", "--html-tokens", "40"]) == 0
    page = Path("temperatures.html").read_text(encoding="utf-8")
    assert page.count('title="τ ') == 40
    (ids,) = token_ids(model, [text])
    tau, *_ = direct(model, ids[:40], CONTEXT_LENGTH // 2)
    assert f"40 tokens: mean τ {tau.mean():.3f}" in capsys.readouterr().out
    assert "note.md:0" in page
    Path("two.jsonl").write_text('{"text": "one two"}\n{"text": "three"}\n')
    assert main(["--model", str(model), "--text", "two.jsonl", "--max-documents", "1"]) == 0
    page = Path("temperatures.html").read_text(encoding="utf-8")
    assert "two.jsonl:0" in page
    assert "two.jsonl:1" not in page


def test_a_directory_is_read_as_archives_or_else_as_plain_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("b.txt", "a.md", "c.py"):
        (tmp_path / name).write_text("text")
    assert [Path(archive.path).name for archive in list_sources(str(tmp_path))] == ["a.md", "b.txt"]
    (tmp_path / "d.jsonl").write_text('"text"\n')
    assert [Path(archive.path).name for archive in list_sources(str(tmp_path))] == ["d.jsonl"]
    assert [record.getMessage().partition("; ")[2] for record in caplog.records] == [
        "not read: 1 other files (c.py)",
        "not read: 3 other files (a.md, b.txt, c.py)",
    ]


def test_results_go_to_a_place_that_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert absolute_output("s3://bucket/tau/") == "s3://bucket/tau"
    with pytest.raises(ValueError, match=r"output = 's3://bucket/tau\?region=eu' must have no query"):
        absolute_output("s3://bucket/tau?region=eu")
    (tmp_path / "runtime_resources").mkdir()
    monkeypatch.chdir(tmp_path / "runtime_resources")
    with pytest.raises(ValueError, match=r"output = 'tau' is relative to the uploaded working directory"):
        absolute_output("tau")


def test_another_configuration_is_refused_with_what_differs(model: Path, text: Path, tmp_path: Path) -> None:
    store, settings = UnitStore(str(tmp_path / "output")), resolve_settings(config_of(model, text))
    store.claim(settings.record())
    store.claim(
        resolve_settings(config_of(model, text, batch_size=3, workers=LanguageModelPool(num_workers=5))).record()
    )
    trained = save_tiny_model(tmp_path / "trained")
    network = TempNet.from_pretrained(trained / PAIRED_DIRECTORY)
    torch.nn.init.ones_(network.pool_weight)
    network.save_pretrained(trained / PAIRED_DIRECTORY)
    more = text.with_name("more.jsonl")
    more.write_text('"text"\n')
    for other, message in (
        (resolve_settings(config_of(model, text, stride=3)), r"begun with other settings.*stride: 8 → 3$"),
        (resolve_settings(config_of(trained, text)), r"tempnet_digest: '\w+' → '\w+'$"),
        (
            replace(settings, archives=[*settings.archives, *list_sources(str(more))]),
            r"archive more.jsonl \(bytes, modified\): None → \[7, \d+\]",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            store.claim(other.record())


def test_the_page_gives_the_mean_over_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "_thumbnails", lambda ids, source: ["" for _ in ids])
    taus = {"tau_image": [0.1, 0.1, 0.1, 0.3], "tau_text": [0.1, 0.1, 0.1, 0.3]}
    table = pa.table({"id": range(4), "key": list("aaab"), "caption": list("wxyz"), **taus})
    assert "mean τ 0.2000;" in pairs._example_section("tau_image", table, None)  # type: ignore[arg-type]
    assert "mean τ 0.1500;" in pairs._example_section("tau_text", table, None)  # type: ignore[arg-type]


def test_captions_of_an_image_count_once_beside_its_label(monkeypatch: pytest.MonkeyPatch) -> None:
    taus = {"tau_image": [2.0, 2.0, 1.0, 3.0], "tau_text": [0.1, 0.3, 0.5, 0.7]}
    monkeypatch.setattr(
        pairs, "match_numbers", lambda keys, *source: np.array([{"a": 7, "b": 5}.get(k) for k in keys], float)
    )
    samples = pairs.labelled_temperatures(pa.table({"key": ["b", "b", "a", "c"], **taus}), "images", "label")
    for noun, tau in (("images", [1.0, 2.0]), ("captions", [0.5, 0.2])):
        np.testing.assert_allclose(samples[noun], (tau, [7.0, 5.0]))
