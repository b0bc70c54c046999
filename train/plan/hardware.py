"""Hardware known to the planner, from data sheets."""

from dataclasses import dataclass

from megadit.models.shared.errors import choose_one
from megadit.models.shared.resources import GIB, available_cores, threads_of_a_rank

GB = 10**9
TERA = 10**12


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One accelerator, or a share of a CPU, and its links; rates are those of the data sheet, in one direction."""

    name: str
    memory: float
    """Memory in bytes (GB of data sheets are 2^30)."""
    bf16_flops: float
    """Dense matrix products, operations per second."""
    memory_bandwidth: float
    """Bytes per second."""
    link_bandwidth: float
    """Bandwidth to the other GPUs of a node in bytes per second (NVLink, or else PCIe)."""
    network_bandwidth: float
    """Network bandwidth per GPU in bytes per second."""
    host_bandwidth: float = 64 * GB
    """Bandwidth to the host's memory in bytes per second: PCIe 5, 16 lanes, unless told otherwise."""
    per_node: int = 8
    is_cpu: bool = False
    """Whether it is a share of this machine's CPU cores."""
    small_speed: float = 1.0
    """Relative speed of a CPU core: `machine.small_operations_speed`."""


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            name="a100-40gb",
            memory=40 * GIB,
            bf16_flops=312 * TERA,
            memory_bandwidth=1555 * GB,
            link_bandwidth=300 * GB,
            network_bandwidth=25 * GB,
            host_bandwidth=32 * GB,
        ),
        Gpu(
            name="a100-80gb",
            memory=80 * GIB,
            bf16_flops=312 * TERA,
            memory_bandwidth=2039 * GB,
            link_bandwidth=300 * GB,
            network_bandwidth=25 * GB,
            host_bandwidth=32 * GB,
        ),
        Gpu(
            name="l40s-48gb",
            memory=48 * GIB,
            bf16_flops=362 * TERA,
            memory_bandwidth=864 * GB,
            link_bandwidth=32 * GB,
            network_bandwidth=25 * GB,
            host_bandwidth=32 * GB,
        ),
        Gpu(
            name="h100-80gb",
            memory=80 * GIB,
            bf16_flops=989 * TERA,
            memory_bandwidth=3350 * GB,
            link_bandwidth=450 * GB,
            network_bandwidth=50 * GB,
        ),
        Gpu(
            name="h200-141gb",
            memory=141 * GIB,
            bf16_flops=989 * TERA,
            memory_bandwidth=4800 * GB,
            link_bandwidth=450 * GB,
            network_bandwidth=50 * GB,
        ),
        Gpu(
            name="b200-180gb",
            memory=180 * GIB,
            bf16_flops=2250 * TERA,
            memory_bandwidth=8000 * GB,
            link_bandwidth=900 * GB,
            network_bandwidth=50 * GB,
        ),
        Gpu(
            name="b300-288gb",
            memory=288 * GIB,
            bf16_flops=2250 * TERA,
            memory_bandwidth=8000 * GB,
            link_bandwidth=900 * GB,
            network_bandwidth=100 * GB,
        ),
        Gpu(
            name="rtx-pro-6000-96gb",
            memory=96 * GIB,
            bf16_flops=504 * TERA,
            memory_bandwidth=1792 * GB,
            link_bandwidth=64 * GB,
            network_bandwidth=50 * GB,
        ),
        Gpu(
            name="gb200-186gb",
            memory=186 * GIB,
            bf16_flops=2500 * TERA,
            memory_bandwidth=8000 * GB,
            link_bandwidth=900 * GB,
            network_bandwidth=50 * GB,
            host_bandwidth=225 * GB,
            per_node=4,
        ),
    )
}
"""GPUs by name. Network: one 400 Gb/s port per GPU from Hopper on, 200 Gb/s before."""


def ranks_that_gain() -> int:
    """Number of ranks for training a small network on this machine: one for each GPU, or without GPUs for each core; at
    most two, because each waits for the others at every step."""
    import torch

    return min(2, torch.cuda.device_count() or available_cores())


def this_device(ranks: int) -> Gpu:
    """Hardware of one of `ranks` ranks on this machine: its GPU, from the table or as torch reports it; without GPUs a
    share of the usable CPU cores."""
    import torch

    from megadit.models.machine import matmul_flops, small_operations_speed

    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        alike = [gpu for gpu in GPUS.values() if gpu.name.rpartition("-")[0].replace("-", " ") in found.name.lower()]
        if alike:
            return min(alike, key=lambda gpu: abs(gpu.memory - found.total_memory))
        rate = matmul_flops(torch.device("cuda"), torch.bfloat16)
    else:
        rate = matmul_flops(torch.device("cpu"), torch.float32) * threads_of_a_rank(ranks) / torch.get_num_threads()
    return Gpu(
        name=f"this machine's {'cuda' if torch.cuda.is_available() else 'cpu'}",
        memory=this_machines_memory(ranks),
        bf16_flops=rate,
        memory_bandwidth=10 * GB,  # of a CPU's core; loopback carries about as much
        link_bandwidth=2 * GB,
        network_bandwidth=2 * GB,
        is_cpu=not torch.cuda.is_available(),
        small_speed=1.0 if torch.cuda.is_available() else small_operations_speed(),
    )


def this_machines_memory(ranks: int) -> float:
    """Free bytes for each of `ranks` ranks on this machine."""
    import torch

    from megadit.models.machine import free_memory

    if torch.cuda.is_available():
        return free_memory(torch.device("cuda"))
    return free_memory(torch.device("cpu")) / ranks


def find_gpu(name: str) -> Gpu:
    """The GPU called `name`, or the only one whose name begins with it ("h200").

    Raises:
        UserError: for a name that is not in the table, with the nearest that is.
    """
    alike = [known for known in GPUS if known.startswith(f"{name}-")]
    name = alike[0] if len(alike) == 1 else name
    return GPUS[choose_one(name, GPUS, f"--gpu {name} is unknown")]
