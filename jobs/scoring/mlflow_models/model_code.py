"""The code of the logged model, which MLflow copies and runs ("models from code"), so that nothing is pickled.

All else comes from the installed package `tempnet`: from its wheel or from a checkout.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pandas as pd
from mlflow.models import set_model
from mlflow.pyfunc import PythonModel, PythonModelContext

from tempnet.command import jobs_directory

if (place := str(jobs_directory())) not in sys.path:
    sys.path.append(place)
from jobs.scoring.mlflow_models.predictors import TextPredictor, predictor_kind


class TemperatureModel(PythonModel):
    """Turns a table with the column `text` into one with the column `tau` and any others of this kind of export."""

    def load_context(self, context: PythonModelContext) -> None:
        export = Path(context.artifacts["export"])
        kind = predictor_kind(export)
        assert kind is not None, "only an export with a TempNet is logged"
        self._predict: TextPredictor = kind(export)

    def predict(
        self, context: PythonModelContext, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> pd.DataFrame:
        return self._predict(model_input["text"].tolist())


set_model(TemperatureModel())
