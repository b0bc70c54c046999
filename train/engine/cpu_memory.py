"""Reuse of freed CPU memory in the next step."""

import ctypes
import os

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # of glibc's malloc.h
_MIB = 2**20


def keep_freed_memory() -> None:
    """Stops glibc from handing the memory of freed tensors back to the kernel, up to tensors of 32 MiB.

    By default every step faults in the same pages again, which takes a fifth of a small network's time. The process
    stays as large as its largest step. Other C libraries, and settings of MALLOC_* environment variables, are left
    unchanged.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt(_M_MMAP_THRESHOLD, 32 * _MIB)  # the most it takes
    mallopt(_M_TRIM_THRESHOLD, 1024 * _MIB)
    mallopt(_M_TOP_PAD, 64 * _MIB)
