#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: the GPU tests, then the committed GPU figures. Without arguments the first five groups, else those that are
# named, so that it can be done in turns:
#   tests     every test that needs a GPU
#   ops       each fused op beside its reference and the roof
#   dense     Qwen3-8B, without and with HTTP, and under a grammar
#   hybrid    Qwen3.5-27B in bf16: steps, and a hit of a long prefix
#   packed    the 27B in 2 bits, without and with HTTP
#   experts   mixtures of experts in bf16 and FP8
#   ab        three flags, each on and off in pairs of fresh processes: prefill, and decode with graphs and without
#   start     a server of the 27B in 2 bits: its start and first prompts, with an empty cache of kernels and a full one
#   replay    calls recorded from steps of Qwen3-8B and the 27B in 2 bits: fused beside the reference
#   qwen4     qwen4_exp in its published size and FP8, its table page-locked: some 140 GB of GPU and 50 GB of host memory
#   profile   where the time of a step of these goes; traces and drawings go to PROFILES, default a new folder
#
# Needs torch, triton, numpy, safetensors and transformers; the HTTP part also what serving needs, found on PYTHONPATH or
# installed. Figures go to OUT, default benchmarks/results/CARD, and with card, driver and versions to OUT/gpu-check.json. A part that fails is named and the rest still runs; the
# exit status is 1 then. Shell variables: OUT, PYTHON (default .venv/bin/python, else python3), PORT (default 30087),
# PROFILES.
set -uo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-}
if [ -z "$python" ]; then
    python=python3
    [ -x .venv/bin/python ] && python=.venv/bin/python
fi
if ! command -v "$python" >/dev/null; then
    echo "error: there is no Python at $python; PYTHON names one" >&2
    exit 1
fi
port=${PORT:-30087}
export PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}"

card=$("$python" -c 'from freetoken.bench.figures import folder_name, gpu_name; n = gpu_name(); print(folder_name(n) if n else "")')
if [ -z "$card" ]; then
    echo "error: no NVIDIA GPU is visible" >&2
    exit 1
fi
out=${OUT:-benchmarks/results/$card}
profiles=${PROFILES:-$(mktemp -d)}
mkdir -p "$out"
model=(--model-path benchmarks/configs/qwen3-8b --load-format dummy --dtype bfloat16 --random-seed 1)
label="Qwen3-8B geometry, bf16, random weights"
hybrid=(--model-path benchmarks/configs/qwen3.5-27b --load-format dummy --dtype bfloat16 --random-seed 1)
hybrid_label="Qwen3.5-27B geometry, bf16, random weights"
experts=(--model-path benchmarks/configs/qwen3-30b-a3b --load-format dummy --dtype bfloat16 --random-seed 1)
experts_label="Qwen3-30B-A3B geometry, bf16, random weights"
fp8=(--model-path benchmarks/configs/qwen3.5-35b-a3b-fp8 --load-format dummy --dtype bfloat16 --random-seed 1)
fp8_label="Qwen3.5-35B-A3B geometry, FP8, random weights"
qwen4=(--model-path benchmarks/configs/qwen3.8-flash-next-fp8 --load-format dummy --dtype bfloat16 --random-seed 1)
qwen4+=(--ple-table pinned --context-length 20000 --max-running-requests 8 --cuda-graph-bs 1 4 8 --state-cache-gb 0)
qwen4+=(--max-prefill-tokens 4096 --mem-fraction-static 0.97)
qwen4_label="Qwen3.8-Flash-Next geometry, FP8, random weights"
# The 27B in 2 bits, rotated.
packed=(--model-path benchmarks/configs/qwen3.5-27b-pq2 --load-format dummy --dtype bfloat16 --random-seed 1)
packed_label="27B PQ2_0 random"
# Of ab: layers of the published size, three of linear and one of full attention, and what makes a start short.
cut='"num_hidden_layers": 4, "vocab_size": 32768, "eos_token_id": 1'
cut_label="4 layers and 32,768 ids"
qwen4_cut="{$cut, \"num_experts\": 32, \"ngram_vocab_size_base\": 100000}"
input=1024
output=256
failed=()
server=

