# `megadit slurm status` reads how each task ended, which outlives the queue's memory.
export TASK=${SLURM_ARRAY_TASK_ID:-} TASKS=@@{num_tasks}
state=@@{state}${TASK:+.$TASK}
mkdir -p "$(dirname "$state")"
echo "running ${SLURM_JOB_ID:-}" >"$state"
trap 'echo "${outcome:-$?}" >"$state"' EXIT
