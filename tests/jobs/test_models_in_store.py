"""Test jobs whose models, inputs and results lie in an object store: they do what they do with local files."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from clip_support import make_dual_encoder
from evaluation_support import make_export
from s3_support import ObjectStore
from support import write_jsonl_zst
from transformers import AutoConfig, AutoModelForMaskedLM

from jobs.engine.export import model_digest
from jobs.engine.fields import with_fields
from jobs.scoring.dual_encoders.encoder import DualEncoderSpec, Encoder, caption_encoder
from jobs.scoring.generation.job import RecordFile
from jobs.scoring.language_models.config import EvaluateConfig
from jobs.scoring.language_models.evaluate import _tempnets
from jobs.scoring.sentence_encoders.config import EvaluateSentencesConfig
from jobs.scoring.sentence_encoders.evaluate import SentenceEncoderSpec
from jobs.studies.reproduction.scoring import read_stored_temperatures
from jobs.tasks.presets.clip import PRESETS as CLIP_PRESETS
from pipelines.local_copy import local_copy
from pipelines.sentences.senteval import present_tasks, read_task
from pipelines.storage import read_bytes, write_bytes, write_json
from pipelines.text.tokenization import load_tokenizer, tokenizer_digest, train_wordpiece
from tempnet.loading import load_tempnet

FROZEN = "train_lm frozen-small --dry-run --data.train text --data.validation text --tracking.no-enabled"


def run(job: str, *arguments: object) -> None:
    assert importlib.import_module(f"jobs.{job}").main([str(argument) for argument in arguments]) == 0


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make_export(tmp_path_factory.mktemp("runs") / "tiny" / "export"))


@pytest.fixture
def remote(s3_server: ObjectStore, bucket: str, export: Path) -> str:
    s3_server.upload(export, f"{bucket}/tiny/export")
    return f"s3://{bucket}/tiny/export"


def test_a_model_has_the_digest_of_its_local_copy(remote: str, export: Path) -> None:
    assert model_digest(remote) == model_digest(str(export))
    assert tokenizer_digest(load_tokenizer(remote)) == tokenizer_digest(load_tokenizer(str(export)))
    file = f"{remote}/tokenizer.json"
    assert tokenizer_digest(load_tokenizer(file)) == tokenizer_digest(load_tokenizer(str(export / "tokenizer.json")))


def test_a_store_may_be_named_in_the_uri(
    s3_server: ObjectStore, remote: str, export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in s3_server.environment:
        monkeypatch.delenv(name)
    address = s3_server.endpoint.removeprefix("http://")
    path = remote.removeprefix("s3://")
    uri = f"s3://testing:testing@{path}?scheme=http&region=us-east-1&endpoint_override={address}"
    beside = f"s3://testing:testing@{path}/tempnet?scheme=http&region=us-east-1&endpoint_override={address}"
    assert model_digest(uri) == model_digest(str(export))
    assert _tempnets(EvaluateConfig(models=(uri,), wikitext="s3://bucket/text")) == [beside]
    assert load_tempnet(local_copy(beside)).config == load_tempnet(export).config


def test_texts_are_generated_and_continued(
    remote: str, export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal: Callable[..., str]
) -> None:
    home = remote.removesuffix("/tiny/export")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": text, "id": text}) + "\n" for text in ("the cat", "a", "on the mat"))
    )
    write_bytes(f"{home}/prompts.jsonl", prompts.read_bytes())
    options = ["--max-new-tokens", "4", "--batch-size", "1"]  # The last digits of figures may depend on the batch.
    run("generate", "--model", export, "--prompts", prompts, "--output", tmp_path / "out.jsonl", *options)
    there = ["--model", remote, "--prompts", f"{home}/prompts.jsonl", "--output", f"{home}/texts/out.jsonl", *options]
    run("generate", *there, "--limit", 2)
    capsys.readouterr()
    run("generate", *there, "--html", f"{home}/page.html")
    assert "3 texts" in (said := capsys.readouterr().out)
    assert "2 of them from before" in said

    def records(content: bytes) -> list[dict[str, Any]]:
        return [{**json.loads(line), "settings": ""} for line in content.splitlines()]

    assert records(read_bytes(f"{home}/texts/out.jsonl")) == records((tmp_path / "out.jsonl").read_bytes())
    assert 3 <= read_bytes(f"{home}/page.html").count(b'title="') <= 3 * 4  # tokens of one character share a piece
    said = refusal("generate", *there, "--seed", 1)
    assert "holds texts of other settings (seed: 0 → 1)" in said


def test_texts_reach_the_store_while_the_job_runs(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.scoring.generation.job._SECONDS_BETWEEN_UPLOADS", 0.2)
    uri = f"s3://{bucket}/out.jsonl"
    file = RecordFile(uri, {"seed": 0})
    record = {"id": 1, "sample": 0, "turn": 0}
    file.append([record])
    time.sleep(0.25)
    file.append([record | {"id": 2}])
    assert RecordFile(uri, {"seed": 0}).records.keys() == {(1, 0, 0), (2, 0, 0)}
    write_bytes(uri, read_bytes(uri) + b'{"id": 3, "sam')  # an upload of another program that was cut
    assert RecordFile(uri, {"seed": 0}).records.keys() == {(1, 0, 0), (2, 0, 0)}
    assert len(read_bytes(uri).splitlines()) == 2


@pytest.mark.parametrize("is_remote", [False, True], ids=["local", "in a store"])
def test_only_the_networks_configuration_is_written_by_a_calibration(
    is_remote: bool, remote: str, export: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the cat\non the mat\n")
    network = load_tempnet(export).config
    middle = (network.tau_min + network.tau_max) / 2
    model = remote if is_remote else str(shutil.copytree(export, tmp_path / "model"))
    words = ["tau-max", "--model", model, "--prompts", prompts, "--num-new-tokens", 4, "--tolerance", 0.9]

    def changed() -> set[str]:
        files = [path.relative_to(export) for path in export.rglob("*") if path.is_file()]
        return {str(name) for name in files if (export / name).read_bytes() != read_bytes(f"{model}/{name}")}

    run("calibrate", *words, "--mean-tau", middle, "--dry-run")
    assert changed() == set()
    # Naming the model as the place of the TempNet must not write over the model itself.
    run("calibrate", *words, "--mean-tau", middle, *([] if is_remote else ["--tempnet", model]))
    assert changed() == {"tempnet/config.json"}
    assert load_tempnet(local_copy(f"{model}/tempnet")).config.tau_max_eval is not None


def test_dual_encoders_and_their_tokenizers_are_read(s3_server: ObjectStore, bucket: str, tmp_path: Path) -> None:
    local = make_dual_encoder(tmp_path / "export")
    s3_server.upload(Path(local), f"{bucket}/clip/export")
    uri = f"s3://{bucket}/clip/export"
    here, there = DualEncoderSpec.read("a", local), DualEncoderSpec.read("a", uri)
    assert (there.path, there.tokenizer, there.digest) == (uri, f"{uri}/text_encoder", here.digest)
    assert caption_encoder(there).tokenizer.get_vocab() == caption_encoder(here).tokenizer.get_vocab()
    rows = [Encoder(spec, precision="fp32", batch_size=2).texts(["a cat", "a dog"]) for spec in (here, there)]
    np.testing.assert_array_equal(*rows)
    config = CLIP_PRESETS["clip-cc3m-tempnet-small"]()
    assert with_fields(config, {"model.path": uri, "data.tokenizer": ""}).tokenizer == f"{uri}/text_encoder"


def test_sentence_encoders_and_their_data_are_read(s3_server: ObjectStore, bucket: str, tmp_path: Path) -> None:
    tokenizer = train_wordpiece(["the cat sat on the mat"], 120)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = AutoModelForMaskedLM.from_config(AutoConfig.for_model("bert", vocab_size=len(tokenizer), **sizes))
    model.save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    (tmp_path / "data" / "MR").mkdir(parents=True)
    for name, word in (("rt-polarity.neg", "bad"), ("rt-polarity.pos", "good")):
        (tmp_path / "data" / "MR" / name).write_text(f"{word} film\n" * 3)
    s3_server.upload(tmp_path, f"{bucket}/all")
    uri = f"s3://{bucket}/all"
    config = EvaluateSentencesConfig(models=(f"{uri}/bert",), data=f"{uri}/data")
    assert config.present_tasks == present_tasks(tmp_path / "data", ("CR", "MR")) == ("MR",)
    assert read_task(f"{uri}/data", "MR").digest == read_task(tmp_path / "data", "MR").digest
    here = SentenceEncoderSpec.read("a", str(tmp_path / "bert"), config)
    there = SentenceEncoderSpec.read("a", f"{uri}/bert", config)
    assert (there.path, there.digest, there.num_tokens) == (f"{uri}/bert", here.digest, here.num_tokens)


def test_a_runs_stored_temperatures_are_read_from_its_last_checkpoint(bucket: str, tmp_path: Path) -> None:
    """Two ranks own every second of five pairs; an older checkpoint, and a part that three had begun, hold other values."""
    tau = np.arange(10.0).reshape(2, 5)
    for directory in (str(tmp_path), f"s3://{bucket}/run"):
        for step, values in ((1, 0 * tau), (2, tau)):
            (tmp_path / f"checkpoint-{step:08d}").mkdir(exist_ok=True)
            for rank in range(2):
                content = safetensors.numpy.save({"tau": np.ascontiguousarray(values[:, rank::2])})
                write_bytes(f"{directory}/checkpoint-{step:08d}/samples-{rank:05d}-of-00002.safetensors", content)
            write_json(f"{directory}/checkpoint-{step:08d}/files-00000.json", {"world_size": 2})
        content = safetensors.numpy.save({"tau": np.zeros((2, 1))})
        write_bytes(f"{directory}/checkpoint-00000002/samples-00002-of-00003.safetensors", content)
        np.testing.assert_array_equal(read_stored_temperatures(directory, 5), tau)


def test_training_is_planned_from_a_model_and_a_tempnet_in_the_store(
    remote: str, export: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, refusal: Callable[..., str],
) -> None:  # fmt: skip
    write_jsonl_zst(tmp_path / "text" / "a.jsonl.zst", ["the cat sat on the mat"])
    monkeypatch.chdir(tmp_path)
    shared = [*FROZEN.split(), "--data.context-length=8", "--temperature.rho=1", "--optimizer.batch-size=8"]
    shared += ["--temperature.hidden-size=16", "--temperature.num-prototypes=8", "--temperature.input-shift=none"]
    plans = []
    for place in (export, remote):
        run(*shared, f"--model.path={place}", f"--temperature.path={place}/tempnet")
        # The place of the model is a part of what identifies a run.
        plans.append(re.sub(r"configuration \w+", "", capsys.readouterr().out))
    assert plans[0] == plans[1]
    assert "(frozen)" in plans[0]
    said = refusal(*shared, f"--model.path={remote}", f"--temperature.path={remote}/nothing")
    assert re.search(r"error: temperature\.path = 's3://.*/nothing' is missing", said)
    said = refusal(*shared, f"--model.path={remote}", f"--temperature.path={tmp_path}")
    assert re.search(r"error: temperature\.path = .* holds no TempNet", said)


@pytest.mark.parametrize(
    ("command", "field"),
    [
        (f"{FROZEN} --model.path URI", "tokenizer = "),
        (f"{FROZEN} --model.path URI --data.tokenizer MODEL", "model.path = "),
        ("evaluate_lm --models URI --wikitext text.txt", "models: "),
        ("evaluate_lm --models MODEL --wikitext URI", "wikitext = "),
        ("evaluate_lm --models MODEL --tasks x --include-path URI", "include_path = "),
        ("evaluate_clip --models URI --retrieval a=b", "models: "),
        ("evaluate_sentences --models URI --data URI", "data: "),
        ("generate --model URI --prompts text.txt --output o", "model = "),
        ("generate --model MODEL --prompts URI --output o", "prompts = "),
        ("generate --model MODEL --tempnet URI --prompts text.txt --output o --max-new-tokens 4", "tempnet = "),
        ("predict_temperatures --model URI --text text.txt", "model = "),
        ("predict_temperatures --model URI --images text --output o", ""),
        ("calibrate tau-max --model URI --prompts text.txt", "model = "),
    ],
)
def test_what_is_not_in_the_store_is_named_before_anything_starts(
    command: str, field: str, export: Path, bucket: str, tmp_path: Path,
    refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    write_jsonl_zst(tmp_path / "text" / "a.jsonl.zst", ["the cat sat on the mat"])
    Path("text.txt").write_text("the cat sat on the mat\n")
    uri = f"s3://{bucket}/gpt2-scratch-small/export"
    said = refusal(*command.replace("URI", uri).replace("MODEL", str(export)).split())
    if field:
        assert said == f"error: {field}{uri!r} is missing: there is no such file or directory, or no such bucket"
