#!/usr/bin/env bash
# Set up .venv where needed, then lint, types, docs and tests. Arguments go to pytest:
#   ./scripts/test.sh                       everything
#   ./scripts/test.sh tests/scheduler -x    a part
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh
prepare_environment test

stage() {
    local name=$1 start=$SECONDS
    shift
    say "$name"
    "$@"
    say "$name: $((SECONDS - start)) s"
}

python=.venv/bin/python
stage "ruff check" "$python" -m ruff check .
stage "ruff format" "$python" -m ruff format --check .
stage "mypy --strict" scripts/typecheck.sh
stage "docs are fresh" "$python" scripts/gen_docs.py --check
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
stage "pytest" "$python" -m pytest -n 2 "$@"
