"""Tests that stored features are those of the base, take the predicted room, and train a TempNet as the base does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from jobs.engine.config import RunSection, WorkersSection
from jobs.scoring.features import HiddenStates, read_blocks, units_of
from jobs.scoring.units import UnitStore
from jobs.tasks.language_model.config import DataSection, LanguageModelConfig, ModelSection, TemperatureSection
from jobs.tasks.language_model.data import features_of, features_to_read, find_features, refer_to_base
from jobs.tasks.language_model.models import build_model, flops_per_token
from jobs.tasks.language_model.validation import read_part, to_tensors
from pipelines import features as features_module
from pipelines.features import Features, FeatureSource, features_directory
from pipelines.text.blocks import BlockSource, read_range
from pipelines.text.manifest import ArchiveEntry, Manifest, ShardEntry
from pipelines.text.packing import PackingConfig
from pipelines.text.tokenization import load_tokenizer, train_bpe
from tempnet.models.output_head import HEAD_FILE, StoredBase

LENGTH, WIDTH = 16, 8
CPU = torch.device("cpu")


def write_text(directory: Path, layout: PackingConfig) -> Manifest:
    generator = np.random.default_rng(0)
    shards = []
    directory.mkdir()
    for number, size in enumerate((5, 3)):
        # A document of 11 tokens and its end take 12, so documents end within blocks.
        documents = [generator.integers(1, 250, 11) for _ in range(size * LENGTH // 12)]
        rows = pa.Table.from_batches(layout.rows(documents), layout.schema)
        file = f"{number}.arrow"
        with pa.OSFile(str(directory / file), "wb") as sink, pa.ipc.new_file(sink, layout.schema) as writer:
            writer.write_table(rows)
        shards.append(ShardEntry(file=file, archive="a", num_rows=len(rows), num_tokens=0, digest=str(number)))
    archive = ArchiveEntry(path="a", num_bytes=0, num_documents=9, problems={}, examples=[], shards=shards)
    manifest = Manifest(directory=str(directory), tokenizer_digest="", layout=layout, archives=[archive])
    manifest.save()
    return manifest


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> LanguageModelConfig:
    place = tmp_path_factory.mktemp("features")
    tokenizer = train_bpe(["some words to make a vocabulary of"] * 20, 280)
    torch.manual_seed(0)
    model = GPT2Config(vocab_size=300, n_positions=32, n_embd=WIDTH, n_layer=2, n_head=2, eos_token_id=0)
    GPT2LMHeadModel(model).save_pretrained(place / "model")
    tokenizer.save_pretrained(place / "model")
    return LanguageModelConfig(
        run=RunSection(name="own", storage=str(place)),
        data=DataSection(train="unused", validation="unused", context_length=LENGTH),
        model=ModelSection(path=str(place / "model")),
        temperature=TemperatureSection(rho=1.0, hidden_size=4, num_prototypes=3),
        workers=WorkersSection(precision="fp32"),
    )


@pytest.fixture(scope="module")
def features(config: LanguageModelConfig) -> Iterator[Features]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features_module, "FILE_BYTES", 2 * LENGTH * (2 * WIDTH + 4) + 16)
        layout = PackingConfig.for_tokenizer(load_tokenizer(config.tokenizer), LENGTH)
        text = write_text(Path(config.run.storage) / "text", layout)
        features = features_of(config, text, refer_to_base(config))
        Path(features.directory).mkdir(parents=True)
        model = HiddenStates(config)
        for unit in units_of(features):
            for item in read_blocks(features, unit):
                UnitStore(features.directory).write(model(item).files)
        features.save("digest")
        yield features


def test_the_features_of_any_blocks_are_those_of_the_base(config: LanguageModelConfig, features: Features) -> None:
    module = build_model(config, load_tokenizer(config.tokenizer))
    order = np.random.default_rng(1).permutation(features.text.num_rows)
    sizes = np.cumsum([0, *features.text.shard_sizes])
    shards = np.searchsorted(sizes, order, side="right") - 1
    rows = order - sizes[shards]
    stored = FeatureSource(features=features).read(shards, rows, epoch=0)
    blocks = BlockSource(manifest=features.text).read(shards, rows, epoch=0)
    assert np.array_equal(stored["targets"], blocks["targets"])
    assert np.array_equal(stored["digest"], blocks["digest"])
    tensors = to_tensors(blocks, CPU)
    with torch.no_grad():
        hidden = module.contexts(tensors["input_ids"], tensors["position_ids"])
    assert torch.equal(to_tensors(stored, CPU)["hidden"], hidden.to(torch.bfloat16))


def test_a_base_that_is_spread_over_memory_and_disk_has_the_same_features(
    config: LanguageModelConfig, features: Features
) -> None:
    places = {f"transformer.{name}": "cpu" for name in ("wte", "wpe", "h.0")} | {"lm_head": "cpu"}
    places |= {f"transformer.{name}": "disk" for name in ("h.1", "ln_f")}
    spread = HiddenStates(replace(config, model=replace(config.model, device_map=places)))  # type: ignore[arg-type]
    whole = HiddenStates(config)
    for unit in units_of(features):
        for item in read_blocks(features, unit):
            assert spread(item).files == whole(item).files


def test_training_spreads_no_base(config: LanguageModelConfig, features: Features) -> None:
    base = refer_to_base(config)
    assert features_to_read(config, base, features.text, features.text) is None
    stored = replace(config, model=replace(config.model, device_map="auto", features=True))
    assert features_to_read(stored, base, features.text, features.text) == (features, features)
    with pytest.raises(ValueError, match=r"model\.device_map = auto spreads a base for jobs\.prepare_features only"):
        features_to_read(
            replace(config, model=replace(config.model, device_map="auto")), base, features.text, features.text
        )


def test_a_tempnet_trains_on_them_as_on_the_base(config: LanguageModelConfig, features: Features) -> None:
    """The base is given the same rounding: its hidden states are rounded to bfloat16 by a hook."""
    tokenizer = load_tokenizer(config.tokenizer)
    stored = StoredBase.load(Path(features.directory) / HEAD_FILE)
    with_features = replace(config, model=replace(config.model, features=True))
    module, base = build_model(with_features, tokenizer, stored), build_model(config, tokenizer)
    assert module.tempnet is not None
    assert base.tempnet is not None
    for ours, theirs in zip(module.tempnet.parameters(), base.tempnet.parameters(), strict=True):
        assert torch.equal(ours, theirs)  # the same seed gives the same network
    base.base.base_model.register_forward_hook(
        lambda _, __, output: (output[0].to(torch.bfloat16).float(), *output.to_tuple()[1:])
    )
    arrays = read_part(features, 0, rank=0, world_size=1)
    of_features = module(**to_tensors(arrays, CPU), with_statistics=True)
    blocks = read_range(features.text, 0, features.text.num_rows)
    of_base = base(**to_tensors(blocks, CPU), with_statistics=True)
    of_features["loss"].backward()
    of_base["loss"].backward()
    torch.testing.assert_close(of_features["loss"], of_base["loss"])
    torch.testing.assert_close(of_features["tau"], of_base["tau"])
    torch.testing.assert_close(of_features["statistics"], of_base["statistics"])
    for ours, theirs in zip(module.tempnet.parameters(), base.tempnet.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert flops_per_token(module, config) < flops_per_token(base, config)


def test_features_of_another_base_text_or_precision_are_not_found(
    config: LanguageModelConfig, features: Features
) -> None:
    base = refer_to_base(config)
    assert find_features(config, features.text, base, "train").directory == features.directory
    in_bf16 = replace(config, workers=replace(config.workers, precision="bf16"))
    for other in (
        in_bf16,
        replace(in_bf16, model=replace(config.model, precision="int8")),
        replace(config, data=replace(config.data, attend_across_documents=True)),
    ):
        with pytest.raises(FileNotFoundError, match=r"jobs\.prepare_features in the place of jobs\.train_lm"):
            find_features(other, features.text, base, "train")
    with pytest.raises(FileNotFoundError, match=r"hidden states of data\.train"):
        find_features(config, features.text, replace(base, digest="other"), "train")
    root = str(Path(features.directory).parent)
    assert features_directory(root, features.text, base="a") != features_directory(root, features.text, base="b")


def test_what_needs_the_base_is_refused(config: LanguageModelConfig) -> None:
    for fields, message in (
        ({"freeze": False}, "needs a frozen base"),
        ({"whole_export": True}, r"model\.whole_export must be False"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(config, model=replace(config.model, features=True, **fields))
