"""Labelled sentences in folds, and the module to train on them: a Transformers classifier, and SoftTriple's centres."""

from __future__ import annotations

import numpy as np
from sklearn.model_selection import StratifiedKFold
from sklearn.utils import resample
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from jobs.tasks import base
from jobs.tasks.base import autocast_dtype, naming_field
from jobs.tasks.classifier.config import ClassifierConfig, LabelledSection, soft_triple_config
from pipelines.problems import TooManyProblemsError
from pipelines.sentences.senteval import Examples, LabelledSource, SentenceTask, read_labelled, read_task
from pipelines.text.tokenization import load_tokenizer
from tempnet.contrastive.state import World
from tempnet.models.sentence_encoder import num_positions
from tempnet.models.triple_entropy_classifier import TripleEntropyClassifier
from tempnet.soft_triple import SoftTriple


def read_data(data: LabelledSection, name: str) -> tuple[SentenceTask, Examples]:
    """Read a task and return it with those of its sentences that are to be divided into folds."""
    field = "data.file" if data.file else "data.directory"
    with naming_field(f"{field}: "):
        task = read_labelled(data.file, data.classes) if data.file else read_task(data.directory, name)
    if (lost := sum(task.problems.values())) > data.max_bad_share * task.num_lines:
        raise TooManyProblemsError(
            f"{task.name}: {lost} of {task.num_lines} lines cannot be read, more than data.max_bad_share = "
            f"{data.max_bad_share:.2%}; the first: {'; '.join(task.examples)}"
        )
    whole = task.parts["train" if task.has_split else "all"]
    if not data.num_examples:
        return task, whole
    if data.num_examples > len(whole):
        raise ValueError(
            f"data.num_examples = {data.num_examples} is more than the {len(whole)} sentences of {task.name}"
        )
    rows = np.arange(len(whole))
    drawn = resample(rows, replace=False, n_samples=data.num_examples, stratify=whole.labels, random_state=data.seed)
    return task, _rows(whole, np.sort(drawn))


def check_folds(task: SentenceTask, examples: Examples, num_folds: int) -> None:
    """Check that every class has at least as many sentences as there are folds."""
    counts = np.bincount(examples.labels, minlength=len(task.class_names))
    smallest = int(counts.argmin())
    if counts[smallest] < num_folds:
        count = counts[smallest]
        what = f"class {task.class_names[smallest]!r} of {task.name} has {count} of the {len(examples)} sentences"
        if count < 2:
            raise ValueError(
                f"{what}, too few to be trained on and held out: choose a larger data.num_examples, or fewer classes"
            )
        raise ValueError(f"grid.num_folds = {num_folds}: {what}; choose at most {count}")


def read_fold(config: ClassifierConfig) -> tuple[SentenceTask, LabelledSource, LabelledSource]:
    """Return the task, and the tokenised training and held-out sentences of a cell."""
    task, examples = read_data(config.data, config.fold.task)
    check_folds(task, examples, config.fold.num_folds)
    with naming_field("data."):
        tokenizer = load_tokenizer(config.tokenizer, needs_eos=False)
    if tokenizer.pad_token_id is None:
        raise ValueError(f"data.tokenizer = {config.tokenizer!r} has no padding token (pad_token)")
    source = LabelledSource.of(examples, tokenizer, num_tokens=config.data.num_tokens)
    inside, outside = folds(examples.labels, config.fold.num_folds, config.run.seed)[config.fold.fold]
    return task, source[inside], source[outside]


def folds(labels: np.ndarray, num_folds: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return, for every fold, the rows to train on and the rows that are held out, stratified by class."""
    splitter = StratifiedKFold(num_folds, shuffle=True, random_state=seed)
    return list(splitter.split(np.zeros(len(labels)), labels))


def _rows(examples: Examples, rows: np.ndarray) -> Examples:
    def chosen(texts: list[str]) -> list[str]:
        return [texts[row] for row in rows]

    second = None if examples.second is None else chosen(examples.second)
    return Examples(chosen(examples.first), second, examples.labels[rows])


def build_model(
    config: ClassifierConfig, tokenizer: PreTrainedTokenizerFast, class_names: tuple[str, ...]
) -> TripleEntropyClassifier:
    """Build the module to train on the CPU: a pretrained or random text model with a new head, the same on every rank."""
    width = config.data.num_tokens
    model = base.build_encoder(
        config.model,
        AutoModelForSequenceClassification,
        what="text model",
        tokenizer=tokenizer,
        tokenizer_name=config.tokenizer,
        num_tokens=width,
        seed=config.run.seed,
        with_checkpointing=config.workers.activation_checkpointing,
        id2label=dict(enumerate(class_names)),
        label2id={name: number for number, name in enumerate(class_names)},
    )
    model.config.pad_token_id = tokenizer.pad_token_id
    most = num_positions(model.config)
    if most is not None and width > most:
        raise ValueError(
            f"data.num_tokens = {width} is more than the {most} positions of the model: choose at most {most}"
        )
    soft_triple = None
    weight = 0.0 if config.setting.cross_entropy_alone else config.setting.contrastive_weight
    if not (config.setting.cross_entropy_alone or weight):
        settings = soft_triple_config(config.setting, config.centers)
        soft_triple = SoftTriple(int(model.config.hidden_size), len(class_names), settings)
    return TripleEntropyClassifier(
        model,
        soft_triple,
        contrastive_weight=weight,
        contrastive_temperature=config.setting.contrastive_temperature,
        with_padding=config.centers.with_padding,
        world=World.current(),
        autocast_dtype=autocast_dtype(config),
    )
