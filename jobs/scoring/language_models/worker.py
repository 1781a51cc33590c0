"""What a worker of the pool runs: it holds one language model at a time, and computes the results of jobs."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from jobs.scoring.language_models.config import EvaluateConfig
from jobs.scoring.language_models.harness import Tasks, TemperedLM, run_task
from jobs.scoring.language_models.scoring import Score, score_windows
from jobs.scoring.language_models.units import Job, LanguageModelSpec, files_of
from jobs.scoring.models import LoadedModel
from jobs.scoring.units import Finished
from pipelines.local_copy import local_copy
from pipelines.text.tokenization import load_tokenizer
from tempnet.base_model import load_base
from tempnet.devices import input_device, loading_options, move_base
from tempnet.loading import load_causal_lm
from tempnet.network import TempNet


@dataclass(frozen=True, slots=True)
class _Model:
    base: PreTrainedModel
    network: TempNet | None
    tokenizer: PreTrainedTokenizerFast


class Evaluator:
    """Computes the results of jobs, and loads a model when the first job needs it."""

    def __init__(self, config: EvaluateConfig) -> None:
        # else the harness opens a process pool over all CPUs to bootstrap standard errors
        os.environ["DISABLE_MULTIPROC"] = "1"
        self._config = config
        self._tasks = Tasks(config.include_path, config.data_dir)
        self._model = LoadedModel(self._load)

    def __call__(self, job: Job) -> Finished:
        """Compute the results of a job's units."""
        started = time.monotonic()
        results = self._score(job) if job.windows else [self._run_task(job)]
        seconds = time.monotonic() - started
        files: dict[str, Any] = {}
        for unit, result in zip(job.units, results, strict=True):
            files |= files_of(unit, result, seconds)
        return Finished(files=files)

    def _score(self, job: Job) -> list[Score | dict[str, float]]:
        spec = job.units[0].model
        model = self._model.get(spec)
        scores = score_windows(
            model.base,
            job.windows,
            {unit.temperature.name: unit.temperature.function(model.network) for unit in job.units},
            vocab_size=spec.vocab_size,
            batch_size=self._config.batch_size,
        )
        return [scores[unit.temperature.name] for unit in job.units]

    def _run_task(self, job: Job) -> dict[str, float]:
        (unit,) = job.units
        model, config = self._model.get(unit.model), self._config
        lm = TemperedLM(
            model.base,
            model.tokenizer,
            temperature=unit.temperature,
            network=model.network,
            vocab_size=unit.model.vocab_size,
            max_length=unit.model.max_length,
            batch_size=config.batch_size,
            document_start=config.document_start,
        )
        return run_task(lm, self._tasks, unit.task, limit=config.limit, num_fewshot=config.num_fewshot)

    def _load(self, spec: LanguageModelSpec) -> _Model:
        options: dict[str, Any] = {
            "trust_remote_code": self._config.trust_remote_code,
            "device_map": self._config.workers.device_map,
        }
        network: TempNet | None = None
        place = local_copy(spec.path)
        if spec.tempnet:
            base, network = load_causal_lm(
                place, local_copy(spec.tempnet), dtype=self._config.dtype, fetch=local_copy, **options
            )
        else:
            options |= loading_options(self._config.dtype)
            base = load_base(place, fetch=local_copy, **options).eval()
        base = move_base(base, "cuda" if self._config.workers.use_gpu else "cpu")
        if network:
            network.to(input_device(base))
        return _Model(base, network, load_tokenizer(spec.path))
