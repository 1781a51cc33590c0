"""Running an evaluation of sentence encoders: workers compute the unfinished cells, each one model on one task.

Frozen embeddings are judged by logistic regression without a hidden layer, SentEval's default (arXiv 1803.05449 §3). If a
task has test sentences, the regularisation is chosen on its development sentences, or by cross-validation on the training
sentences if it has none. Otherwise accuracy is the mean over cross-validation folds, and the regularisation is chosen anew
within every fold.

Shapes: n sentences, d size of the embedding.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import pearsonr, spearmanr
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_score

from jobs.engine.export import model_digest
from jobs.engine.fields import absolute_path, named_values
from jobs.engine.tracking import resolve_uri
from jobs.scoring.results import Column, Results, percent_table, publish_evaluation
from jobs.scoring.sentence_encoders.config import EvaluateSentencesConfig
from jobs.scoring.units import Finished, ModelSpec, UnitStore, holding_one, map_units, model_labels, unit_key
from jobs.tasks.base import naming_field
from pipelines.local_copy import check_source, local_copy
from pipelines.problems import TooManyProblemsError
from pipelines.sentences.senteval import (
    PROBING_FILES,
    Examples,
    Judgements,
    SentenceTask,
    read_judgements,
    read_senteval,
)
from pipelines.text.tokenization import load_tokenizer
from tempnet.fingerprints import files_digest
from tempnet.models.sentence_encoder import SentenceEncoder, num_positions, saved_num_tokens

# Increase this whenever the same input would give other figures.
_VERSION = 2
_MOST_TOKENS = 512
_DTYPES = {"fp32": None, "bf16": torch.bfloat16}
_TITLES = {
    "accuracy": "accuracy",
    "spearman": "Spearman",
    "pearson": "Pearson",
    "num_sentences": "sentences",
    "num_pairs": "pairs",
    "num_unreadable": "unreadable",
    "share_cut": "cut to the model's tokens",
    "mean_accuracy": "mean accuracy",
    "mean_probing": "mean accuracy of the probing tasks",
}
_GLOVE = "glove:"

Embed = Callable[[Sequence[str]], tuple[np.ndarray, int]]
"""Function that returns the embeddings (n, d) of n texts, and the number of texts that were cut."""


@dataclass(frozen=True, slots=True)
class WordVectors:
    """Word vectors; the embedding of a text is their mean, as in SentEval's example of a bag of words."""

    rows: Mapping[str, int]
    vectors: np.ndarray
    """Vectors of all words: (V, d) float32."""

    @classmethod
    def read(cls, path: str, *, num_lines: int | None = None) -> WordVectors:
        """Read a text file as GloVe's, or its first lines: a word (which may hold spaces) and d numbers, by spaces.

        A first line of two numbers, as word2vec writes it, is passed over. The first of equal words counts.
        """
        words, vectors, size = dict[str, int](), list[np.ndarray](), 0
        with Path(path).open("rb") as file:
            for number, line in enumerate(itertools.islice(file, num_lines), start=1):
                if number == 1 and len(line.split()) == 2:
                    continue
                if (size := size or len(line.split()) - 1) < 1:
                    break
                word, *values = line.rstrip().rsplit(b" ", size)
                try:
                    vectors.append(np.array(values, dtype=np.float32).reshape(size))
                except ValueError:
                    raise ValueError(
                        f"{path}:{number} has no word with {size} numbers, as the lines before it"
                    ) from None
                words.setdefault(word.decode("utf-8", "replace"), len(vectors) - 1)
        if not vectors:
            raise ValueError(f"{path} holds no word vectors: lines of a word and its numbers, separated by spaces")
        if not np.isfinite(table := np.stack(vectors)).all():
            raise ValueError(f"{path} holds numbers that are not finite")
        return cls(words, table)

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Returns the mean vectors (n, d) of the words between spaces, which are also looked up in lower case.

        A text without any known word has the vector of the full stop, or else 0.
        """
        found = np.zeros((len(texts), self.vectors.shape[1]), dtype=np.float32)
        for place, text in enumerate(texts):
            rows = [self.rows.get(word, self.rows.get(word.lower())) for word in text.split()]
            known = [row for row in rows if row is not None] or ([self.rows["."]] if "." in self.rows else [])
            if known:
                found[place] = self.vectors[known].mean(0)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceEncoderSpec(ModelSpec):
    num_tokens: int
    """Maximum number of tokens per sentence; longer sentences are cut. 0 for word vectors."""

    @classmethod
    def read(cls, label: str, path: str, config: EvaluateSentencesConfig) -> SentenceEncoderSpec:
        """Returns the description of an encoder, loaded once to check that it can be (of vectors, the first lines)."""
        file = path.removeprefix(_GLOVE)
        try:
            check_source(place := local_copy(file))
            if file != path:
                WordVectors.read(place, num_lines=100)
                digest = files_digest([Path(place)])
                return cls(label=label, path=_GLOVE + absolute_path(file), digest=digest, num_tokens=0)
            encoder = SentenceEncoder.from_pretrained(place).encoder
            load_tokenizer(path, needs_eos=False)
        except (OSError, ValueError) as error:
            raise ValueError(f"models: {error}") from error
        most = num_positions(encoder.config) or _MOST_TOKENS
        if config.num_tokens > most:
            raise ValueError(f"num_tokens = {config.num_tokens} is more than the {most} positions of {path!r}")
        return cls(
            label=label,
            path=absolute_path(path),
            digest=model_digest(path),
            num_tokens=config.num_tokens or saved_num_tokens(place) or min(most, _MOST_TOKENS),
        )


class Cell(NamedTuple):
    """One model on one task or one set of similarity judgements."""

    model: SentenceEncoderSpec
    data: SentenceTask | Judgements
    key: str

    @property
    def title(self) -> str:
        return f"{self.model.label} · {self.data.name}"

    @property
    def file(self) -> str:
        return f"{self.key}.json"


def cells(
    config: EvaluateSentencesConfig, models: Sequence[SentenceEncoderSpec], data: Sequence[SentenceTask | Judgements]
) -> list[Cell]:
    found = []
    for model, one in itertools.product(models, data):
        options = {"precision": config.precision} | (_folds(config) if isinstance(one, SentenceTask) else {})
        found.append(Cell(model, one, unit_key([_VERSION, model.digest, model.num_tokens, options, one.digest])))
    return found


def _folds(config: EvaluateSentencesConfig) -> dict[str, int]:
    return {"num_folds": config.num_folds, "num_inner_folds": config.num_inner_folds, "seed": config.seed}


class CellComputer:
    """Computes the figures of cells in a worker, which holds one model at a time."""

    def __init__(self, config: EvaluateSentencesConfig) -> None:
        self._config = config
        self._encoder = holding_one(self._load)

    def __call__(self, cell: Cell) -> Finished:
        """Compute accuracy or correlations, the number of sentences or pairs, and the share of texts that were cut."""
        data, embed, num_seen = cell.data, self._encoder(cell.model), np.zeros(2, dtype=int)
        is_snli = data.name == "SNLI"

        def encode(texts: Sequence[str]) -> np.ndarray:
            rows, num_cut = embed(texts)
            num_seen[:] += len(texts), num_cut
            return rows

        def labelled(examples: Examples) -> Labelled:
            features = encode(examples.first)
            if examples.second is not None:
                features = pair_features(features, encode(examples.second), with_both=is_snli)
            return Labelled(features, examples.labels)

        figures: dict[str, float]
        if isinstance(data, Judgements):
            num_cases = len(data.first)
            figures = similarity_figures(encode(data.first), encode(data.second), data.scores, data.sizes)
            figures["num_pairs"] = num_cases
        else:
            num_cases = data.num_lines
            parts = {name: labelled(part) for name, part in data.parts.items()}
            accuracy = transfer_accuracy(parts, **_folds(self._config), is_regularised=not is_snli)
            figures = {"accuracy": accuracy, "num_sentences": sum(map(len, data.parts.values()))}
        figures["share_cut"] = float(num_seen[1] / num_seen[0])
        return Finished(files={cell.file: figures}, num_cases=num_cases)

    def _load(self, spec: SentenceEncoderSpec) -> Embed:
        if spec.path.startswith(_GLOVE):
            vectors = WordVectors.read(local_copy(spec.path.removeprefix(_GLOVE)))
            return lambda texts: (vectors.embed(texts), 0)
        config, tokenizer = self._config, load_tokenizer(spec.path, needs_eos=False)
        model = SentenceEncoder.from_pretrained(local_copy(spec.path), autocast_dtype=_DTYPES[config.precision])
        model.to("cuda" if config.workers.use_gpu else "cpu")

        def embed(texts: Sequence[str]) -> tuple[np.ndarray, int]:
            lengths = [len(row) for row in tokenizer(list(texts), verbose=False)["input_ids"]]
            rows = model.encode(texts, tokenizer, num_tokens=spec.num_tokens, batch_size=config.batch_size)
            return rows.numpy(), sum(length > spec.num_tokens for length in lengths)

        return embed


def evaluate(config: EvaluateSentencesConfig) -> Results:
    """Run or continue an evaluation, write `results.md` and `results.json`, and return the figures."""
    uri = resolve_uri(config.tracking, config.run.resolved_storage)
    data = read_data(config)
    labels = model_labels(config.models)
    models = [SentenceEncoderSpec.read(label, path, config) for label, path in zip(labels, config.models, strict=True)]
    all_cells = cells(config, models, data)
    store = UnitStore(f"{config.run.directory}/cells")
    failed = map_units(
        store.missing(all_cells), partial(CellComputer, config), config.workers, store, noun="lines"
    ).failed
    columns = [Column.of_model(model) for model in models]
    for column, model in zip(columns, models, strict=True):
        for cell in all_cells:
            if cell.model == model:
                figures = store.read_json(cell.file) or {}
                column.metrics.update({f"{cell.data.name}/{name}": value for name, value in figures.items()})
        column.metrics.update({f"{data_set.name}/num_unreadable": sum(data_set.problems.values()) for data_set in data})
    identity = [cell.key for cell in all_cells]
    table = sentence_table(columns)
    return publish_evaluation(config, uri=uri, columns=columns, table=table, identity=identity, failed=failed)


def sentence_table(columns: Sequence[Column]) -> str:
    """Returns the table; its last rows are mean accuracies, unless a column lacks an accuracy that another one has."""
    names = {name for column in columns for name in column.metrics if name.endswith("/accuracy")}
    if all(names <= column.metrics.keys() for column in columns):
        columns = [
            dataclasses.replace(column, metrics={**column.metrics, **mean_accuracies(column)}) for column in columns
        ]
    return percent_table(columns, _TITLES, hidden_if_zero=("num_unreadable", "share_cut"))


def mean_accuracies(column: Column) -> dict[str, float]:
    """Returns the mean accuracy, from 0 to 1, over the probing tasks and over the others, where there are any."""
    found: dict[str, list[float]] = {}
    for name, value in column.metrics.items():
        task, _, figure = name.rpartition("/")
        if figure == "accuracy":
            found.setdefault("mean_probing" if task in PROBING_FILES else "mean_accuracy", []).append(value)
    return {name: statistics.fmean(found[name]) for name in ("mean_accuracy", "mean_probing") if name in found}


def read_data(config: EvaluateSentencesConfig) -> list[SentenceTask | Judgements]:
    with naming_field("data: "):
        data: list[SentenceTask | Judgements] = [read_senteval(config.data, name) for name in config.present_tasks]
    with naming_field("similarity: "):
        data += [read_judgements(file, name) for name, file in named_values("similarity", config.similarity).items()]
    for data_set in data:
        if isinstance(data_set, SentenceTask):
            check_folds(data_set, config)
        if (lost := sum(data_set.problems.values())) > config.max_bad_share * data_set.num_lines:
            raise TooManyProblemsError(
                f"{data_set.name}: {lost} of {data_set.num_lines} lines cannot be read, more than max_bad_share = "
                f"{config.max_bad_share:.2%}; the first: {'; '.join(data_set.examples)}"
            )
    return data


def check_folds(task: SentenceTask, config: EvaluateSentencesConfig) -> None:
    name, number = "num_inner_folds", config.num_inner_folds
    smallest = int(np.bincount(task.parts["train" if task.has_split else "all"].labels).min())
    if not task.has_split:
        if config.num_folds > smallest:
            name, number = "num_folds", config.num_folds
        else:
            # the sentences of the class that remain when one fold is held out
            smallest -= -(-smallest // config.num_folds)
    elif "dev" in task.parts:
        return
    if number > smallest:
        raise ValueError(
            f"{name} = {number}: a class of {task.name} has {smallest} sentences to divide; choose fewer folds"
        )


# SentEval's grid of inverse regularisation strengths.
INVERSE_STRENGTHS = [2.0**power for power in range(-2, 4)]
_UNREGULARISED = 1e9


class Labelled(NamedTuple):
    features: np.ndarray
    """(n, d)."""
    labels: np.ndarray
    """(n,) classes."""


def pair_features(first: np.ndarray, second: np.ndarray, *, with_both: bool = False) -> np.ndarray:
    """Returns the features (n, 2d) of sentence pairs: |u − v| and u·v, element by element; (n, 4d) with u and v too."""
    both = [first, second] if with_both else []
    return np.concatenate([*both, np.abs(first - second), first * second], axis=1)


def transfer_accuracy(
    parts: Mapping[str, Labelled], *, num_folds: int, num_inner_folds: int, seed: int, is_regularised: bool = True
) -> float:
    """Returns the accuracy of a logistic regression, from 0 to 1.

    The parts are `train`, `test` and optionally `dev`; or only `all`, which is cross-validated. Unless `is_regularised`,
    there is next to no regularisation, as of SNLI in SentEval. Of equally good regularisations the strongest is chosen.
    """

    def folds(number: int) -> StratifiedKFold:
        return StratifiedKFold(number, shuffle=True, random_state=seed)

    def regression(strength: float = 1.0) -> LogisticRegression:
        return LogisticRegression(C=strength, max_iter=1000)

    grid, inner = {"C": INVERSE_STRENGTHS}, folds(num_inner_folds)
    chosen = GridSearchCV(regression(), grid, cv=inner, error_score="raise")
    if "all" in parts:
        return float(cross_val_score(chosen, *parts["all"], cv=folds(num_folds), error_score="raise").mean())
    if not is_regularised:
        chosen = regression(_UNREGULARISED)
    elif "dev" in parts:
        fitted = [regression(strength).fit(*parts["train"]) for strength in INVERSE_STRENGTHS]
        return float(max(fitted, key=lambda model: model.score(*parts["dev"])).score(*parts["test"]))
    return float(chosen.fit(*parts["train"]).score(*parts["test"]))


def similarity_figures(
    first: np.ndarray, second: np.ndarray, scores: np.ndarray, sizes: Sequence[int] = ()
) -> dict[str, float]:
    """Returns Spearman's and Pearson's correlation of the cosines of embeddings (n, d) with the judgements (n,).

    Of several data sets with `sizes` of pairs, which follow each other, it is the mean (SentEval's `all`, `mean`).
    """
    norms = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    cosines = (first * second).sum(1) / np.maximum(norms, 1e-12)
    ends = np.cumsum(sizes)[:-1].astype(int)
    sets = list(zip(np.split(cosines, ends), np.split(scores, ends), strict=True))
    return {
        "spearman": float(np.mean([spearmanr(*pair)[0] for pair in sets])),
        "pearson": float(np.mean([pearsonr(*pair)[0] for pair in sets])),
    }
