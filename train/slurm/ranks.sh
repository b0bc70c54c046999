#!/usr/bin/env bash
# @@{title}
# Submit it with sbatch; inside an allocation (salloc) run it with bash.
@@{header}
#SBATCH --requeue
#SBATCH --signal=B:USR1@@{notice}
set -uo pipefail

@@{begin}
@@{preamble}
@@{elastic_environment}

nodes=${SLURM_JOB_NUM_NODES:-@@{nodes}}
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# a port of the job's own, below 32768: Linux takes those from there on for any connection
ranks=(
  torchrun
  --nnodes="$nodes" --nproc-per-node=@@{ranks} --max-restarts=@@{max_restarts} @@{numa_binding}
  --rdzv-backend=c10d --rdzv-endpoint="$head_node:$((20000 + SLURM_JOB_ID % 12000))"
  --rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"
  @@{program}
)
srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --kill-on-bad-exit=1 @@{srun_options} "${ranks[@]}" &
step=$!

# Slurm tells this shell in good time before the limit (USR1): the ranks write a checkpoint and end, and the job goes back
# to the queue. TERM (scancel) and Ctrl-C end them as well, for good.
told=0
stop() { scancel --signal=TERM "$SLURM_JOB_ID"; } # the ranks alone; srun, told itself, would kill them at once
trap 'told=1; stop' USR1
trap stop TERM INT
wait "$step"
code=$?
while kill -0 "$step" 2>/dev/null; do # a signal ends `wait` early
  wait "$step"
  code=$?
done
if [ "$code" != 0 ] && scontrol show job "$SLURM_JOB_ID" 2>/dev/null | grep -q 'PreemptTime=[0-9]'; then
  told=1 # at preemption Slurm may tell the ranks and not this shell
fi
if [ "$told" = 1 ]; then
  echo "told to stop; the job goes back to the queue and continues from its checkpoint"
  outcome="waiting $SLURM_JOB_ID"
  scontrol requeue "$SLURM_JOB_ID" && exit 0
  outcome=
  echo "it cannot be requeued; run this script again to continue" >&2
fi
exit "$code"
