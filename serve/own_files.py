"""Protects the files of a process and its children from other users, even if its libraries change modes.

Triton's Python backend creates shared memory (for prompts and videos) with boost, which overrides the umask by
`fchmod`. Here files keep the mode with which they were opened.
"""

import ctypes
import os
import struct

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2
_FCHMOD = {"x86_64": (0xC000003E, 91), "aarch64": (0xC00000B7, 52)}
"""Machine -> its number in the kernel's audit.h, and the number of the system call `fchmod`."""
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _DO_NOTHING = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE = 0, 4
"""Offsets in the kernel's `seccomp_data`."""


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def keep_files_to_oneself() -> None:
    """Make this process and its children create files that others cannot open, and forbid `fchmod`.

    If the kernel does not support seccomp filters, only the umask is set.
    """
    os.umask(0o077)
    machine, fchmod = _FCHMOD.get(os.uname().machine, (0, 0))
    instructions = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_IF_EQUAL, 0, 3, machine),
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_IF_EQUAL, 0, 1, fchmod),
        (_RETURN, 0, 0, _DO_NOTHING),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in instructions))
    program = _Program(len(instructions), ctypes.cast(code, ctypes.c_void_p).value)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # required for unprivileged processes
    libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0)
