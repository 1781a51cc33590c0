"""Tests evaluation of sentence encoders: the protocol against a plain transcription, files, refusals and results."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from transformers import AutoConfig, AutoModel

from jobs.scoring.results import Column
from jobs.scoring.sentence_encoders.config import EvaluateSentencesConfig
from jobs.scoring.sentence_encoders.evaluate import (
    INVERSE_STRENGTHS,
    CellComputer,
    Labelled,
    SentenceEncoderSpec,
    WordVectors,
    cells,
    pair_features,
    read_data,
    sentence_table,
    similarity_figures,
    transfer_accuracy,
)
from pipelines.problems import TooManyProblemsError
from pipelines.sentences.senteval import JUDGEMENT_FILES, read_judgements, read_senteval
from pipelines.text.tokenization import train_wordpiece
from tempnet.models.sentence_encoder import SentenceEncoder

WORDS = ("good", "bad", "film", "plot", "dull", "fine", "slow", "sharp")


def clouds(num: int, num_classes: int, seed: int = 0) -> Labelled:
    rng = np.random.default_rng(seed)
    labels = np.arange(num) % num_classes
    return Labelled(rng.normal(size=(num, 6)) + 0.6 * np.eye(6)[labels], labels)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
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


def score(train: Labelled, on: Labelled, strength: float) -> float:
    return float(LogisticRegression(C=strength, max_iter=1000).fit(*train).score(*on))


def folds(data: Labelled, number: int) -> list[list[Labelled]]:
    splits = StratifiedKFold(number, shuffle=True, random_state=5).split(*data)
    return [[Labelled(data.features[rows], data.labels[rows]) for rows in split] for split in splits]


def chosen(data: Labelled) -> float:
    return max(INVERSE_STRENGTHS, key=lambda strength: np.mean([score(*parts, strength) for parts in folds(data, 3)]))


def test_regularisation_is_chosen_within_the_folds_of_the_training_sentences_or_on_the_development_ones() -> None:
    options = {"num_folds": 4, "num_inner_folds": 3, "seed": 5}
    cloud = clouds(120, 3)
    expected = np.mean([score(inside, outside, chosen(inside)) for inside, outside in folds(cloud, 4)])
    assert transfer_accuracy({"all": cloud}, **options) == pytest.approx(expected, abs=1e-12)
    train, dev, test = (clouds(90, 3, seed) for seed in (0, 1, 2))
    best = max(INVERSE_STRENGTHS, key=lambda strength: score(train, dev, strength))
    parts = {"train": train, "dev": dev, "test": test}
    assert transfer_accuracy(parts, **options) == score(train, test, best)
    assert transfer_accuracy(parts, **options, is_regularised=False) == score(train, test, 1e9)
    del parts["dev"]
    assert transfer_accuracy(parts, **options) == score(train, test, chosen(train))


def test_pairs_are_compared_element_by_element_and_by_their_cosine() -> None:
    first, second = np.array([[1.0, -2.0]]), np.array([[3.0, 1.0]])
    assert pair_features(first, second).tolist() == [[2.0, 3.0, 3.0, -2.0]]
    assert pair_features(first, second, with_both=True).tolist() == [[1.0, -2.0, 3.0, 1.0, 2.0, 3.0, 3.0, -2.0]]
    first, second = np.random.default_rng(0).normal(size=(2, 30, 4))
    cosines = (first * second).sum(1) / np.linalg.norm(first, axis=1) / np.linalg.norm(second, axis=1)
    figures = similarity_figures(first, 7.0 * second, 2.0 * cosines + 1.0)
    assert figures["spearman"] == pytest.approx(1.0)
    assert figures["pearson"] == pytest.approx(1.0)


def test_judgements_are_read_in_both_forms(data: Path, tmp_path: Path) -> None:
    plain = read_judgements(data / "sts.tsv", "sts")
    assert (plain.first, plain.second) == (["good film", "dull plot", "slow"], ["fine film", "good", "slow plot"])
    assert plain.scores.tolist() == [5.0, 0.5, 2.0]
    assert not plain.problems
    file = tmp_path / "sts-test.csv"
    file.write_text("".join(f"main\tnews\t2012\t{i}\t{i}.5\tone {i}\tother {i}\textra\n" for i in range(3)) + "bad\n")
    found = read_judgements(file, "sts")
    assert (found.scores.tolist(), found.second) == ([0.5, 1.5, 2.5], ["other 0", "other 1", "other 2"])
    assert found.problems == {"missing_field": 1}
    head = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
    lines = [f"{i}\tnews\tMSRvid\t2012\t{i}\tone.txt\tother.txt\tone {i}\tother {i}\t{i}.5\n" for i in range(6)]
    file.write_text(head + "".join(lines))
    found = read_judgements(file, "sts")  # as GLUE has it; a score is at most 5
    assert (found.scores.tolist(), found.first[0], found.second[0]) == ([0.5, 1.5, 2.5, 3.5, 4.5], "one 0", "other 0")
    assert found.problems == {"missing_field": 1}
    file.write_text("".join(f"{score}\ta\tb\n" for score in (1, "nan", 2, "inf", 3)))
    found = read_judgements(file, "sts")  # no number has a rank among the others
    assert (found.scores.tolist(), found.problems) == ([1.0, 2.0, 3.0], {"missing_field": 2})
    file.write_text("1\ta\tb\n")
    with pytest.raises(ValueError, match="holds 1 pairs of sentences with a score: a correlation needs 3 or more"):
        read_judgements(file, "sts")


def test_sts_is_the_mean_over_its_data_sets(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for size, (scores, pairs) in zip((4, 6, 8), JUDGEMENT_FILES["STS13"], strict=True):
        (tmp_path / pairs).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / scores).write_text("".join(f"{n % 5}\n" if n else "\n" for n in range(size)))
        (tmp_path / pairs).write_text("".join(f"one {n}\ttwo {n}\n" for n in range(size)))
    data = read_senteval(tmp_path, "STS13")
    assert data.sizes == (3, 5, 7)  # The first pair of each has no score.
    assert (data.first[3], data.second[3], data.scores[3]) == ("one 1", "two 1", 1.0)
    first, second = rng.normal(size=(2, 15, 4))
    cosines = (first * second).sum(1) / np.linalg.norm(first, axis=1) / np.linalg.norm(second, axis=1)
    wanted = [spearmanr(cosines[part], data.scores[part])[0] for part in (slice(3), slice(3, 8), slice(8, 15))]
    assert similarity_figures(first, second, data.scores, data.sizes)["spearman"] == pytest.approx(np.mean(wanted))


def test_word_vectors_are_averaged_and_a_damaged_line_is_named(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "glove.txt"
    path.write_text("3 2\nGood 9 9\ngood 1 2\n. . . 5 6\nbad -1 0.5\n. 0 1\n")
    vectors = WordVectors.read(str(path))
    assert vectors.embed(["good BAD unknown", "Good", "none", "?"]).tolist() == [[0, 1.25], [9, 9], [0, 1], [0, 1]]
    config = EvaluateSentencesConfig(models=(f"glove:{path}",), data=str(data), tasks=("MR",), num_folds=4)
    spec = SentenceEncoderSpec.read("glove", config.models[0], config)
    (cell,) = cells(config, [spec], read_data(config))
    assert CellComputer(config)(cell).files[cell.file]["accuracy"] == 1.0  # The class is a word of the sentence.
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no word vectors"):
        WordVectors.read(str(path))
    path.write_text("good 1 2\nbad 1\n")
    with pytest.raises(ValueError, match=r"models: .*glove\.txt:2 has no word with 2 numbers"):
        SentenceEncoderSpec.read("glove", config.models[0], config)


def test_a_cell_is_known_by_what_decides_its_figures(model: str, data: Path) -> None:
    similarity = (f"sts={data / 'sts.tsv'}",)
    config = EvaluateSentencesConfig(
        models=(model,), data=str(data), similarity=similarity, num_folds=4, max_bad_share=0.5
    )
    specs = [SentenceEncoderSpec.read("m", model, config)]
    assert specs[0].num_tokens == 12
    found = cells(config, specs, read_data(config))
    assert [cell.data.name for cell in found] == ["MR", "CR", "sts"]
    assert len({cell.key for cell in found}) == 3
    other = dataclasses.replace(config, seed=1)
    changed = [cell.key for cell in cells(other, specs, read_data(other))]
    assert [new == cell.key for new, cell in zip(changed, found, strict=True)] == [False, False, True]
    figures = CellComputer(config)(found[0]).files[found[0].file]
    assert figures["num_sentences"] == 40
    assert figures["accuracy"] > 0.7  # The class is a word of the sentence.
    # Every word is one token, and a sentence has two special tokens more.
    sentences = [line.split() for file in (data / "MR").iterdir() for line in file.read_text().splitlines()]
    assert 0 < figures["share_cut"] == sum(len(words) + 2 > 12 for words in sentences) / 40 < 1
    assert CellComputer(dataclasses.replace(config, batch_size=3))(found[0]).files == {found[0].file: figures}
    assert CellComputer(config)(found[2]).num_cases == 3


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
    with pytest.raises(ValueError, match="tasks and similarity name 'MR' twice"):  # MR is found in the directory
        read_data(EvaluateSentencesConfig(models=(model,), data=str(data), similarity=(f"MR={data / 'sts.tsv'}",)))
    options = {"models": (model,), "data": str(data), "tasks": ("MR",)}
    with pytest.raises(ValueError, match="num_folds = 21: a class of MR has 20 sentences"):
        read_data(EvaluateSentencesConfig(**options, num_folds=21))
    with pytest.raises(ValueError, match="num_inner_folds = 19: a class of MR has 18 sentences"):
        read_data(EvaluateSentencesConfig(**options, num_folds=10, num_inner_folds=19))
    with pytest.raises(ValueError, match="num_tokens = 13 is more than the 12 positions"):
        SentenceEncoderSpec.read("m", model, EvaluateSentencesConfig(models=(model,), data=str(data), num_tokens=13))


def test_the_table_has_a_mean_over_the_tasks_that_every_model_has() -> None:
    metrics = {"MR/accuracy": 0.7, "MR/num_sentences": 1234, "CR/accuracy": 0.8, "MR/num_unreadable": 0}
    metrics |= {"sts/spearman": 0.5, "MR/share_cut": 0.125, "CR/share_cut": 0.0, "Depth/accuracy": 0.3}
    small = Column(title="small", parameters={}, metrics=metrics)
    text = " ".join(sentence_table([small]).split())
    shown = {"MR accuracy": "70.00", "MR sentences": "1,234", "sts Spearman": "50.00", "mean accuracy": "75.00"}
    shown |= {"mean accuracy of the probing tasks": "30.00"}
    assert all(f"| {name} | {value} |" in text for name, value in shown.items()), text
    # A model whose cell failed has a gap. A mean over fewer tasks would look like one over all, so none is shown.
    table = sentence_table([small, Column(title="gap", parameters={}, metrics={"CR/accuracy": 0.9})])
    assert "| MR accuracy | 70.00 | – |" in " ".join(table.split())
    assert "mean accuracy" not in table
