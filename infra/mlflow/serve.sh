#!/usr/bin/env bash
# An MLflow server for a team: runs in PostgreSQL, artifacts in a directory or bucket, both reached through the server alone.
#
#   make mlflow-team                          on this machine only, with a PostgreSQL of its own in runs/ (postgres.sh)
#   MLFLOW_DATABASE=postgresql+psycopg://mlflow@db:5432/mlflow MLFLOW_ARTIFACTS=s3://bucket/mlflow \
#     MLFLOW_HOST=0.0.0.0 MLFLOW_ALLOWED_HOSTS=mlflow:5000 make mlflow-team
#
# The password of the database is in no URI, argument or log: libpq takes it from $PGPASSWORD, or from the file $PGPASSFILE
# (default ~/.pgpass; lines of host:port:database:user:password). Buckets need the usual credentials, here and nowhere else.
# Jobs log by --tracking.uri http://mlflow:5000. Who reaches the port may read and write: keep it inside a network that you trust.
#
# MLFLOW_HOST           what it listens on; default: this machine only
# MLFLOW_PORT           default 5000
# MLFLOW_ALLOWED_HOSTS  names (host:port, with commas) by which others call it; a name that is missing is answered by 403
# MLFLOW_WORKERS        processes; default 2
set -euo pipefail
cd "$(dirname "$0")/../.."

if [[ -z "${MLFLOW_DATABASE:-}" ]]; then
  infra/mlflow/postgres.sh "$PWD/runs/postgres"
  export PGPASSFILE="$PWD/runs/postgres/pgpass"
  MLFLOW_DATABASE="postgresql+psycopg://mlflow@127.0.0.1:${MLFLOW_POSTGRES_PORT:-5433}/mlflow"
fi
if [[ "$MLFLOW_DATABASE" == *://*:*@* ]]; then
  echo "error: MLFLOW_DATABASE holds a password: put it into PGPASSWORD or ~/.pgpass" >&2
  exit 2
fi
# MLflow's own background jobs, which would be further processes, serve nothing that is used here.
export MLFLOW_SERVER_ENABLE_JOB_EXECUTION="${MLFLOW_SERVER_ENABLE_JOB_EXECUTION:-false}"
exec mlflow server \
  --host "${MLFLOW_HOST:-127.0.0.1}" --port "${MLFLOW_PORT:-5000}" --workers "${MLFLOW_WORKERS:-2}" \
  --backend-store-uri "$MLFLOW_DATABASE" \
  --serve-artifacts --artifacts-destination "${MLFLOW_ARTIFACTS:-$PWD/runs/mlartifacts-team}" \
  ${MLFLOW_ALLOWED_HOSTS:+--allowed-hosts "$MLFLOW_ALLOWED_HOSTS"}
