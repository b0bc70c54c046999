#!/usr/bin/env bash
# The fast tests on the machines that this one can be made to look like, one after the other:
#
#     tests/machines.sh                              each of the names once, in few runs
#     tests/machines.sh avx2 one-core                these two
#     tests/machines.sh avx2+one-core                one that is both
#     tests/machines.sh busy -- tests/train -k loop  these tests
#     tests/machines.sh --list                       the names
#
# What is not to be had here (an interpreter, another user) is left out, and said so. Environments of other
# interpreters, as `make setup` makes them, and copies stay in build/machines.
set -euo pipefail

ROOT=$(cd "$(dirname "$0")/.." && pwd)
FOLDER=$ROOT/build/machines
PYTHON=${PYTHON:-$ROOT/.venv/bin/python}
NAMES=(native avx2 no-vectors one-core busy c-locale spaces non-root offline python3.11 python3.12 python3.13)
ALL=(native avx2+spaces no-vectors+c-locale one-core non-root+offline busy python3.11 python3.12 python3.13)

left_out() {
    echo "$1"
    OUTCOME="left out"
}

copied() { # this checkout, with what is not committed yet, as another folder
    mkdir -p "$1"
    (cd "$ROOT" && git ls-files -z --cached --others --exclude-standard | xargs -0 ls -d 2>/dev/null | tar -c -T -) |
        tar -x -C "$1"
}

prepare() { # sets where, as whom and within what the tests run on a machine of this name
    case $1 in
    native) ;;
    avx2) SETTINGS+=(ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2) ;;
    no-vectors) SETTINGS+=(ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41) ;;
    one-core)
        command -v taskset >/dev/null || { left_out "there is no taskset" && return; }
        WITHIN+=(taskset -c "$("$PYTHON" -c 'import os; print(min(os.sched_getaffinity(0)))')")
        ;;
    busy) IS_BUSY=yes ;;
    c-locale) SETTINGS+=(LANGUAGE='' LANG=C LC_ALL=C) ;;
    spaces) COPY="a path with spaces" ;;
    non-root)
        [[ $(id -u) == 0 ]] || { left_out "nobody here is root" && return; }
        command -v setpriv >/dev/null || { left_out "there is no setpriv" && return; }
        setpriv --reuid nobody --regid "$(id -g nobody)" --clear-groups sh -c "exec '$PYTHON' -c ''" 2>/dev/null ||
            { left_out "$PYTHON lies in a folder that other users may not enter" && return; }
        COPY=${COPY:-megadit} OWNER=nobody
        WITHIN+=(setpriv --reuid nobody --regid "$(id -g nobody)" --clear-groups)
        ;;
    offline)
        local user=-n # only root needs no user of its own, in which it could not become another one
        unshare -n true 2>/dev/null || user=-rn
        unshare $user true 2>/dev/null || { left_out "no network can be taken away" && return; }
        WITHIN=(unshare $user sh -c 'ip link set lo up && exec "$@"' sh "${WITHIN[@]}")
        ;;
    python3.*)
        INTERPRETER=$("$1" -c 'import sys; print(sys.executable)' 2>/dev/null) ||  # a shim may stand for nothing
            { left_out "there is no $1" && return; }
        COPY=${COPY:-$1}
        ;;
    esac
}

run() {
    local COPIES=$FOLDER COPY='' INTERPRETER='' OWNER='' IS_BUSY='' SETTINGS=() WITHIN=() folder=$ROOT python=$PYTHON
    OUTCOME=passed
    for name in ${1//+/ }; do
        prepare "$name"
    done
    [[ $OUTCOME == passed ]] || return 0
    if [[ $OWNER ]]; then
        COPIES=$(mktemp -d)
        SETTINGS+=(HOME="$COPIES" TMPDIR="$COPIES")
    fi
    if [[ $COPY ]]; then
        folder=$COPIES/$COPY
        copied "$folder"
        SETTINGS+=(PYTHONPATH="$folder")
    fi
    if [[ $INTERPRETER ]]; then
        python=.venv/bin/python
        make -C "$folder" setup PYTHON="$INTERPRETER" || OUTCOME=failed
    fi
    [[ -z $OWNER ]] || chown -R "$OWNER" "$COPIES"
    if [[ $IS_BUSY ]]; then
        (while :; do :; done) &
    fi
    (cd "$folder" && env "${SETTINGS[@]}" "${WITHIN[@]}" \
        "$python" -m pytest -q --numprocesses "${WORKERS:-4}" "${SELECTED[@]}") || OUTCOME=failed
    [[ -z $IS_BUSY ]] || kill $!
    [[ -z $OWNER ]] || rm -rf "$COPIES"
}

are_names() {
    for name in ${1//+/ }; do
        [[ " ${NAMES[*]} " == *" $name "* ]] || return
    done
}

CHOSEN=()
while (($#)) && [[ $1 != -- ]]; do
    [[ $1 != --list ]] || { printf '%s\n' "${NAMES[@]}" && exit; }
    are_names "$1" || { echo "$1 is none of ${NAMES[*]}" >&2 && exit 2; }
    CHOSEN+=("$1")
    shift
done
(($#)) && shift
SELECTED=(-m "not slow" "$@")

FAILED=0
SUMMARY=()
((${#CHOSEN[@]})) || CHOSEN=("${ALL[@]}")
for machine in "${CHOSEN[@]}"; do
    echo "--- $machine"
    run "$machine"
    SUMMARY+=("$machine: $OUTCOME")
    [[ $OUTCOME != failed ]] || FAILED=1
done
printf '%s\n' "${SUMMARY[@]}"
exit $FAILED
