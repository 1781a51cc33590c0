#!/usr/bin/env bash
# A PostgreSQL for serve.sh where there is none: made once in a directory, listening on this machine only. It stays when the
# server ends; `pg_ctl -D DIRECTORY/data stop` ends it. The user and the database are `mlflow`; the password is drawn at random
# and lies in DIRECTORY/pgpass, which only its owner can read.
#
#   infra/mlflow/postgres.sh DIRECTORY        port: $MLFLOW_POSTGRES_PORT, default 5433
set -euo pipefail
umask 077
directory="$1" port="${MLFLOW_POSTGRES_PORT:-5433}"

if [[ $EUID == 0 ]]; then
  echo "error: PostgreSQL refuses to run as root: start this as another user, or give MLFLOW_DATABASE (serve.sh)" >&2
  exit 2
fi
if [[ ! -e "$directory/data/PG_VERSION" ]]; then
  mkdir -p "$directory"
  password="$(head -c 24 /dev/urandom | base64 | tr '+/' '-_')"
  initdb --pgdata "$directory/data" --username mlflow --auth scram-sha-256 --pwfile <(printf '%s\n' "$password") \
    --encoding UTF8 --no-instructions > "$directory/initdb.log"
  printf '127.0.0.1:*:*:mlflow:%s\n' "$password" > "$directory/pgpass"
fi
pg_ctl --pgdata "$directory/data" status > /dev/null || pg_ctl --pgdata "$directory/data" --wait --silent \
  --log "$directory/postgres.log" --options "-c listen_addresses=127.0.0.1 -p $port -k $directory" start
export PGPASSFILE="$directory/pgpass"
psql() { command psql --host 127.0.0.1 --port "$port" --username mlflow --no-password --quiet --tuples-only "$@"; }
[[ -n "$(psql --command "SELECT 1 FROM pg_database WHERE datname = 'mlflow'" postgres)" ]] ||
  psql --command "CREATE DATABASE mlflow" postgres
