#!/usr/bin/env bash
# The fast tests on the machines that this one can be made to look like, one after the other:
#
#     tests/machines.sh                              all of them
#     tests/machines.sh avx2 one-core                these
#     tests/machines.sh busy -- tests/train -k loop  these tests
#     tests/machines.sh --list                       their names
#
# What is not to be had here (an interpreter, another user) is left out, and said so. Environments of other
# interpreters, as `make setup` makes them, and copies stay in build/machines.
set -euo pipefail

ROOT=$(cd "$(dirname "$0")/.." && pwd)
FOLDER=$ROOT/build/machines
PYTHON=${PYTHON:-$ROOT/.venv/bin/python}
AVX2=(ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2)
NAMES=(native avx2 no-vectors one-core busy c-locale spaces non-root offline python3.11 python3.12 python3.13)
NOT_HERE=77

tests() { # the tests, in this folder, by this interpreter, after these settings of the environment
    local folder=$1 python=$2
    shift 2
    (cd "$folder" && env "$@" "$python" -m pytest -q --numprocesses "${WORKERS:-3}" "${SELECTED[@]}")
}

not_here() {
    echo "$1"
    return $NOT_HERE
}

copied() { # this checkout, with what is not committed yet, as another folder
    mkdir -p "$1"
    (cd "$ROOT" && git ls-files -z --cached --others --exclude-standard | xargs -0 ls -d 2>/dev/null | tar -c -T -) |
        tar -x -C "$1"
}

installed() { # an environment of another interpreter
    command -v "$1" >/dev/null || not_here "there is no $1" || return
    copied "$FOLDER/$1"
    make -C "$FOLDER/$1" setup PYTHON="$(command -v "$1")" && tests "$FOLDER/$1" .venv/bin/python
}

run() {
    case $1 in
    native) tests "$ROOT" "$PYTHON" ;;
    avx2) tests "$ROOT" "$PYTHON" "${AVX2[@]}" ;;
    no-vectors) tests "$ROOT" "$PYTHON" ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 ;;
    one-core)
        command -v taskset >/dev/null || not_here "there is no taskset" || return
        tests "$ROOT" "$PYTHON" taskset -c "$("$PYTHON" -c 'import os; print(min(os.sched_getaffinity(0)))')"
        ;;
    busy)
        (while :; do :; done) &
        local busy=$! code=0
        tests "$ROOT" "$PYTHON" || code=$?
        kill "$busy"
        return $code
        ;;
    c-locale) tests "$ROOT" "$PYTHON" -u LANGUAGE LANG=C LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 ;;
    spaces)
        copied "$FOLDER/a path with spaces"
        tests "$FOLDER/a path with spaces" "$PYTHON" PYTHONPATH="$FOLDER/a path with spaces"
        ;;
    non-root)
        [[ $(id -u) == 0 ]] || not_here "nobody here is root" || return
        command -v setpriv >/dev/null || not_here "there is no setpriv" || return
        local home
        home=$(mktemp -d) && copied "$home/megadit" && chown -R nobody "$home"
        local code=0
        tests "$home/megadit" "$PYTHON" HOME="$home" TMPDIR="$home" PYTHONPATH="$home/megadit" \
            setpriv --reuid nobody --clear-groups || code=$?
        rm -rf "$home"
        return $code
        ;;
    offline)
        unshare -rn true 2>/dev/null || not_here "no network can be taken away" || return
        tests "$ROOT" "$PYTHON" unshare -rn sh -c 'ip link set lo up && exec "$@"' sh
        ;;
    python3.*) installed "$1" ;;
    *) echo "$1 is none of ${NAMES[*]}" && return 2 ;;
    esac
}

CHOSEN=()
while (($#)) && [[ $1 != -- ]]; do
    [[ $1 != --list ]] || { printf '%s\n' "${NAMES[@]}" && exit; }
    [[ " ${NAMES[*]} " == *" $1 "* ]] || { echo "$1 is none of ${NAMES[*]}" >&2 && exit 2; }
    CHOSEN+=("$1")
    shift
done
(($#)) && shift
SELECTED=(-m "not slow" "$@")

FAILED=0
SUMMARY=()
((${#CHOSEN[@]})) || CHOSEN=("${NAMES[@]}")
for name in "${CHOSEN[@]}"; do
    echo "--- $name"
    code=0
    run "$name" || code=$?
    case $code in
    0) SUMMARY+=("$name: passed") ;;
    "$NOT_HERE") SUMMARY+=("$name: left out") ;;
    *) SUMMARY+=("$name: failed") FAILED=1 ;;
    esac
done
printf '%s\n' "${SUMMARY[@]}"
exit $FAILED
