"""Adapters for lm-evaluation-harness: its model class with temperatures, and its tasks with local data.

Log-likelihood tasks use log softmax(L/τ) at every position, so a per-token τ can change which choice wins. Generation
with sampling draws at τ; greedy generation does not depend on τ. For a model with a TempNet, logits beyond the
tokenizer's vocabulary (padding) are cut off in every column.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerFast

from jobs.scoring.language_models.config import Temperature
from jobs.scoring.language_models.windows import divide_, encode_context
from jobs.tasks.base import naming_field
from pipelines.local_copy import local_copy
from pipelines.text.tokenization import document_start_id
from tempnet.devices import input_device
from tempnet.inference import CachedFold, attach, end_ids, record_hidden_states
from tempnet.network import TempNet

# The builders of `datasets` that read local files.
_LOCAL_DATA = {"json", "csv", "parquet", "text"}
_DATA_FIELDS = ("dataset_path", "dataset_kwargs")
_NUM_BOOTSTRAPS = 1000


class TemperedLM(HFLM):
    """A causal LM whose logits are divided by τ.

    With `document_start`, every prompt and every context of a log-likelihood request starts with the document-start token, as
    documents did in training, and loses that token first if it is too long; without, contexts are encoded as the tokenizer
    does it. Empty contexts and rolling windows always start with exactly one document-start token.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        *,
        temperature: Temperature,
        network: TempNet | None,
        vocab_size: int | None,
        max_length: int,
        batch_size: int,
        document_start: bool,
    ) -> None:
        super().__init__(
            pretrained=base,
            backend="causal",
            tokenizer=tokenizer,
            max_length=max_length,
            batch_size=batch_size,
            prefix_token_id=document_start_id(tokenizer),
        )
        base.generation_config.eos_token_id = end_ids(base, tokenizer)
        num_logits = base.get_output_embeddings().weight.shape[0]
        base.generation_config.suppress_tokens = [*range(vocab_size or num_logits, num_logits)] or None
        self._device = input_device(base)  # the harness asks for that of the weights, which may be offloaded
        self._temperature = temperature
        self._function = temperature.function(network)
        self._num_logits = vocab_size
        self._document_start = document_start

    @property
    def max_gen_toks(self) -> int:
        """Maximum number of new tokens: the harness's 256, or half of the context if that is less."""
        return min(256, self.max_length // 2)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, left_truncate_len: int | None = None, **kwargs: Any
    ) -> list[int]:
        """Returns the tokens of a text alone; :meth:`_encode_pair` adds the tokens that start a context."""
        ids = self.tokenizer.encode(string, add_special_tokens=False)
        return ids[-left_truncate_len:] if left_truncate_len else ids

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        ids, continuation_ids = super()._encode_pair(context, continuation)
        # The harness moves trailing spaces to the continuation. The start tokens of the context are added here.
        opening = encode_context(self.tokenizer, context.rstrip(), document_start=self._document_start)
        return opening[: len(opening) - len(ids)] + ids, continuation_ids

    def tok_batch_encode(
        self,
        strings: list[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Returns prompts for generation, padded on the left, and their attention mask."""
        keep = left_truncate_len or 0
        encoded = [
            encode_context(self.tokenizer, text, document_start=self._document_start)[-keep:] for text in strings
        ]
        padded = self.tokenizer.pad({"input_ids": encoded}, padding_side=padding_side, return_tensors="pt")
        return padded["input_ids"], padded["attention_mask"]

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        with record_hidden_states(self.model) as seen:
            logits = super()._model_call(inps)[..., : self._num_logits].float()
        return divide_(logits, seen[-1], self._function)

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any) -> Tensor:
        with contextlib.ExitStack() as stack:
            if generation_kwargs.get("do_sample"):
                if self._temperature.needs_tempnet:
                    assert isinstance(self._function, TempNet)
                    # The TempNet must listen to the model for its inputs, because generate() applies its own
                    # processors, such as a repetition penalty, before ours.
                    attached = stack.enter_context(attach(self.model, self._function, self._fold))
                    generation_kwargs["logits_processor"] = LogitsProcessorList([attached.processor()])
                value = self._temperature.value
                generation_kwargs["temperature"] = 1.0 if self._temperature.needs_tempnet else value
            return super()._model_generate(context, max_length, stop, **generation_kwargs)

    @cached_property
    def _fold(self) -> CachedFold | None:
        """The folded TempNet, created once for the first sampled batch; None if τ must be computed from the logits."""
        assert isinstance(self._function, TempNet)
        return CachedFold.of(self.model, self._function)


class Tasks:
    """Looks up tasks by name: those of the user's directory (or URI) first, then the harness's own."""

    def __init__(self, include_path: str, data_dir: str) -> None:
        with naming_field("include_path = "):
            self.include_path = local_copy(include_path)
        with naming_field("data_dir = "):
            self.data_dir = local_copy(data_dir)

    @cached_property
    def _own(self) -> TaskManager:
        return TaskManager(include_path=self.include_path or None, include_defaults=False)

    @cached_property
    def _all(self) -> TaskManager:
        # it reads 14 000 files, so it is created only if needed
        return TaskManager(include_path=self.include_path or None)

    def manager(self, name: str) -> TaskManager:
        if name in self._own.task_index:
            return self._own
        if name in self._all.task_index:
            return self._all
        near = difflib.get_close_matches(name, self._all.all_tasks, n=3, cutoff=0.5)
        near += [f"local_{name}"] if f"local_{name}" in self._own.task_index else []
        hint = f"did you mean {' or '.join(near)}?" if near else "`lm-eval ls tasks` lists the harness's own"
        raise ValueError(f"task {name!r} is unknown: {hint}")

    def data_files(self, name: str) -> list[Path]:
        """Returns the local files that a task, or the tasks of a group or tag, read; those of the hub have none."""
        found: list[Path] = []
        for values in _data_of(name, self.manager(name).task_index):
            if values.get("dataset_path") not in _LOCAL_DATA:
                continue
            kwargs = values.get("dataset_kwargs") or {}
            place = Path(self.data_dir, kwargs.get("data_dir") or "")
            for file in _strings(kwargs.get("data_files")):
                if "://" in file:
                    continue
                matches = [Path(file)] if Path(file).is_absolute() else sorted(place.glob(file))
                if not matches or not matches[0].is_file():
                    raise ValueError(
                        f"task {name!r} reads {place / file}, which is no file: "
                        "data_dir must say where the data files of tasks are"
                    )
                found += matches
        return found


def _data_of(
    item: str | dict[str, Any], index: Mapping[str, Any], given: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Yields the fields on data of every task that a name, or an entry of a group with fields of its own, stands for.

    As in the harness, the fields of an entry come before those of the groups around it, and these before the task's.
    """
    own = item if isinstance(item, dict) else {"task": item}
    known = index.get(own.get("group") or own["task"])
    # A tag has no configuration; what a group defines itself is not in the index.
    config = own if known is None else known.cfg or {"task": sorted(known.tags)}
    values = {name: part[name] for part in (config, given or {}, own) for name in _DATA_FIELDS if name in part}
    if isinstance(members := config.get("task"), list):
        for member in members:
            yield from _data_of(member, index, values)
    else:
        yield values


def run_task(lm: TemperedLM, tasks: Tasks, name: str, *, limit: int, num_fewshot: int) -> dict[str, float]:
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = tasks.manager(name)
    # Data files are relative to this directory. A machine may lack it where no task reads any.
    with contextlib.chdir(tasks.data_dir if tasks.data_dir and Path(tasks.data_dir).is_dir() else "."):
        output = simple_evaluate(
            model=lm,
            tasks=[name],
            task_manager=manager,
            limit=limit or None,
            num_fewshot=None if num_fewshot < 0 else num_fewshot,
            bootstrap_iters=_NUM_BOOTSTRAPS,
            log_samples=False,
        )
    assert output is not None
    return dict(_metrics(output["results"]))


def _metrics(results: dict[str, dict[str, Any]]) -> Iterator[tuple[str, float]]:
    for task, values in results.items():
        for key, value in values.items():
            metric, comma, filter_name = key.partition(",")
            # A standard error that cannot be computed is "N/A" or NaN.
            if comma and isinstance(value, int | float) and math.isfinite(value):
                suffix = "" if filter_name == "none" else f".{filter_name}"
                yield f"{task}/{metric}{suffix}", float(value)


def _strings(value: Any) -> Sequence[str]:
    """Returns all strings in a nested value; `data_files` may be a name, a list, or a mapping of splits to these."""
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value or []
    return [text for item in inner for text in _strings(item)]
