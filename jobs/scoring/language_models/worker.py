"""The Ray actor of an evaluation, which holds one model at a time and runs jobs."""

from __future__ import annotations

import os
import time

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from jobs.scoring.language_models.config import EvaluateConfig
from jobs.scoring.language_models.harness import Tasks, TemperedLM, run_task
from jobs.scoring.language_models.scoring import Score, score_windows
from jobs.scoring.language_models.units import Job, ModelSpec
from pipelines.text.tokenization import load_tokenizer
from tempnet.loading import load_causal_lm
from tempnet.network import TempNet
from tempnet.weights import check_weights

# The results of a job's units, in order, and the seconds that the job took.
JobResult = tuple[list[Score | dict[str, float]], float]


class EvaluationWorker:
    """Runs jobs, and loads a model when the first job needs it."""

    def __init__(self, config: EvaluateConfig) -> None:
        # else the harness opens a process pool over all CPUs to bootstrap standard errors
        os.environ["DISABLE_MULTIPROC"] = "1"
        torch.set_num_threads(max(1, int(config.workers.cpus_per_worker)))
        self._config = config
        self._tasks = Tasks(config.include_path, config.data_dir)
        self._loaded: tuple[ModelSpec, PreTrainedModel, TempNet | None, PreTrainedTokenizerFast] | None = None

    def run(self, job: Job) -> JobResult:
        """Compute the results of a job."""
        started = time.monotonic()
        results = self._score(job) if job.windows else self._harness(job)
        return results, time.monotonic() - started

    def _score(self, job: Job) -> list[Score | dict[str, float]]:
        spec, base, network, _ = self._model(job.units[0].model)
        scores = score_windows(
            base,
            job.windows,
            {unit.temperature.name: unit.temperature.function(network) for unit in job.units},
            vocab_size=spec.vocab_size,
            batch_size=self._config.batch_size,
        )
        return [scores[unit.temperature.name] for unit in job.units]

    def _harness(self, job: Job) -> list[Score | dict[str, float]]:
        (unit,) = job.units
        spec, base, network, tokenizer = self._model(unit.model)
        lm = TemperedLM(
            base,
            tokenizer,
            temperature=unit.temperature,
            network=network,
            vocab_size=spec.vocab_size,
            max_length=spec.max_length,
            batch_size=self._config.batch_size,
            document_start=self._config.document_start,
        )
        config = self._config
        return [run_task(lm, self._tasks, unit.task, limit=config.limit, num_fewshot=config.num_fewshot)]

    def _model(self, spec: ModelSpec) -> tuple[ModelSpec, PreTrainedModel, TempNet | None, PreTrainedTokenizerFast]:
        if self._loaded is None or self._loaded[0] != spec:
            self._loaded = None  # free the previous model first
            dtype, trust = getattr(torch, self._config.dtype), self._config.trust_remote_code
            network: TempNet | None = None
            if spec.tempnet:
                base, network = load_causal_lm(spec.path, spec.tempnet, dtype=dtype, trust_remote_code=trust)
            else:
                base = AutoModelForCausalLM.from_pretrained(spec.path, dtype=dtype, trust_remote_code=trust).eval()
                check_weights(base, spec.path)
            device = "cuda" if self._config.workers.use_gpu else "cpu"
            base.to(device)  # type: ignore[arg-type]
            if network:
                network.to(device)
            self._loaded = (spec, base, network, load_tokenizer(spec.path))
        return self._loaded
