#!/usr/bin/env bash
# mypy --strict on the torch-free half and the tools beside it.
set -euo pipefail
cd "$(dirname "$0")/.."

sources=(
    messages.py environ.py errors.py hardware.py server_args.py sampling_params.py startup.py launch_server.py server
    scheduler/radix.py scheduler/allocator.py scheduler/policy.py scheduler/scheduler.py scheduler/request.py
    loader/gguf.py loader/hadamard.py loader/packing.py loader/tokenizer.py loader/checkpoint.py loader/demo.py
    models/config.py models/state.py models/parse.py models/registry.py runner/memory.py
    bench
)
exec .venv/bin/python -m mypy --strict "${sources[@]/#/python/freetoken/}" scripts/gen_docs.py
