#!/usr/bin/env bash
# @@{name}: applies its Jobs, and lets each go when those it waits for are complete. Stop it and start it again as you
# like: what is complete stays so, what runs goes on, what failed is made anew.
#   NAMESPACE=training bash run.sh      kubectl get jobs -l megadit/chain=@@{name} shows how far it is
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
kubectl() { command kubectl ${NAMESPACE:+--namespace="$NAMESPACE"} "$@"; }
declare -A files=() before=() outcome=()
order=()
stage() { # a Job, its file, and the Jobs it waits for
  order+=("$1")
  files[$1]=$2
  before[$1]="${*:3}"
}
@@{stages}

condition() { # Complete, Failed, or nothing
  kubectl get job "$1" --ignore-not-found \
    -o 'jsonpath={.status.conditions[?(@.type=="Complete")].type}{.status.conditions[?(@.type=="Failed")].type}'
}

for job in "${order[@]}"; do
  state=$(condition "$job")
  [ "$state" != Failed ] || kubectl delete job "$job" --wait=true
  found=$(kubectl get job "$job" --ignore-not-found -o name)
  [ -n "$found" ] || kubectl apply -f "${files[$job]}"
done

failed=0
while [ "${#outcome[@]}" -lt "${#order[@]}" ]; do
  for job in "${order[@]}"; do
    [ -z "${outcome[$job]:-}" ] || continue
    is_free=1
    for other in ${before[$job]}; do
      case ${outcome[$other]:-} in
        Complete) ;;
        Failed) outcome[$job]=Failed && echo "$job: left out, for $other failed" && continue 2 ;;
        *) is_free= ;;
      esac
    done
    [ -n "$is_free" ] || continue
    # days go by here: a call that the cluster does not answer is made again in the next round
    state=$(condition "$job") || continue
    case $state in
      Complete) outcome[$job]=Complete && echo "$job: complete" ;;
      Failed) outcome[$job]=Failed failed=1 && echo "$job: failed; kubectl logs job/$job" ;;
      *) kubectl patch job "$job" --type=merge -p '{"spec":{"suspend":false}}' >/dev/null || continue ;;
    esac
  done
  [ "${#outcome[@]}" -ge "${#order[@]}" ] || sleep "${POLL_SECONDS:-10}"
done
exit "$failed"