log=$(mktemp)

stop_server() {
    # The server drains and exits 0 on SIGTERM; anything else is a failure.
    local pid=$server
    server=
    [ -n "$pid" ] || return 0
    kill -TERM "$pid" 2>/dev/null
    wait "$pid"
}

finish() {
    stop_server
    rm -f "$log"
}
trap finish EXIT

part() {
    local name=$1 start=$SECONDS
    shift
    echo "==> $name"
    if "$@"; then
        echo "==> $name: $((SECONDS - start)) s"
    else
        failed+=("$name")
        echo "==> $name FAILED after $((SECONDS - start)) s"
    fi
}

start_server() {
    # Arguments: those of the server.
    "$python" -m freetoken.launch_server "$@" --port "$port" --context-length 4096 >"$log" 2>&1 &
    server=$!
    local deadline=$((SECONDS + 150))
    until "$python" -c "import urllib.request as u; u.urlopen('http://127.0.0.1:$port/health', timeout=5)" 2>/dev/null; do
        if ! kill -0 "$server" 2>/dev/null || [ "$SECONDS" -ge "$deadline" ]; then
            echo "the server did not become healthy"
            return 1
        fi
        sleep 0.5
    done
}

serving() {
    # Arguments: streams, label, file of figures, tokens in.
    local streams=$1
    "$python" -m freetoken.bench.serving --port "$port" --label "$2" --max-concurrency "$streams" \
        --num-prompts $((streams > 2 ? 2 * streams : 4)) --random-input-len "$4" --random-output-len "$output" \
        --warmup-requests "$streams" --flush-cache --disable-tqdm --seed "$streams" --output-file "$out/$3.jsonl"
}

running() {
    [ -n "$server" ] && kill -0 "$server" 2>/dev/null
}

replay() {
    # Arguments: label, flags of the model. Records two decode steps, compares, and times pairs.
    local label=$1 folder status=0
    shift
    folder=$(mktemp -d)
    "$python" -m freetoken.bench.replay capture "$folder/capture" "$@" --layers 0 3 --positions 0 64 --input-len "$input" &&
        "$python" -m freetoken.bench.replay run "$folder/capture" --impl triton --versus reference --label "$label" \
            --output "$out/replay.jsonl" || status=1
    rm -rf "$folder"
    return "$status"
}

profile() {
    # Arguments: name of the figures, label, those of the profile. Traces and drawings go to a folder below PROFILES.
    local name=$1 label=$2
    shift 2
    "$python" -m freetoken.bench.profile "$@" --label "$label" --kernels 12 --folder "$profiles/$name" \
        --output "$out/$name-profile.jsonl"
}

ab() {
    # Arguments: flag, label, tokens out, repeats, those of the model. Most of a run is the start of its process, so that all are made ready at once.
    local flag=$1 label=$2 tokens=$3 repeats=$4
    shift 4
    "$python" -m freetoken.bench.ab --flag "$flag" --control-pairs 5 --pairs 5 --ahead 20 --disable-tqdm --label "$label" \
        --output "$out/ab.jsonl" -- "$@" --shape "1x$input" --output-len "$tokens" --repeats "$repeats" --no-roof --eager-too \
        --mem-fraction-static 0.95
}

op_figures() {
    "$python" -m freetoken.bench.ops all --output "$out/ops.jsonl"
}

wanted() {
    # Whether the group was asked for; its old figures are then dropped, since those to come replace them.
    local group=$1 name
    shift
    case " $groups " in *" $group "*) ;; *) return 1 ;; esac
    for name in "$@"; do
        rm -f "$out/$name.jsonl"
        files+=("$name")
    done
}

