"""What a run on a frozen base takes from the base itself, measured on a sample of prepared text before training.

* ρ, so that the mean optimal temperature is a wanted one (`tempnet.calibration`);
* the range of τ for the loss `proper`, from the headroom test (`tempnet.headroom.run.HeadroomTest.wanted_tau_max`);
* whether the model knows the end of a document, so that the end is a target (:class:`EndOfDocument`).

It is measured in a Ray task, or in this process where Ray is not running, on blocks spread evenly over the text, which the
model reads as in training. The result is stored as `calibration.json` in the run's directory, so that a continued run keeps
it, and without ρ also beside the prepared text, so that the trials of a sweep measure it once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jobs.tasks.language_model.config import EndOfDocument, LanguageModelConfig, with_measured
from jobs.tasks.language_model.models import build_base, read_only
from jobs.tasks.language_model.validation import to_tensors
from pipelines.features import Features, read_feature_range
from pipelines.local_copy import local_copy
from pipelines.storage import read_json, write_json
from pipelines.stream import Batch
from pipelines.text.blocks import read_range
from pipelines.text.manifest import Manifest
from pipelines.text.packing import IGNORE_INDEX, PackingConfig
from pipelines.text.tokenization import load_tokenizer
from tempnet.base_model import BaseReference
from tempnet.calibration import calibrate_rho
from tempnet.devices import input_device, move_base
from tempnet.headroom.features import Tokens
from tempnet.headroom.profile import Profiles
from tempnet.headroom.run import run_headroom_test
from tempnet.models.causal_lm import NUM_PROFILED_LOGITS
from tempnet.models.output_head import HEAD_FILE, StoredBase

CALIBRATION_FILE = "calibration.json"
END, RANGE = "end_of_document", "tau_range"
"""Keys of what is measured beside ρ."""

# Number of logits that are in memory at a time while optimal temperatures are computed (float32: 256 MiB per copy).
_NUM_LOGITS_AT_A_TIME = 1 << 26
# Number of blocks that are looked through for documents' ends.
_NUM_BLOCKS_FOR_ENDS = 64
# The headroom test with hidden states takes the cube of their size in time; above this size it reads scalars alone.
_MAX_HIDDEN_SIZE = 1024


def read_or_measure(
    config: LanguageModelConfig,
    text: Manifest,
    base: BaseReference | None,
    features: Features | None,
    *,
    needs_range: bool,
) -> tuple[LanguageModelConfig, dict[str, Any]]:
    """Return the configuration with everything that its base decides, and the record of what was measured.

    It is read from the run's directory, or measured now on a prepared text, with its hidden states if they are stored. The
    directory, which does not exist before the run's name is claimed, is not written to.
    """
    record: dict[str, Any] = read_json(f"{config.run.directory}/{CALIBRATION_FILE}") or {}
    needed = {END} if base is not None and config.data.end_of_document == "measured" else set()
    needed |= {RANGE} if needs_range else set()
    if missing := needed - record.keys():
        key = [
            base and base.digest, config.base_precision, config.data.attend_across_documents, config.data.end_of_document,
            config.temperature.num_calibration_tokens, features is not None,
        ]  # fmt: skip
        name = hashlib.blake2b(json.dumps(key).encode(), digest_size=6).hexdigest()
        file = f"{text.directory}/measured-{name}.json"  # beside the prepared text
        known: dict[str, Any] = read_json(file) or {}
        if wanted := missing - known.keys():
            known |= _in_task(config, text, features, sorted(wanted))
            write_json(file, known)
        record |= {name: known[name] for name in missing}
    config = with_measured(config, record)
    if config.temperature.needs_calibration and "rho" not in record:
        record |= calibrate(config, text)
    return with_measured(config, record), record


def calibrate(
    config: LanguageModelConfig, text: Manifest, *, device_map: str | None = None, num_gpus: int = 1
) -> dict[str, Any]:
    """Return the calibration of ρ as plain values, and the document's end if it is to be measured.

    device_map = "auto" spreads the base over the GPUs, of which `num_gpus` are reserved if the configuration's workers use
    them.
    """
    needs_end = config.data.end_of_document == "measured" and config.model.is_frozen
    return _in_task(config, text, None, [END, "rho"] if needs_end else ["rho"], device_map, num_gpus)


def describe_measured(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield name and text of the lines that tell what was measured."""
    if record.get(END):
        yield "end", EndOfDocument(**record[END]).describe()
    if record.get(RANGE):
        found = record[RANGE]
        yield (
            "range of τ",
            f"τ_max = {found['tau_max']:g}: on {found['num_tokens']:,} tokens the best constant is "
            f"{found['best_constant']:.3f}, and the temperatures of the headroom test reach from {found['low']:.2f} to "
            f"{found['high']:.2f}",
        )
    if "rho" in record:
        yield (
            "ρ",
            f"{record['rho']:.4f} (target entropy {record['target_entropy']:.4f} nats): mean τ* {record['tau_mean']:.3f} ± "
            f"{record['tau_std']:.3f} over {record['num_contexts']:,} contexts of the base model",
        )


