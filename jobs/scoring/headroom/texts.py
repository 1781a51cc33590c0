"""The predictions of a language model, which reads the text once.

Of every prediction it keeps the profile, scalars of the logits, and the hidden state.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from jobs.engine.command_line import as_typed
from jobs.scoring.headroom.config import Headroom
from jobs.scoring.headroom.job import Question, end_losses, measured_table
from jobs.scoring.temperatures.texts import TokenReader
from jobs.scoring.text_parts import (
    Part,
    TextSettings,
    checked_model,
    list_sources,
    map_archives,
    part_files,
    read_documents,
    text_options,
    token_arrays,
)
from jobs.scoring.units import Finished, model_labels, to_parquet
from jobs.tasks.base import naming_field
from jobs.tasks.language_model.config import EndOfDocument
from jobs.tasks.language_model.data import read_training_text, warn_of_known_text
from pipelines.local_copy import is_directory
from pipelines.storage import join
from tempnet.headroom.features import Tokens
from tempnet.headroom.run import CONSTANT, HeadroomTest
from tempnet.models.dual_encoder_config import IMAGE_ENCODER_DIRECTORY
from tempnet.softmax.config import LOSS_KINDS

_NUM_TOKENS_PER_STEP = 2048
# What the loss needs beside its range of τ to reach the figure of the test (docs/when.md).
RECIPE = ("--temperature.input", "hidden", "--temperature.no-normalize-input", "--temperature.pooling", "linear")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextMeasurement(TextSettings):
    """A text and a language model, checked."""

    own_fields = ("tokens_per_document",)
    vocab_size: int
    eos_id: int
    known_text: tuple[str, ...]
    """Names of archives that the model is known to have been trained on."""

    @classmethod
    def resolve(cls, config: Headroom) -> TextMeasurement:
        with naming_field("text: "):
            archives = list_sources(config.text)
        if is_directory(join(config.model, IMAGE_ENCODER_DIRECTORY)):
            raise ValueError(
                f"model = {config.model!r} is an image–text model, and text is for causal language models: give images in "
                "its place"
            )
        base, tokenizer = checked_model(config.model, "model = ")
        options = text_options(config, tokenizer, base)
        # Documents are read until there are as many as folds.
        number = len(list(itertools.islice(read_documents(config, archives, Counter(), []), config.folds)))
        if number < config.folds:
            raise ValueError(
                f"text = {config.text!r} has {number} readable documents, fewer than folds = {config.folds}: the interval "
                "is over documents, so give more text, or text with a record for every document"
            )
        return cls(
            **options,
            archives=archives,
            vocab_size=len(tokenizer),
            eos_id=int(tokenizer.eos_token_id),
            known_text=tuple(warn_of_known_text(config.model, config.text, archives, field="text")),
        )

    @property
    def source(self) -> str:
        return str(self.config.text)

    @property
    def warning(self) -> str:
        """Sentences if the model is known to have been trained on some of the text, or together with a TempNet."""
        warnings = []
        if self.known_text:
            warnings.append("The model was trained on some of this text: the verdict does not hold for new text.")
        _, loss = read_training_text(self.config.model)
        if loss in LOSS_KINDS and LOSS_KINDS[loss].temperature == "tempnet":
            warnings.append(
                f"The model was trained together with a TempNet (loss {loss}): τ = 1 is not its own scale, and what is "
                "gained over it or over a constant says nothing about a model trained by plain cross-entropy."
            )
        return " ".join(warnings)

    def question(self, output: str, files: Sequence[str]) -> Question:
        """Returns the question that the tables answer; whether documents' ends count is measured on them."""
        rule, losses = self.config.end_of_document, end_losses(output, files)
        probability = math.exp(-losses.mean().item()) if len(losses) else 0.0
        end = EndOfDocument(probability=probability, num_documents=len(losses))
        if rule == "measured":
            print(f"the end of a document is {end.describe()}")
        with_end = end.is_target if rule == "measured" else rule == "target"
        facts = {"known_text": list(self.known_text), "end_of_document": {**asdict(end), "is_target": with_end}}
        return Question(files=files, with_end=with_end, facts=facts)

    def command(self, test: HeadroomTest, question: Question) -> str:
        """Returns the command that trains a TempNet for what the test has found, on four fifths of the text."""
        settings = self.config
        options = {
            "run.name": f"{model_labels([settings.model])[0]}-tempnet",
            "model.path": settings.model,
            "data.train": settings.text,
            "data.validation": "",
            "data.context-length": str(min(settings.context_length, settings.tokens_per_document)),
            "data.end-of-document": "target" if question.with_end else "ignored",
            "temperature.loss": "proper",
            "temperature.tau-max": f"{test.wanted_tau_max:g}",
            "workers.precision": "fp32" if settings.precision == "fp32" else "bf16",
        }
        if settings.text_field != "text":
            options["data.text-field"] = settings.text_field
        if settings.precision in ("int8", "fp8"):
            options["model.precision"] = settings.precision
        preset = "frozen" if settings.workers.use_gpu else "frozen-small"
        if preset == "frozen-small":
            # Its own 400 steps of 16 short blocks deliver 57 to 97 % of the promise, these 85 to 147 % (docs/when.md).
            context_length = int(options["data.context-length"])
            num_blocks = int(0.8 * test.sums.counts.sum().item()) // context_length
            wanted = 2 * math.ceil(_NUM_TOKENS_PER_STEP / (2 * context_length))
            options |= {"run.num-steps": "600", "optimizer.batch-size": str(max(16, min(wanted, num_blocks // 2 * 2)))}
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        return as_typed(["jobs.train_lm", preset, *words, *RECIPE])

    def advice(self, test: HeadroomTest, question: Question) -> str:
        """Returns the command with a line before it, unless nothing is to be gained."""
        if 1000 * test.sums.gain(test.best_features, CONSTANT).high <= self.config.least_gain:
            return ""
        return (
            "\n\nThis command trains a TempNet that realises it, on four fifths of the documents, and judges it on the "
            f"others:\n\n{self.command(test, question)}"
        )

    def measure(self, output: str) -> list[Question]:
        """Write the parts that are missing in `output`, and return the one question; errors are those of `map_archives`."""
        records, _ = map_archives(self, output, partial(Measurer, self))
        return [self.question(output, part_files(records))]


class Measurer(TokenReader):
    def __init__(self, settings: TextMeasurement) -> None:
        super().__init__(settings)
        self._limit, self._end = settings.config.tokens_per_document, settings.eos_id

    def __call__(self, part: Part) -> Finished:
        """Make the table of a part, a row per token; a document that is read to its end ends with the end-of-text token."""
        ids = [
            values[: self._limit] if len(values) > self._limit else np.append(values, self._end)
            for values in token_arrays(part.table["token_ids"])
        ]
        tokens = self.measure(ids)
        if bad := int((~tokens.maximum.isfinite()).sum()):
            raise ValueError(
                f"model = {self._settings.config.model!r}: the logits of {bad} of {len(tokens.maximum)} tokens are not finite"
            )
        documents = np.repeat(np.arange(len(ids)), [len(values) for values in ids])
        table = measured_table(tokens, documents, num_documents=len(ids), is_end=np.concatenate(ids) == self._end)
        return Finished(files={part.file: to_parquet(table)}, num_cases=table.num_rows)

    @torch.inference_mode()
    def measure(self, documents: Sequence[np.ndarray]) -> Tokens:
        """Returns what is known of all tokens of documents (n,), document after document, on the CPU."""
        starts = np.concatenate([[0], np.cumsum([len(ids) for ids in documents])])
        places: list[Tensor] = [torch.empty(0, dtype=torch.long)]
        found: list[Tokens] = []
        for windows, chunks in self.read(documents):
            found += [Tokens.of_logits(chunk.logits(), chunk.targets, chunk.hidden) for chunk in chunks]
            places += [torch.arange(window.first, window.stop) + int(starts[window.document]) for window in windows]
        return Tokens.join(found, torch.cat(places).argsort())
