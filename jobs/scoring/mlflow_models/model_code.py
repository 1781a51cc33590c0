"""The code of a logged model, which MLflow copies and runs: models from code, nothing is pickled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from mlflow.models import set_model
from mlflow.pyfunc import PythonModel, PythonModelContext

from jobs.scoring.mlflow_models.predictors import TextPredictor, predictor_kind


class TemperatureModel(PythonModel):
    """A table with a column `text` → a table with a column `tau`, and what else the kind of export gives."""

    def load_context(self, context: PythonModelContext) -> None:
        """Read the export."""
        export = Path(context.artifacts["export"])
        kind = predictor_kind(export)
        assert kind is not None, "only an export with a TempNet is logged"
        self._predict: TextPredictor = kind(export)

    def predict(
        self, context: PythonModelContext, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> pd.DataFrame:
        """A row for every row."""
        return self._predict(model_input["text"].tolist())


set_model(TemperatureModel())
