#!/usr/bin/env bash
# @@{name}: submits its stages; each starts when those it waits for have ended well.
#   submit.sh               all of them
#   submit.sh encode index  these; what they wait for is taken for done where it is not in the queue
#   submit.sh encode:3,17   these tasks of an array
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mkdir -p "$here/logs" "$here/state"
touch "$here/jobs"
declare -A jobs=() wanted=()
for word in "$@"; do
  case $word in
    *:*) wanted[${word%%:*}]=${word#*:} ;;
    *) wanted[$word]= ;;
  esac
done

queued() { # the job as which a stage was submitted before, while the queue has it
  local job
  job=$(awk -v stage="$1" '$1 == stage { job = $2 } END { print job }' "$here/jobs")
  if [ -n "$job" ] && [ -n "$(squeue --noheader --jobs="$job" 2>/dev/null)" ]; then
    echo "$job"
  fi
}

submit() { # a stage, and those it waits for
  local stage=$1 tasks= options=() waits= before job task
  if [ "${#wanted[@]}" != 0 ] && [ ! -v "wanted[$stage]" ]; then
    return
  fi
  tasks=${wanted[$stage]:-}
  for before in "${@:2}"; do
    job=${jobs[$before]:-$(queued "$before")}
    waits+=${job:+:$job}
  done
  [ -z "$waits" ] || options+=("--dependency=afterok$waits" --kill-on-invalid-dep=yes)
  [ -z "$tasks" ] || options+=("--array=$tasks")
  # nodes that `megadit slurm validate` found wanting
  [ ! -s "$here/exclude" ] || options+=("--exclude=$(paste -sd, "$here/exclude")")
  if [ -z "$tasks" ]; then rm -f "$here/state/$stage" "$here/state/$stage".*; fi
  for task in ${tasks//,/ }; do rm -f "$here/state/$stage.$task"; done
  job=$(sbatch --parsable "${options[@]}" "$here/$stage.sh")
  jobs[$stage]=${job%%;*}
  echo "$stage ${jobs[$stage]}" >>"$here/jobs"
  echo "$stage: job ${jobs[$stage]}"
}

@@{stages}
