"""Tests evaluation of sentence encoders: the protocol against a plain transcription, files, refusals and results."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_score
from transformers import AutoConfig, AutoModel

from jobs.scoring.results import Column
from jobs.scoring.sentence_encoders.cells import CellComputer, SentenceEncoderSpec, cells
from jobs.scoring.sentence_encoders.config import EvaluateSentencesConfig
from jobs.scoring.sentence_encoders.launch import read_data, sentence_table
from jobs.scoring.sentence_encoders.transfer import (
    INVERSE_STRENGTHS,
    Labelled,
    pair_features,
    similarity_figures,
    transfer_accuracy,
)
from pipelines.problems import TooManyProblemsError
from pipelines.sentences.senteval import read_judgements, read_task
from pipelines.text.tokenization import train_wordpiece
from tempnet.models.sentence_encoder import SentenceEncoder

WORDS = ("good", "bad", "film", "plot", "dull", "fine", "slow", "sharp")


def clouds(num: int, num_classes: int, seed: int = 0) -> Labelled:
    rng = np.random.default_rng(seed)
    labels = np.arange(num) % num_classes
    return Labelled(rng.normal(size=(num, 6)) + 0.6 * np.eye(6)[labels], labels)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns the directory of a random BERT that takes 12 tokens."""
    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    tokenizer = train_wordpiece([" ".join(WORDS)], 150)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    sizes |= {"max_position_embeddings": 12}
    config = AutoConfig.for_model("bert", vocab_size=len(tokenizer), initializer_range=0.4, **sizes)
    SentenceEncoder(AutoModel.from_config(config)).save_pretrained(directory, tokenizer, num_tokens=12)
    return str(directory)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a directory with MR (40 sentences with their class as a word), CR with a bad line, and scored pairs."""
    directory = tmp_path_factory.mktemp("senteval")
    rng = np.random.default_rng(0)

    def lines(word: str) -> str:
        return "".join(f"{word} {' '.join(rng.choice(WORDS[2:], size=rng.integers(1, 20)))}\n" for _ in range(20))

    for folder, names in (("MR", ("rt-polarity.neg", "rt-polarity.pos")), ("CR", ("custrev.neg", "custrev.pos"))):
        (directory / folder).mkdir()
        for name, word in zip(names, ("bad", "good"), strict=True):
            (directory / folder / name).write_text(lines(word))
    with (directory / "CR" / "custrev.pos").open("a") as file:
        file.write("  \n")
    (directory / "sts.tsv").write_text(
        "5.0\tgood film\tfine film\n\tno\tscore\n0.5\tdull plot\tgood\n2\tslow\tslow plot\n"
    )
    return directory


def test_cross_validation_is_nested_and_equals_a_plain_transcription() -> None:
    cloud = clouds(120, 3)
    found = transfer_accuracy({"all": cloud}, num_folds=4, num_inner_folds=3, seed=5)
    folds = [StratifiedKFold(number, shuffle=True, random_state=5) for number in (3, 4)]
    chosen = GridSearchCV(LogisticRegression(max_iter=1000), {"C": list(INVERSE_STRENGTHS)}, cv=folds[0])
    expected = cross_val_score(chosen, cloud.features, cloud.labels, cv=folds[1])
    assert found == pytest.approx(expected.mean(), abs=1e-12)


def test_a_given_split_chooses_on_its_development_sentences_or_within_the_training_ones() -> None:
    train, dev, test = (clouds(90, 3, seed) for seed in (0, 1, 2))

    def accuracy(strength: float, on: Labelled) -> float:
        return (
            LogisticRegression(C=strength, max_iter=1000)
            .fit(train.features, train.labels)
            .score(on.features, on.labels)
        )

    best = max(INVERSE_STRENGTHS, key=lambda strength: accuracy(strength, dev))
    options = {"num_folds": 9, "num_inner_folds": 3, "seed": 5}
    assert transfer_accuracy({"train": train, "dev": dev, "test": test}, **options) == accuracy(best, test)
    search = GridSearchCV(
        LogisticRegression(max_iter=1000),
        {"C": list(INVERSE_STRENGTHS)},
        cv=StratifiedKFold(3, shuffle=True, random_state=5),
    ).fit(train.features, train.labels)
    assert transfer_accuracy({"train": train, "test": test}, **options) == search.score(test.features, test.labels)


def test_more_folds_than_sentences_of_a_class_are_refused() -> None:
    with pytest.raises(ValueError, match="4 folds need as many sentences of every class, and one has 3"):
        transfer_accuracy({"all": clouds(6, 2)}, num_folds=4, num_inner_folds=2, seed=0)


def test_pairs_are_compared_element_by_element() -> None:
    first, second = np.array([[1.0, -2.0]]), np.array([[3.0, 1.0]])
    assert pair_features(first, second).tolist() == [[2.0, 3.0, 3.0, -2.0]]
    rng = np.random.default_rng(0)
    directions = rng.normal(size=(30, 4))
    angles = rng.uniform(0.1, 3.0, size=30)
    other = rng.normal(size=(30, 4))
    other -= (other * directions).sum(1, keepdims=True) / (directions**2).sum(1, keepdims=True) * directions
    unit = directions / np.linalg.norm(directions, axis=1, keepdims=True)
    turned = np.cos(angles)[:, None] * unit + np.sin(angles)[:, None] * other / np.linalg.norm(
        other, axis=1, keepdims=True
    )
    figures = similarity_figures(directions, 7.0 * turned, np.cos(angles))
    assert figures["spearman"] == pytest.approx(1.0)
    assert figures["pearson"] == pytest.approx(1.0)


def test_judgements_are_read_in_both_forms(data: Path, tmp_path: Path) -> None:
    plain = read_judgements(data / "sts.tsv", "sts")
    assert (plain.first, plain.second) == (["good film", "dull plot", "slow"], ["fine film", "good", "slow plot"])
    assert plain.scores.tolist() == [5.0, 0.5, 2.0]
    assert not plain.problems
    benchmark = tmp_path / "sts-test.csv"
    benchmark.write_text(
        "".join(f"main\tnews\t2012\t{at}\t{at}.5\tone {at}\tother {at}\textra\n" for at in range(3)) + "bad\n"
    )
    found = read_judgements(benchmark, "sts")
    assert found.scores.tolist() == [0.5, 1.5, 2.5]
    assert found.second == ["other 0", "other 1", "other 2"]
    assert found.problems == {"missing_field": 1}
    benchmark.write_text("1\ta\tb\n")
    with pytest.raises(ValueError, match="holds 1 pairs of sentences with a score: a correlation needs 3 or more"):
        read_judgements(benchmark, "sts")


def test_encoding_does_not_depend_on_batches_and_cuts_long_sentences(model: str, data: Path) -> None:
    from pipelines.text.tokenization import load_tokenizer

    encoder, tokenizer = SentenceEncoder.from_pretrained(model), load_tokenizer(model, needs_eos=False)
    texts = read_task(data, "MR").parts["all"].first
    rows = encoder.encode(texts, tokenizer, num_tokens=12, batch_size=7)
    assert encoder.training
    encoder.eval()
    for text, row in zip(texts, rows, strict=True):
        tokens = tokenizer(text, truncation=True, max_length=12, return_tensors="pt")
        with torch.no_grad():
            alone = encoder(tokens["input_ids"], tokens["attention_mask"])[0]
        torch.testing.assert_close(row, alone, rtol=1e-5, atol=1e-6)
    assert tokenizer.model_max_length == 12  # This number was given to `save_pretrained`.
    assert encoder.encode([], tokenizer).shape == (0, 16)


def test_a_cell_is_known_by_what_decides_its_figures(model: str, data: Path) -> None:
    config = EvaluateSentencesConfig(
        models=(model,), data=str(data), similarity=(f"sts={data / 'sts.tsv'}",), num_folds=4
    )
    specs = [SentenceEncoderSpec.read("m", model, config)]
    assert specs[0].num_tokens == 12
    found = cells(config, specs, read_data(EvaluateSentencesConfig(**{**_fields(config), "max_bad_share": 0.5})))
    assert [cell.data.name for cell in found] == ["MR", "CR", "sts"]
    assert len({cell.key for cell in found}) == 3
    other = EvaluateSentencesConfig(**{**_fields(config), "seed": 1, "max_bad_share": 0.5})
    changed = [cell.key for cell in cells(other, specs, read_data(other))]
    assert [new == cell.key for new, cell in zip(changed, found, strict=True)] == [False, False, True]
    figures = CellComputer(config)(found[0])
    assert figures["num_sentences"] == 40
    assert figures["accuracy"] > 0.7  # The class is a word of the sentence.
    # Every word is one token, and a sentence has two special tokens more.
    sentences = [line.split() for file in (data / "MR").iterdir() for line in file.read_text().splitlines()]
    assert 0 < figures["share_cut"] == sum(len(words) + 2 > 12 for words in sentences) / 40 < 1
    smaller_batches = dataclasses.replace(config, batch_size=3)
    assert CellComputer(smaller_batches)(found[0]) == figures
    assert CellComputer(config)(found[2])["num_pairs"] == 3


def _fields(config: EvaluateSentencesConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"models": ()}, "models is empty"),
        ({"models": ("a", "a/")}, "models names 'a' twice"),
        ({}, "nothing to evaluate on"),
        ({"data": "x", "tasks": ("STS",)}, "tasks: 'STS' is unknown: choose one of MR"),
        ({"data": "x", "tasks": ("MR",), "similarity": ("MR=f",)}, "tasks and similarity name 'MR' twice"),
        ({"data": "x", "num_folds": 1}, "num_folds = 1 must be at least 2"),
        ({"similarity": ("file",)}, "similarity: 'file' is not NAME=VALUE"),
    ],
)
def test_wrong_configurations_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EvaluateSentencesConfig(**{"models": ("a",), **options})


def test_what_is_wrong_with_the_data_is_said(model: str, data: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is no directory"):
        read_data(EvaluateSentencesConfig(models=(model,), data=str(tmp_path / "nothing")))
    with pytest.raises(FileNotFoundError, match="holds no folder of MR, CR"):
        read_data(EvaluateSentencesConfig(models=(model,), data=str(tmp_path)))
    with pytest.raises(
        TooManyProblemsError, match=r"CR: 1 of 41 lines cannot be read.*custrev\.pos:21 \(empty_sentence"
    ):
        read_data(EvaluateSentencesConfig(models=(model,), data=str(data)))
    with pytest.raises(ValueError, match=r"models: .* holds no Transformers model"):
        SentenceEncoderSpec.read("m", str(tmp_path), EvaluateSentencesConfig(models=(str(tmp_path),), data=str(data)))
    with pytest.raises(ValueError, match="num_tokens = 13 is more than the 12 positions"):
        SentenceEncoderSpec.read("m", model, EvaluateSentencesConfig(models=(model,), data=str(data), num_tokens=13))


def test_more_folds_than_sentences_are_refused_before_anything_starts(model: str, data: Path) -> None:
    options = {"models": (model,), "data": str(data), "tasks": ("MR",)}
    read_data(EvaluateSentencesConfig(**options, num_folds=20, num_inner_folds=19))
    for changes, message in (
        ({"num_folds": 21}, "num_folds = 21: a class of MR has 20 sentences"),
        ({"num_folds": 10, "num_inner_folds": 19}, "num_inner_folds = 19: a class of MR has 18 sentences"),
    ):
        with pytest.raises(ValueError, match=message):
            read_data(EvaluateSentencesConfig(**options, **changes))


def test_the_table_has_a_mean_over_the_tasks(model: str, data: Path) -> None:
    spec = SentenceEncoderSpec.read("small", model, EvaluateSentencesConfig(models=(model,), data=str(data)))
    metrics = {
        "MR/accuracy": 0.7,
        "MR/num_sentences": 1234,
        "CR/accuracy": 0.8,
        "MR/num_unreadable": 0,
        "sts/spearman": 0.5,
        "MR/share_cut": 0.125,
        "CR/share_cut": 0.0,
    }
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in sentence_table([dataclasses.replace(Column.of_model(spec), metrics=metrics)]).splitlines()
    ]
    assert [row for row in rows if not row[0].startswith(":")] == [
        ["%", "small"],
        ["MR accuracy", "70.00"],
        ["MR sentences", "1,234"],
        ["CR accuracy", "80.00"],
        ["sts Spearman", "50.00"],
        ["MR cut to the model's tokens", "12.50"],
        ["mean accuracy", "75.00"],
    ]
    # A model whose cell failed has a gap. A mean over fewer tasks would look like one over all, so none is shown.
    gap = Column(title="gap", parameters={}, metrics={"CR/accuracy": 0.9})
    table = sentence_table([dataclasses.replace(Column.of_model(spec), metrics=metrics), gap])
    assert "| MR accuracy | 70.00 | – |" in " ".join(table.split())
    assert "mean accuracy" not in table
