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

strict_sources() {
    local source
    for source in messages.py environ.py errors.py hardware.py server_args.py sampling_params.py server \
        scheduler/radix.py scheduler/allocator.py scheduler/policy.py scheduler/scheduler.py scheduler/request.py \
        loader/gguf.py loader/tokenizer.py loader/checkpoint.py loader/demo.py \
        models/config.py models/parse.py models/registry.py \
        bench/figures.py bench/report.py bench/datasets.py bench/client.py bench/serving.py; do
        printf '%s\n' "python/freetoken/$source"
    done
}

python=.venv/bin/python
mapfile -t strict < <(strict_sources)
stage "ruff check" "$python" -m ruff check .
stage "ruff format" "$python" -m ruff format --check .
stage "mypy --strict" "$python" -m mypy --strict "${strict[@]}"
stage "docs are fresh" "$python" scripts/gen_docs.py --check
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
stage "pytest" "$python" -m pytest -n 2 "$@"