usual="tests ops dense hybrid packed"
known="$usual experts ab start qwen4 profile replay"
groups=${*:-$usual}
for group in $groups; do
    case " $known " in
        *" $group "*) ;;
        *)
            echo "error: there is no group $group; they are $known" >&2
            exit 1
            ;;
    esac
done
# Said at once, and not after minutes of what needs less.
case " $groups " in
    *" tests "* | *" dense "* | *" hybrid "* | *" packed "* | *" start "*)
        if ! missing=$("$python" -c 'import freetoken.launch_server' 2>&1); then
            echo "error: the groups tests, dense, hybrid, packed and start need all that serving needs: ${missing##*$'\n'}" >&2
            exit 1
        fi
        ;;
esac
files=()

if wanted tests; then
    # Most of the time goes to compiling, which several processes share; each takes some GB of the GPU's memory.
    workers=$(nproc)
    part "GPU tests" "$python" -m pytest -q -m gpu -n $((workers < 16 ? workers : 16)) --continue-on-collection-errors tests
fi
if wanted ops ops; then
    part "ops" op_figures
fi
if wanted dense qwen3-8b-one-batch qwen3-8b-serving; then
    part "one batch" "$python" -m freetoken.bench.one_batch "${model[@]}" --label "$label" \
        --shape "1x$input" "16x$input" "64x$input" 8x2048 --output-len "$output" --repeats 2 --compare-grammar "16x$input" \
        --output "$out/qwen3-8b-one-batch.jsonl"
    part "server start" start_server "${model[@]}" --max-running-requests 64 --served-model-name qwen3-8b \
        --cuda-graph-bs 1 2 4 8 16 32 64
    if running; then
        for streams in 1 16 64; do
            part "serving, $streams streams" serving "$streams" "$label" qwen3-8b-serving "$input"
        done
    fi
    part "server stop" stop_server
fi
if wanted hybrid qwen3.5-27b-one-batch qwen3.5-27b-prefix-hit; then
    part "one batch, hybrid" "$python" -m freetoken.bench.one_batch "${hybrid[@]}" --label "$hybrid_label" \
        --shape "1x$input" 1x8192 "16x$input" --output-len 64 --repeats 2 --output "$out/qwen3.5-27b-one-batch.jsonl"
    part "prefix hit, hybrid" "$python" -m freetoken.bench.prefix_hit "${hybrid[@]}" --label "$hybrid_label" \
        --max-running-requests 4 --context-length 9000 --output "$out/qwen3.5-27b-prefix-hit.jsonl"
fi
if wanted experts qwen3-30b-a3b-one-batch qwen3.5-35b-a3b-fp8-one-batch; then
    part "one batch, experts" "$python" -m freetoken.bench.one_batch "${experts[@]}" --label "$experts_label" \
        --shape "1x$input" "8x$input" "64x$input" --output-len 64 --repeats 2 --output "$out/qwen3-30b-a3b-one-batch.jsonl"
    part "one batch, FP8 experts" "$python" -m freetoken.bench.one_batch "${fp8[@]}" --label "$fp8_label" \
        --shape "1x$input" "8x$input" "64x$input" --output-len 64 --repeats 2 \
        --output "$out/qwen3.5-35b-a3b-fp8-one-batch.jsonl"
fi
if wanted packed qwen3.5-27b-pq2-one-batch qwen3.5-27b-pq2-serving; then
    part "one batch, 2 bits" "$python" -m freetoken.bench.one_batch "${packed[@]}" --label "$packed_label" \
        --shape 1x128 1x8192 8x128 32x128 --output-len 192 --repeats 2 \
        --output "$out/qwen3.5-27b-pq2-one-batch.jsonl"
    part "server start, 2 bits" start_server "${packed[@]}" --max-running-requests 32 --served-model-name qwen3.5-27b \
        --state-cache-gb 2 --cuda-graph-bs 1 4 8 16 32
    if running; then
        for streams in 1 8 32; do
            part "serving in 2 bits, $streams streams" serving "$streams" "$packed_label" qwen3.5-27b-pq2-serving 128
        done
    fi
    part "server stop, 2 bits" stop_server
