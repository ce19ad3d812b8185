#!/usr/bin/env bash
# mypy --strict on the torch-free half and the tools beside it.
set -euo pipefail
cd "$(dirname "$0")/.."

sources=(
    messages.py environ.py errors.py hardware.py server_args.py resolve.py sampling_params.py startup.py launch_server.py server
    config_file.py crash_dump.py logs.py scheduler/steps.py scheduler/watchdog.py
    scheduler/radix.py scheduler/allocator.py scheduler/policy.py scheduler/scheduler.py scheduler/request.py
    scheduler/queue.py scheduler/preemption.py scheduler/grammar.py grammar
    loader/gguf.py loader/hadamard.py loader/packing.py loader/tokenizer.py loader/checkpoint.py loader/ple_table.py loader/demo.py
    models/config.py models/ple_config.py models/state.py models/parse.py models/parse_moe.py models/parse_qwen4_exp.py models/registry.py runner/memory.py
    runner/row_reader.py
    profiling/__init__.py profiling/roles.py profiling/trace.py profiling/accounting.py profiling/traffic.py profiling/summary.py
    bench
)
exec "${PYTHON:-.venv/bin/python}" -m mypy --strict "${sources[@]/#/python/freetoken/}" scripts/gen_docs.py
