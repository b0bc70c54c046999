#!/usr/bin/env bash
# @@{title}
# Every node alone (dcgmi where it is installed; devices, and links between them), then all of them together.
@@{header}
set -uo pipefail

results=@@{results}/$SLURM_JOB_ID
mkdir -p "$results"
@@{preamble}
export results
scontrol show hostnames "$SLURM_JOB_NODELIST" >"$results/nodes"

# a node that does not answer in time has no result, which says as much
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 @@{srun_options} bash -c @@{on_node}

head_node=$(head -n 1 "$results/nodes")
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
  timeout @@{seconds} srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 @@{srun_options} \
    torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node=@@{ranks} \
    --rdzv-backend=c10d --rdzv-endpoint="$head_node:$((20000 + SLURM_JOB_ID % 12000))" --rdzv-id="$SLURM_JOB_ID" \
    -m megadit.infer.inspect.doctor --distributed >"$results/all.doctor" 2>&1
fi
python -m megadit.train.slurm.validate "$results" @@{exclude}
