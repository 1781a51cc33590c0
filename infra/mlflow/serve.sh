#!/usr/bin/env bash
# An MLflow server for a team: runs in PostgreSQL, artifacts in a directory or bucket, both reached through the server alone.
#
#   make mlflow-team                          on this machine only, with a PostgreSQL of its own in runs/ (postgres.sh)
#   MLFLOW_DATABASE=postgresql+psycopg://mlflow@db:5432/mlflow MLFLOW_ARTIFACTS=s3://bucket/mlflow \
#     MLFLOW_HOST=0.0.0.0 MLFLOW_ALLOWED_HOSTS=mlflow:5000 make mlflow-team
#
# The password of the database is in no URI, argument or log: libpq takes it from $PGPASSWORD, or from the file $PGPASSFILE
# (default ~/.pgpass; lines of host:port:database:user:password). Buckets need the usual credentials, here and nowhere else.
# Jobs log by --tracking.uri http://mlflow:5000, with a login in MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD.
# Without one nothing can be read or written. The user `admin` is made by the first start, with a password drawn at random;
# infra/mlflow/add_user.sh makes the others. MLflow does not encrypt: put a proxy with TLS before it where others may listen.
#
# MLFLOW_HOST           what it listens on; default: this machine only
# MLFLOW_PORT           default 5000
# MLFLOW_ALLOWED_HOSTS  names (host:port, with commas) by which others call it; a name that is missing is answered by 403
# MLFLOW_WORKERS        processes; default 2
# MLFLOW_LOGINS         directory of `admin-password` and `session-key`, readable by their owner only; default runs/mlflow-logins
# MLFLOW_AUTH_ADMIN_PASSWORD, MLFLOW_FLASK_SERVER_SECRET_KEY  in the place of these files
set -euo pipefail
umask 077
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
logins="${MLFLOW_LOGINS:-$PWD/runs/mlflow-logins}"
mkdir -p "$logins"
draw() { # Print what a file holds, which is drawn at random if the file is not there.
  [[ -s "$1" ]] || head -c 24 /dev/urandom | base64 | tr '+/' '-_' > "$1"
  cat "$1"
}
export MLFLOW_AUTH_ADMIN_PASSWORD="${MLFLOW_AUTH_ADMIN_PASSWORD:-$(draw "$logins/admin-password")}"
export MLFLOW_FLASK_SERVER_SECRET_KEY="${MLFLOW_FLASK_SERVER_SECRET_KEY:-$(draw "$logins/session-key")}"
export MLFLOW_AUTH_CONFIG_PATH="$logins/auth.ini"
# Users are kept beside the runs. Everyone with a login may add to every experiment; only its owner may delete it.
cat > "$MLFLOW_AUTH_CONFIG_PATH" <<END
[mlflow]
default_permission = EDIT
database_uri = ${MLFLOW_DATABASE//%/%%}
admin_username = admin
END
# MLflow's own background jobs, which would be further processes, serve nothing that is used here.
export MLFLOW_SERVER_ENABLE_JOB_EXECUTION="${MLFLOW_SERVER_ENABLE_JOB_EXECUTION:-false}"
export MLFLOW_DISABLE_TELEMETRY="${MLFLOW_DISABLE_TELEMETRY:-true}"  # no figures on its use go to MLflow's makers
exec mlflow server --app-name basic-auth \
  --host "${MLFLOW_HOST:-127.0.0.1}" --port "${MLFLOW_PORT:-5000}" --workers "${MLFLOW_WORKERS:-2}" \
  --backend-store-uri "$MLFLOW_DATABASE" \
  --serve-artifacts --artifacts-destination "${MLFLOW_ARTIFACTS:-$PWD/runs/mlartifacts-team}" \
  ${MLFLOW_ALLOWED_HOSTS:+--allowed-hosts "$MLFLOW_ALLOWED_HOSTS"}
