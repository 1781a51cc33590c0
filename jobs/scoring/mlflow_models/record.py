"""Recording a run's models in MLflow. It can be repeated: existing models are kept, and stale ones are removed.

The functions here use a client for an explicit server, since MLflow's own `log_model` would log to whichever server the
process is set to. A model whose files lie outside MLflow is what MLflow calls external: a tag holds their location, and
the model can be registered like any other.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import mlflow.pyfunc
import pandas as pd
import pyarrow.fs
from mlflow import MlflowClient
from mlflow.entities import LoggedModel, LoggedModelOutput, Metric
from mlflow.models import Model, ModelSignature
from mlflow.models.model import MLMODEL_FILE_NAME
from mlflow.utils.mlflow_tags import MLFLOW_MODEL_IS_EXTERNAL
from pyarrow.fs import FileSelector, FileType

from jobs.engine.metrics import TrackedRun
from jobs.engine.resumption import whole_checkpoints
from jobs.scoring.mlflow_models.predictors import EXAMPLES, INPUTS, predictor_kind
from pipelines.storage import relative, resolve
from tempnet.network import PAIRED_DIRECTORY

CHECKPOINT, TEMPNET = "checkpoint", "tempnet"
"""Model types, by which MLflow's list of models can be filtered."""

# The wheel holds the code of the predictions; what else decides them, besides what its extra pins.
_PACKAGES = ("mlflow", "tokenizers", "torch", "transformers")


def record_checkpoints(run: TrackedRun, directory: str) -> None:
    """Record the complete checkpoints of a run as external models, and remove the models whose checkpoint is gone."""
    steps = {f"{directory}/{name}": step for name, step in whole_checkpoints(directory).items()}
    models = RunModels(run)
    recorded = {model.tags["uri"]: model.model_id for model in models.of_type(CHECKPOINT)}
    for uri in recorded.keys() - steps.keys():
        models.client.delete_logged_model(recorded[uri])
    for uri in sorted(steps.keys() - recorded.keys()):
        with models.added(f"checkpoint-{steps[uri]}", CHECKPOINT, uri=uri, step=steps[uri], is_external=True):
            pass  # it has no files but its description


def record_export(run: TrackedRun, export: str, *, step: int, max_gib: float) -> None:
    """Record a run's export (a path or URI) as a model that predicts temperatures, replacing any recorded before.

    An export without a TempNet is not recorded. Of one that is larger than `max_gib` only the TempNet is copied, and the
    model is an external one. `step` is the training step after which the export was written.
    """
    filesystem, path = resolve(export)
    sizes = {
        relative(file.path, path): file.size
        for file in filesystem.get_file_info(FileSelector(path, recursive=True))
        if file.type == FileType.File
    }
    of_tempnet = {name for name in sizes if name.startswith(PAIRED_DIRECTORY)}
    if not of_tempnet:
        return
    is_external = sum(sizes.values()) > max_gib * 2**30
    models = RunModels(run)
    for recorded in models.of_type(TEMPNET):
        models.client.delete_logged_model(recorded.model_id)
    with (
        tempfile.TemporaryDirectory(prefix="tempnet-model-") as copy,
        models.added(TEMPNET, TEMPNET, uri=export, step=step, is_external=is_external) as (model, to),
    ):
        for name in of_tempnet if is_external else sizes:
            target = (to if is_external else Path(copy)) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            pyarrow.fs.copy_files(f"{path}/{name}", str(target), source_filesystem=filesystem)
        if is_external:
            return
        kind = predictor_kind(Path(copy))
        assert kind is not None
        # These are only noise at the end of a run: a progress bar for every copy, and a log line for every check.
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        logging.getLogger("mlflow.pyfunc").setLevel(logging.WARNING)
        packages = [f"tempnet[pipeline]=={version('tempnet')}", *(f"{name}=={version(name)}" for name in _PACKAGES)]
        mlflow.pyfunc.save_model(
            to,
            mlflow_model=model,
            python_model=Path(__file__).with_name("model_code.py"),
            artifacts={"export": copy},
            pip_requirements=packages,
            signature=ModelSignature(inputs=INPUTS, outputs=kind.outputs),
            input_example=pd.DataFrame({"text": EXAMPLES}),
        )


class RunModels:
    def __init__(self, run: TrackedRun) -> None:
        self.client = MlflowClient(run.uri)
        self._run = self.client.get_run(run.run_id)

    def of_type(self, model_type: str) -> list[LoggedModel]:
        return self.client.search_logged_models(
            [self._run.info.experiment_id],
            filter_string=f"source_run_id = '{self._run.info.run_id}' AND model_type = '{model_type}'",
        )

    @contextmanager
    def added(
        self, name: str, model_type: str, *, uri: str, step: int, is_external: bool
    ) -> Iterator[tuple[Model, Path]]:
        """Create a model with the run's parameters and the step's validation scores; it is complete once the block ends.

        If the block raises an exception, the model is deleted.

        Yields:
            the model's MLflow description, and the path of the directory for all its files. Of an external model it holds
            the description; of any other the block must create it.
        """
        client, run = self.client, self._run
        run_id = run.info.run_id
        tags = {"uri": uri, "step": str(step)} | ({MLFLOW_MODEL_IS_EXTERNAL: "true"} if is_external else {})
        logged = client.create_logged_model(
            run.info.experiment_id,
            name=name,
            source_run_id=run_id,
            tags=tags,
            params=run.data.params,
            model_type=model_type,
        )
        try:
            with tempfile.TemporaryDirectory(prefix="tempnet-model-") as directory:
                to = Path(directory) / "model"
                model = Model(
                    artifact_path=logged.artifact_location,
                    run_id=run_id,
                    model_uuid=logged.model_id,
                    model_id=logged.model_id,
                    metadata=tags,
                )
                if is_external:
                    to.mkdir()
                    model.save(str(to / MLMODEL_FILE_NAME))
                yield model, to
                client.log_model_artifacts(logged.model_id, str(to))
            scores = [
                Metric(metric.key, metric.value, metric.timestamp, step, model_id=logged.model_id, run_id=run_id)
                for key in run.data.metrics
                if key.startswith("validation/")
                for metric in client.get_metric_history(run_id, key)
                if metric.step == step and metric.model_id is None
            ]
            client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, step)])
            client.log_batch(run_id, metrics=scores)
            client.finalize_logged_model(logged.model_id, "READY")
        except BaseException:
            client.delete_logged_model(logged.model_id)
            raise