def _in_task(
    config: LanguageModelConfig,
    text: Manifest,
    features: Features | None,
    wanted: list[str],
    device_map: str | None = None,
    num_gpus: int = 1,
) -> dict[str, Any]:
    ray = sys.modules.get("ray")  # a run in this process does without it
    if ray is None or not ray.is_initialized():
        return _measure(config, text, features, wanted, device_map)
    workers = config.workers
    task = ray.remote(num_cpus=workers.cpus_per_worker, num_gpus=num_gpus if workers.use_gpu else 0)(_measure)
    try:
        found: dict[str, Any] = ray.get(task.remote(config, text, features, wanted, device_map))
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    return found


@torch.no_grad()
def _measure(
    config: LanguageModelConfig, text: Manifest, features: Features | None, wanted: list[str], device_map: str | None
) -> dict[str, Any]:
    """Measure what is wanted, with the base in this process."""
    if config.workers.num_threads:
        torch.set_num_threads(config.workers.num_threads)
    sampler = _Sampler(config, text, features, device_map)
    found: dict[str, Any] = {}
    if END in wanted:
        found[END] = dataclasses.asdict(sampler.measure_end())
        config = with_measured(config, found)
    if not wanted or wanted == [END]:
        return found
    sample = sampler.sample(config.temperature.num_calibration_tokens, end_is_target=config.data.predicts_end)
    if RANGE in wanted:
        found[RANGE] = sampler.measure_range(*sample)
    if "rho" in wanted:
        module, (tau_min, tau_max) = sampler.module, config.temperature.tau_range
        parts = sample[0].split(max(1, _NUM_LOGITS_AT_A_TIME // module.vocab_size))
        calibration = calibrate_rho(
            lambda: map(module.context_logits, parts),
            module.vocab_size,
            tau=config.temperature.calibrated_tau,
            tau_min=tau_min,
            tau_max=tau_max,
        )
        found |= dataclasses.asdict(calibration)
    return found


class _Sampler:
    """Reads blocks of a prepared text with the base of a run, or their stored hidden states with its output layer."""

    def __init__(
        self, config: LanguageModelConfig, text: Manifest, features: Features | None, device_map: str | None = None
    ) -> None:
        assert isinstance(text.layout, PackingConfig)
        self.text, self.features, self.layout = text, features, text.layout
        tokenizer = load_tokenizer(config.tokenizer)
        kind = "cuda" if config.workers.use_gpu else "cpu"
        base: Any
        if features is None:
            base = move_base(build_base(config, tokenizer, device_map=device_map), kind)
            self.device = input_device(base)
        else:
            base = StoredBase.load(Path(local_copy(f"{features.directory}/{HEAD_FILE}")))
            self.device = torch.device(kind)
            base.to(self.device)
        self.module = read_only(base, config, len(tokenizer))

    def read(self, row: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return contexts (T, d or V), targets (T,) and documents (T,) of a block."""
        arrays: Batch = read_range(self.text, row, row + 1)
        documents = torch.from_numpy(arrays["documents"][0] + (arrays["parts"] << 32))
        if self.features is not None:
            arrays = read_feature_range(self.features, row, row + 1)
        batch = to_tensors(arrays, self.device)
        if "hidden" in batch:
            hidden = batch["hidden"].to(self.module.base.get_output_embeddings().weight.dtype)
        else:
            hidden = self.module.contexts(batch["input_ids"], batch["position_ids"])
        return hidden[0], batch["targets"][0].to(hidden.device), documents

    def sample(self, num_tokens: int, *, end_is_target: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return contexts (N, d or V), targets (N,) and numbers of documents (N,) of tokens spread evenly over the text.

        N is `num_tokens`, or less if the text has no more.
        """
        num_blocks = min(self.text.num_rows, math.ceil(1.25 * num_tokens / self.layout.context_length) + 1)
        parts = []
        for row in _spread(self.text.num_rows, num_blocks):
            hidden, targets, documents = self.read(row)
            is_valid = targets != IGNORE_INDEX
            if not end_is_target:
                is_valid &= targets != self.layout.eos_id
            parts.append((hidden[is_valid], targets[is_valid], documents[is_valid.cpu()]))
        contexts, targets, documents = (torch.cat(column) for column in zip(*parts, strict=True))
        chosen = torch.tensor(_spread(len(targets), min(num_tokens, len(targets))))
        return contexts[chosen], targets[chosen], documents[chosen]

    def measure_end(self) -> EndOfDocument:
        """Return what the model says at the ends of the documents in some blocks."""
        sums, number = 0.0, 0
        for row in _spread(self.text.num_rows, min(self.text.num_rows, _NUM_BLOCKS_FOR_ENDS)):
            hidden, targets, _ = self.read(row)
            logits = self.module.context_logits(hidden[targets == self.layout.eos_id])
            sums += logits.log_softmax(-1)[:, self.layout.eos_id].double().sum().item()
            number += len(logits)
        return EndOfDocument(probability=math.exp(sums / number) if number else 0.0, num_documents=number)

    def measure_range(self, contexts: Tensor, targets: Tensor, documents: Tensor) -> dict[str, float]:
        """Return the range of τ that the headroom test on a sample asks for, and what it follows from."""
        size = max(1, NUM_PROFILED_LOGITS // self.module.vocab_size)
        reads_hidden = self.module.head is not None and contexts.shape[1] <= _MAX_HIDDEN_SIZE
        parts = []
        for some, wanted in zip(contexts.split(size), targets.split(size), strict=True):
            hidden = some.float() if reads_hidden else some.new_zeros(len(some), 1)
            parts.append(Tokens.of_logits(self.module.context_logits(some), wanted, hidden))
        tokens = Tokens.join(parts, torch.arange(len(targets)))
        _, documents = torch.unique(documents, return_inverse=True)
        num_documents = int(documents.max()) + 1
        if num_documents < 3:  # There are no folds, so that the best constant alone is known.
            tau = math.exp(-tokens.profiles.best_constant())
            low, high, tau_max = tau, tau, max(2.0, 2.0 * tau)
        else:
            doubled = tokens._replace(
                profiles=Profiles(tokens.profiles.values.double(), tokens.profiles.target.double())
            )
            test = run_headroom_test(lambda: [(doubled, documents)], num_documents, num_folds=min(5, num_documents))
            tau, (low, high), tau_max = test.tau, test.tau_quantiles, test.wanted_tau_max
        counts = {"num_tokens": len(targets), "num_documents": num_documents}
        return {"tau_max": tau_max, "best_constant": tau, "low": low, "high": high, **counts}


def _spread(total: int, number: int) -> list[int]:
    """Return `number` of the places 0 … total − 1, spread evenly from the first to the last."""
    return np.linspace(0, total - 1, number).round().astype(int).tolist()
