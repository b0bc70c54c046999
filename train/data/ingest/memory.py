"""Results of other processes without a pickle of their arrays: these lie in memory that both processes map.

The memory is an anonymous file (memfd) of the process that waits: it has no name that a killed process could leave
behind, and takes nothing of /dev/shm, which containers keep small.
"""

import mmap
import os
import pickle
import weakref
from typing import Any, NamedTuple

LEAST_BYTES = 2**16
"""Arrays below this size stay in the pickle."""
_ALIGNMENT = 64


class Written(NamedTuple):
    """A result, without the arrays that `Memory.write` has written."""

    pickled: bytes
    places: list[slice]
    """Bytes of the memory, for each array."""


class Memory:
    """Memory for one result. Sent to another process, it is the same memory; it lives until both have dropped it."""

    def __init__(self, path: str | None = None) -> None:
        self._file = os.memfd_create("result") if path is None else os.open(path, os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)

    def __reduce__(self) -> tuple[type["Memory"], tuple[str]]:
        return Memory, (f"/proc/{os.getpid()}/fd/{self._file}",)

    def write(self, result: Any) -> Written:
        """Pickle a result; its arrays are copied here."""
        places: list[slice] = []
        with open(self._file, "wb", closefd=False) as file:

            def is_pickled(buffer: pickle.PickleBuffer) -> bool:
                array = buffer.raw()
                if array.nbytes < LEAST_BYTES:
                    return True
                start = file.seek(-(-file.tell() // _ALIGNMENT) * _ALIGNMENT)
                places.append(slice(start, start + file.write(array)))
                return False

            return Written(pickle.dumps(result, protocol=5, buffer_callback=is_pickled), places)

    def read(self, written: Written) -> Any:
        """The result, whose arrays map this memory."""
        if not written.places:
            return pickle.loads(written.pickled)
        mapped = memoryview(mmap.mmap(self._file, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
        return pickle.loads(written.pickled, buffers=[mapped[place] for place in written.places])
