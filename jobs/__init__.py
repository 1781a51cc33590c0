"""The commands of the project: training, evaluation, prediction and data preparation."""

import os
import sys
from importlib.util import find_spec

if sys.argv[:1] == ["-m"] and any(find_spec(name) is None for name in ("ray", "torch", "tyro")):
    # A command of the README with another Python than that of the environment.
    print(
        f"error: {sys.executable} lacks the packages of this project: type `make setup`, which makes the environment .venv, "
        "and run the command with .venv/bin/python",
        file=sys.stderr,
    )
    raise SystemExit(2)

# MLflow sends figures on its use to its makers from the moment that it is imported, unless this says otherwise.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
