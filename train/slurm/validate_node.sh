node=${SLURMD_NODENAME:-$(hostname)}
here=$results/$node
if command -v dcgmi >/dev/null; then
  timeout @@{seconds} dcgmi diag -r @@{level} >"$here.dcgmi" 2>&1
  echo $? >"$here.dcgmi.code"
fi
COLUMNS=200 timeout @@{seconds} torchrun --standalone --nproc-per-node=@@{ranks} -m megadit.infer.inspect.doctor \
  --distributed >"$here.doctor" 2>&1
echo $? >"$here.doctor.code"
