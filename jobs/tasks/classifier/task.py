"""The task of training a classifier: labelled sentences in folds, the module, and what the training loop runs on a worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.model_selection import StratifiedKFold
from sklearn.utils import resample
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from jobs.engine.export import open_export
from jobs.engine.hardware import worker_device
from jobs.engine.task import ParameterGroup, StepResult, Task, trainable
from jobs.tasks import base
from jobs.tasks.base import autocast_dtype, encode_all, naming_field, to_device
from jobs.tasks.classifier.config import ClassifierConfig, LabelledSection, soft_triple_config
from pipelines.plan import StreamPlan
from pipelines.problems import TooManyProblemsError
from pipelines.sentences.senteval import Examples, LabelledSource, SentenceTask, read_labelled, read_task
from pipelines.storage import compute_digest
from pipelines.stream import Batch
from pipelines.text.tokenization import load_tokenizer
from tempnet.contrastive.state import World
from tempnet.models.sentence_encoder import num_positions
from tempnet.models.triple_entropy_classifier import ClassifierOutput, TripleEntropyClassifier
from tempnet.soft_triple import SoftTriple

if TYPE_CHECKING:  # the driver, which builds the model to check it, does not need DeepSpeed
    from deepspeed import DeepSpeedEngine

_VALIDATION_BATCH_SIZE = 64


class ClassifierTask(Task[ClassifierConfig]):
    """The task of training a classifier; the methods are described in `jobs.engine.task.Task`.

    No model is rated, so that the last one counts: choosing one by the held-out sentences would bias its score.
    """

    unit = "sentences"
    module: TripleEntropyClassifier
    knows_token_types: bool

    def __init__(self, config: ClassifierConfig, rank: int, world_size: int) -> None:
        self.labelled, self.train, self.held_out = read_fold(config)
        number = len(self.train)
        identity = {
            "sentences": compute_digest(self.train.read(np.zeros(number), np.arange(number), 0)["digest"].tolist())
        }
        super().__init__(
            config,
            self.train,
            plan=StreamPlan(shard_sizes=(number,), seed=config.run.seed, window_size=number, identity=identity),
            rank=rank,
            world_size=world_size,
            num_readers=0,
        )

    def build(self, *, is_fresh: bool) -> None:
        tokenizer = load_tokenizer(self.config.tokenizer, needs_eos=False)
        module = build_model(self.config, tokenizer, self.labelled.class_names)
        self.module = module.to(worker_device(self.config.workers))
        self.knows_token_types = getattr(module.model.config, "type_vocab_size", 0) > 1

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return two groups: the model, and the class centres with their own learning rate."""
        rate, rate_centers = self.config.optimizer.learning_rate_base, self.config.centers.learning_rate
        return [
            {"name": "base", "parameters": trainable(self.module.model), "learning_rate": rate},
            {"name": "centers", "parameters": trainable(self.module.soft_triple), "learning_rate": rate_centers},
        ]

    def train_step(
        self, engine: DeepSpeedEngine, batch: Batch, *, step: int, num_units: int, with_statistics: bool
    ) -> StepResult:
        output = engine(**self._tensors(batch, engine.device))
        engine.backward(output["loss"])
        engine.step()
        statistics = None
        if with_statistics:
            statistics = ClassifierStatistics.of(output, torch.from_numpy(batch["labels"]).to(engine.device))
        return StepResult(output["loss"].detach() / self.world_size, statistics)

    def validate(
        self, engine: DeepSpeedEngine, *, with_details: bool
    ) -> tuple[dict[str, float], dict[str, Any] | None]:
        """Return accuracy and cross-entropy on the held-out sentences; the details are the confusion matrix."""

        def predict(rows: np.ndarray) -> Tensor:
            tensors = self._tensors(self.held_out.read(np.zeros_like(rows), rows, 0), engine.device)
            return self.module.logits(**{name: tensors[name] for name in tensors if name not in ("labels", "counted")})

        size, labels = len(self.labelled.class_names), torch.from_numpy(self.held_out.labels).to(engine.device)
        logits = encode_all(predict, np.arange(len(labels)), self.module.world, _VALIDATION_BATCH_SIZE)
        confusion = torch.bincount(labels * size + logits.argmax(-1), minlength=size**2).view(size, size)
        cross_entropy = float(F.cross_entropy(logits.double(), labels))
        scores = {"accuracy": float(confusion.trace()) / len(labels), "cross_entropy": cross_entropy}
        return scores, {"confusion": confusion.tolist()} if with_details else None

    def _tensors(self, batch: Batch, device: torch.device) -> dict[str, Tensor]:
        return sentence_tensors(
            batch, device, with_padding=self.config.centers.with_padding, with_types=self.knows_token_types
        )

    def describe(self, scores: Mapping[str, float]) -> str:
        return f"accuracy {scores['accuracy']:.2%}, cross-entropy {scores['cross_entropy']:.4f}"

    def export(self) -> None:
        """Write the classifier and its tokenizer in Transformers' format, if models are kept."""
        if self.rank or not self.config.fold.keep_model:
            return
        with open_export(self.config.run.export_directory) as directory:
            self.module.model.save_pretrained(directory)
            load_tokenizer(self.config.tokenizer, needs_eos=False).save_pretrained(directory)


