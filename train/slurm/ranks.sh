#!/usr/bin/env bash
# @@{title}
# Submit it with sbatch; inside an allocation (salloc) run it with bash.
@@{header}
#SBATCH --requeue
#SBATCH --signal=B:USR1@@{notice}
set -uo pipefail

@@{preamble}
export CUDA_DEVICE_MAX_CONNECTIONS=1 # tensor parallelism overlaps in order
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=@@{grace} # seconds that ranks have for a last checkpoint
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # ranks that start again must not read what their predecessors stored

nodes=${SLURM_JOB_NUM_NODES:-@@{nodes}}
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
ranks=(
  torchrun
  --nnodes="$nodes" --nproc-per-node=@@{ranks} --max-restarts=@@{max_restarts} @@{numa_binding}
  --rdzv-backend=c10d --rdzv-endpoint="$head_node:$((20000 + SLURM_JOB_ID % 20000))"
  --rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"
  @@{program}
)
srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --kill-on-bad-exit=1 @@{srun_options} "${ranks[@]}" &
step=$!

# Slurm tells this shell in good time before the limit and at preemption: the ranks write a checkpoint and end.
told=0
trap 'told=1; kill -TERM "$step"' USR1 TERM
wait "$step"
code=$?
while kill -0 "$step" 2>/dev/null; do # a signal ends `wait` early
  wait "$step"
  code=$?
done
if [ "$told" = 1 ]; then
  echo "told to stop; the job goes back to the queue and continues from its checkpoint"
  scontrol requeue "$SLURM_JOB_ID" && exit 0
  echo "it cannot be requeued; run this script again to continue" >&2
fi
exit "$code"
