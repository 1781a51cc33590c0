#!/usr/bin/env bash
# A login for the MLflow server of serve.sh, with a password that is drawn at random and printed once.
#
#   infra/mlflow/add_user.sh NAME
#
# MLFLOW_TRACKING_URI   the server; default http://127.0.0.1:5000
# MLFLOW_LOGINS         directory with the password of `admin`; default runs/mlflow-logins
# MLFLOW_AUTH_ADMIN_PASSWORD  in the place of that file
set -euo pipefail
cd "$(dirname "$0")/../.."

name="${1:?give the name of the user}"
export MLFLOW_TRACKING_URI="${MLFLOW_TRACKING_URI:-http://127.0.0.1:5000}" MLFLOW_TRACKING_USERNAME=admin
export MLFLOW_TRACKING_PASSWORD="${MLFLOW_AUTH_ADMIN_PASSWORD:-$(cat "${MLFLOW_LOGINS:-$PWD/runs/mlflow-logins}/admin-password")}"
exec python - "$name" <<'END'
import secrets
import sys

import mlflow
from mlflow.exceptions import MlflowException
from mlflow.server import get_app_client

name, uri, password = sys.argv[1], mlflow.get_tracking_uri(), secrets.token_urlsafe(18)
try:
    get_app_client("basic-auth", tracking_uri=uri).create_user(name, password)
except MlflowException as error:
    sys.exit(f"error: {uri} did not make the user {name!r}: {error.message}")
print(f"export MLFLOW_TRACKING_USERNAME={name} MLFLOW_TRACKING_PASSWORD={password}")
END
