# megadit on NVIDIA's PyTorch image, which brings torch, TransformerEngine and NCCL built for its GPUs.
#   docker build -t megadit .
#   docker run --gpus all --ipc=host --ulimit memlock=-1 --ulimit stack=67108864 -it -v "$PWD/runs:/runs" megadit
# For Slurm (pyxis): enroot import --output megadit.sqsh dockerd://megadit, then cluster.container.image of `megadit slurm`.
ARG PYTORCH_IMAGE=nvcr.io/nvidia/pytorch:26.01-py3
FROM ${PYTORCH_IMAGE}
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# numactl: torchrun --numa-binding keeps each rank on the cores beside its GPU
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends numactl && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/megadit
COPY . .
# The image's own torch and TransformerEngine stay: pip may not replace what it finds installed. All else is ours: the
# image's PIP_CONSTRAINT pins libraries to versions that `deploy` may not take.
RUN pip list --format=freeze | grep -iE '^(torch|torchvision|transformer[-_]engine|triton)==' > /tmp/vendor.txt \
    && PIP_CONSTRAINT='' pip install --no-cache-dir --constraint /tmp/vendor.txt '.[train,deploy,wandb]' \
    && megadit doctor --extras train deploy wandb

WORKDIR /workspace
