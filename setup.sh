#!/usr/bin/env bash
# What `make setup` runs: a virtual environment in .venv with everything in it, by uv where that is installed, else of the
# newest Python from 3.11 to 3.13 on the PATH. PYTHON=/path/to/python3.12 names another.
set -euo pipefail
cd "$(dirname "$0")"

EXTRAS=train,export,openvino,serve,c2pa,otel,postgres,t5,tables,wandb,dev
LOG=.venv/setup.log
torch=$(sed -n 's/^torch==//p' constraints.txt)

fail() {
    echo "error: $*" >&2
    exit 2
}

# Sets `python` to one that can make a virtual environment.
find_python() {
    local found="" candidate candidates=(python3.13 python3.12 python3.11 python3)
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        # a shim of pyenv may stand for nothing
        "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || continue
        found=$candidate
        if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            python=$candidate
            return
        fi
    done
    [ -n "$found" ] || fail "${PYTHON:-the PATH} has no Python from 3.11 to 3.13; install one (apt install python3-venv," \
        "dnf install python3.12) or uv (https://docs.astral.sh/uv), or name it: make setup PYTHON=/path/to/python3.12"
    local version
    version=$("$found" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
    fail "$found has no ensurepip, which makes virtual environments; on Debian and Ubuntu: apt install $version-venv"
}

# Whether an index that pip or uv is told of has this requirement.
is_there() {
    "${install[@]}" --dry-run --no-deps --quiet "$1" >/dev/null 2>&1
}

# Packages as they come, a line for each large one and for every fifty; uv has a display of its own.
progress() {
    awk -v all="$(wc -l <constraints.txt)" '
        /^ *Collecting / { if (++count % 50 == 0) { print "  " count " of about " all " packages"; fflush() } }
        /^ *(Downloading|Using cached) .*\([0-9.]+ (MB|GB)\)/ {
            size = $NF == "GB)" ? 1000 : substr($(NF - 1), 2) + 0
            if (size >= 50) { sub(/^ */, "  "); sub(/ https?:\/\/[^ ]*\//, " "); print; fflush() }
        }
        /^ *Installing collected packages/ { print "  installing them"; fflush() }'
}

if command -v uv >/dev/null && [ -z "${PYTHON:-}" ]; then
    [ -x .venv/bin/python ] || uv venv --quiet --seed --python '>=3.11,<3.14' .venv ||
        fail "uv found no Python from 3.11 to 3.13, and could not fetch one"
    install=(uv pip install --python .venv/bin/python)
else
    find_python
    [ -x .venv/bin/python ] && .venv/bin/python -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear .venv
    install=(.venv/bin/python -m pip install --disable-pip-version-check)
fi

what="torch with CUDA" size=7.3
constraints=(--constraint constraints.txt)
if [ ! -e /dev/nvidiactl ]; then
    if is_there "torch==$torch+cpu"; then
        echo "torch==$torch+cpu" >.venv/cpu.txt
        constraints+=(--constraint .venv/cpu.txt)
        what="torch for CPUs" size=4.2
    else
        echo "note: no index of torch's CPU wheels is configured, so its CUDA build is taken, 3 GB more; to change that:" \
            "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make setup"
    fi
fi
echo "Setting up .venv ($(.venv/bin/python --version), $what, Megatron-core, Energon): about $size GB on the disk," \
    "2 to 10 minutes, once."
free=$(df -Pk . | awk 'NR == 2 { printf "%.1f", $4 / 1e6 }')
[ -e .venv/.ready ] || awk -v free="$free" -v size="$size" 'BEGIN { exit free < size }' ||
    fail "$PWD/.venv takes about $size GB, and its disk has $free GB: make room for the rest"

start=$(date +%s)
{
    "${install[@]}" "${constraints[@]}" --editable ".[$EXTRAS]" &&
        # carries a real tritonserver; without its dependencies, because it asks for numpy<2 (serve/README.md)
        "${install[@]}" --no-deps nvidia-pytriton==0.7.0
} | tee "$LOG" | progress || fail "the installation failed; $PWD/$LOG holds what came before"
echo "Set up in $(($(date +%s) - start)) s."
