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
    name: Gpu(
        name=name,
        memory=memory * GIB,
        bf16_flops=bf16 * TERA,
        memory_bandwidth=own * GB,
        link_bandwidth=link * GB,
        network_bandwidth=network * GB,
        host_bandwidth=host * GB,
        per_node=per_node,
    )
    for name, memory, bf16, own, link, network, host, per_node in (
        ("a100-40gb", 40, 312, 1555, 300, 25, 32, 8),
        ("a100-80gb", 80, 312, 2039, 300, 25, 32, 8),
        ("l40s-48gb", 48, 362, 864, 32, 25, 32, 8),
        ("h100-80gb", 80, 989, 3350, 450, 50, 64, 8),
        ("h200-141gb", 141, 989, 4800, 450, 50, 64, 8),
        ("b200-180gb", 180, 2250, 8000, 900, 50, 64, 8),
        ("b300-288gb", 288, 2250, 8000, 900, 100, 64, 8),
        ("rtx-pro-6000-96gb", 96, 504, 1792, 64, 50, 64, 8),
        ("gb200-186gb", 186, 2500, 8000, 900, 50, 225, 4),
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
    """The GPU called `name`, or the only one whose name begins with it ("h200"). Raises UserError for a name that is
    not in the table, with the nearest that is."""
    alike = [known for known in GPUS if known.startswith(f"{name}-")]
    name = alike[0] if len(alike) == 1 else name
    return GPUS[choose_one(name, GPUS, f"--gpu {name} is unknown")]