fi
if wanted ab ab; then
    part "ab, convolution of the delta rule" ab FREETOKEN_GDN_FUSED_CONV "$hybrid_label, $cut_label" 32 12 "${hybrid[@]}" \
        --json-model-override-args "{$cut}"
    # Few tokens, as the reference of these products launches thousands of kernels a step.
    part "ab, products in 2 bits" ab FREETOKEN_PQ2_FUSED_GEMV "$packed_label, $cut_label" 12 5 "${packed[@]}" \
        --json-model-override-args "{$cut}"
    part "ab, hash of n-grams" ab FREETOKEN_PLE_FUSED_HASH "$qwen4_label, $cut_label, 32 experts, 1.6 million rows of n-grams" 32 12 \
        --model-path benchmarks/configs/qwen3.8-flash-next-fp8 --load-format dummy --dtype bfloat16 --random-seed 1 \
        --ple-table gpu --json-model-override-args "$qwen4_cut"
fi
if wanted start start; then
    part "start" "$python" -m freetoken.bench.start --label "$packed_label" --output "$out/start.jsonl" -- "${packed[@]}" \
        --context-length 4096 --max-running-requests 32 --state-cache-gb 2 --cuda-graph-bs 1 4 8 16 32
fi
if wanted replay replay; then
    part "replay" replay "$label" "${model[@]}"
    part "replay, 2 bits" replay "$packed_label" "${packed[@]}"
fi
if wanted qwen4 qwen3.8-flash-next-fp8-one-batch; then
    part "one batch, qwen4_exp" "$python" -m freetoken.bench.one_batch "${qwen4[@]}" --label "$qwen4_label" \
        --shape "1x$input" "4x$input" "8x$input" 1x4096 1x8192 1x16384 --output-len 64 --repeats 2 \
        --output "$out/qwen3.8-flash-next-fp8-one-batch.jsonl"
    export FREETOKEN_PLE_FUSED_HASH=0
    part "one batch, qwen4_exp, hash by torch" "$python" -m freetoken.bench.one_batch "${qwen4[@]}" \
        --label "$qwen4_label, FREETOKEN_PLE_FUSED_HASH=0" --shape "1x$input" 1x4096 1x8192 1x16384 --output-len 16 \
        --repeats 2 --output "$out/qwen3.8-flash-next-fp8-one-batch.jsonl"
    unset FREETOKEN_PLE_FUSED_HASH
fi
if wanted profile qwen3-8b-profile qwen3.5-27b-profile qwen3.5-35b-a3b-fp8-profile qwen3.5-27b-pq2-profile; then
    part "profile" profile qwen3-8b "$label" "${model[@]}" --shape "1x$input" "16x$input"
    part "profile, hybrid" profile qwen3.5-27b "$hybrid_label" "${hybrid[@]}" --shape "1x$input"
    part "profile, FP8 experts" profile qwen3.5-35b-a3b-fp8 "$fp8_label" "${fp8[@]}" --shape "1x$input" "8x$input"
    part "profile, 2 bits" profile qwen3.5-27b-pq2 "$packed_label" "${packed[@]}" --shape 1x128 8x128
fi

echo
echo "Figures in $out:"
found=()
for name in "${files[@]}"; do
    [ -f "$out/$name.jsonl" ] && found+=("$out/$name.jsonl")
done
"$python" -m freetoken.bench.summary "${found[@]}" --json "$out/gpu-check.json" --groups $groups --seconds "$SECONDS" --failed "${failed[@]}" ||
    failed+=("summary")
if [ "${#failed[@]}" -gt 0 ]; then
    echo "The server's last lines:"
    tail -n 40 "$log"
    printf 'FAILED: %s\n' "${failed[@]}"
    exit 1
fi
