"""Tar files from untrusted sources, whose headers may be wrong."""

import tarfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

from megadit.models.shared.documents import check_tensor_header, parse_json
from megadit.models.shared.errors import UserError

MAX_MEMBER_BYTES = 1 << 30
"""Maximum bytes of a member of a sample."""
MAX_PADDING_BYTES = 1 << 20
"""Most zeros between joined tar files; tar pads each to 10 KiB."""
MAX_HEADER_BYTES = 1 << 16
"""Largest header of a sample's safetensors file."""


class UntrustedTarFile(tarfile.TarFile):
    """A tar file whose members follow one another, with their true sizes; or several, joined by `cat`."""

    def next(self) -> tarfile.TarInfo | None:
        """The next member.

        Raises:
            ReadError: see `checked`; for too many headers, and a damaged one, which `TarFile` takes for the end.
        """
        try:
            while (member := checked(super().next())) is None and self._goes_on():
                self._loaded = False
            return member
        except RecursionError:
            raise tarfile.ReadError("a member has more headers than any needs") from None

    def _goes_on(self) -> bool:
        """Whether another tar file follows the end of this one; moves to it."""
        self.fileobj.seek(self.offset)
        rest = self.fileobj.read(MAX_PADDING_BYTES)
        num_zeros = len(rest) - len(rest.lstrip(b"\0"))
        if num_zeros == len(rest):
            return False
        if num_zeros < tarfile.BLOCKSIZE:
            raise tarfile.ReadError(f"the header at byte {self.offset:,} is damaged: what follows it cannot be found")
        self.offset += num_zeros // tarfile.BLOCKSIZE * tarfile.BLOCKSIZE
        return True


def checked(member: tarfile.TarInfo | None) -> tarfile.TarInfo | None:
    """Return the member unchanged.

    Raises:
        ReadError: for a negative size, which would read earlier members again without end; and for a sparse file, whose
            hundred bytes can announce a terabyte of zeros.
    """
    if member is not None and member.size < 0:
        raise tarfile.ReadError(f"the member {member.name!r} announces {member.size} bytes")
    if member is not None and member.sparse is not None:
        raise tarfile.ReadError(f"the member {member.name!r} has holes")
    return member


def latent_shapes(shard: Path) -> Iterator[tuple[int, int, int]]:
    """(T, H, W) of each readable sample of latents in a shard, from headers alone; none for a shard of pixels."""
    with (
        shard.open("rb") as file,
        suppress(tarfile.TarError),
        UntrustedTarFile.open(fileobj=file, mode="r:") as members,
    ):
        for member in members:
            if member.isreg() and member.name.endswith(".safetensors"):
                with suppress(UserError, KeyError, TypeError, ValueError):
                    yield _shape_of(members.extractfile(member))


def _shape_of(file: IO[bytes]) -> tuple[int, int, int]:
    head = file.read(8)
    check_tensor_header(head, "a sample", max_bytes=MAX_HEADER_BYTES)
    _, *sides = parse_json(file.read(int.from_bytes(head, "little")), "a sample")["latent"]["shape"]
    frames, height, width = map(int, sides)
    if min(frames, height, width) < 1:
        raise ValueError(f"a latent of {frames} x {height} x {width}")
    return frames, height, width
