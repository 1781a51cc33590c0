"""The commands of the project: training, evaluation, prediction and data preparation."""

import os

# MLflow sends figures on its use to its makers from the moment that it is imported, unless this says otherwise.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
