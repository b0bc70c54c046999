#!/usr/bin/env bash
# @@{title}
# Submit it with sbatch; inside an allocation (salloc) run it with bash.
@@{header}
set -uo pipefail

@@{begin}
@@{preamble}

srun --nodes=1 --ntasks=1 @@{srun_options} bash -c @@{program}