@dataclass(frozen=True, slots=True)
class ClassifierStatistics:
    """Statistics of a step, as sums that add up over ranks: the two losses, correct predictions and sentences."""

    sums: Tensor
    second: str
    """Name of the loss beside cross-entropy; empty without one."""

    @classmethod
    def of(cls, output: ClassifierOutput, labels: Tensor) -> ClassifierStatistics:
        """Return the statistics of one rank's part of a batch."""
        losses = {"soft_triple": output["soft_triple"], "contrastive": output["contrastive"]}
        second, value = next(((name, loss) for name, loss in losses.items() if loss is not None), ("", 0.0))
        num_right = (output["logits"].argmax(-1) == labels).sum()
        values = [output["cross_entropy"], value, num_right, len(labels)]
        return cls(torch.tensor(list(map(float, values)), dtype=torch.float64, device=labels.device), second)

    def summary(self) -> dict[str, float]:
        cross_entropy, value, right, count = self.sums.tolist()
        parts = {self.second: value} if self.second else {}
        return {"cross_entropy": cross_entropy, **parts, "accuracy": right / count}


def sentence_tensors(batch: Batch, device: torch.device, *, with_padding: bool, with_types: bool) -> dict[str, Tensor]:
    """Convert a batch into the arguments of `TripleEntropyClassifier`; padding is trimmed unless it counts in the loss."""
    lengths = batch["lengths"]
    width = batch["input_ids"].shape[1] if with_padding else int(lengths.max())
    names = ("input_ids", "token_type_ids") if with_types else ("input_ids",)
    arrays: Batch = {name: batch[name][:, :width] for name in names if name in batch}
    mask = np.arange(width) < lengths[:, None]
    arrays |= {"attention_mask": mask, "labels": batch["labels"]}
    arrays["counted"] = np.arange(mask.size) if with_padding else np.flatnonzero(mask)
    return {name: to_device(array.astype(np.int64), device) for name, array in arrays.items()}


# ---- data and module -------------------------------------------------------------------------------------------------


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
    rows = np.sort(drawn)
    second = None if whole.second is None else [whole.second[row] for row in rows]
    return task, Examples([whole.first[row] for row in rows], second, whole.labels[rows])


def _check_folds(task: SentenceTask, examples: Examples, num_folds: int) -> None:
    """Check that every class has at least as many sentences as there are folds."""
    counts = np.bincount(examples.labels, minlength=len(task.class_names))
    smallest = int(counts.argmin())
    if (count := counts[smallest]) < num_folds:
        what = f"class {task.class_names[smallest]!r} of {task.name} has {count} of the {len(examples)} sentences"
        if count < 2:
            raise ValueError(
                f"{what}, too few to be trained on and held out: choose a larger data.num_examples, or fewer classes"
            )
        raise ValueError(f"grid.num_folds = {num_folds}: {what}; choose at most {count}")


def read_fold(config: ClassifierConfig) -> tuple[SentenceTask, LabelledSource, LabelledSource]:
    """Return the task, and the tokenised training and held-out sentences of a cell."""
    task, examples = read_data(config.data, config.fold.task)
    _check_folds(task, examples, config.fold.num_folds)
    with naming_field("data."):
        tokenizer = load_tokenizer(config.tokenizer, needs_eos=False)
    if tokenizer.pad_token_id is None:
        raise ValueError(f"data.tokenizer = {config.tokenizer!r} has no padding token (pad_token)")
    source = LabelledSource.of(examples, tokenizer, num_tokens=config.data.num_tokens)
    splitter = StratifiedKFold(config.fold.num_folds, shuffle=True, random_state=config.run.seed)
    inside, outside = list(splitter.split(examples.labels, examples.labels))[config.fold.fold]
    return task, source[inside], source[outside]


def build_model(
    config: ClassifierConfig, tokenizer: PreTrainedTokenizerFast, class_names: tuple[str, ...]
) -> TripleEntropyClassifier:
    """Build the module to train on the CPU: a pretrained or random text model with a new head, the same on every rank."""
    width = config.data.num_tokens
    model = base.build_encoder(
        config,
        AutoModelForSequenceClassification,
        tokenizer,
        what="text model",
        num_tokens=width,
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
