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
MAX_HEADER_BYTES = 1 << 16
"""Largest header of a sample's safetensors file."""


class UntrustedTarFile(tarfile.TarFile):
    """A tar file whose members follow one another, with their true sizes."""

    def next(self) -> tarfile.TarInfo | None:
        """The next member.

        Raises:
            ReadError: see `checked`; and for too many headers.
        """
        try:
            return checked(super().next())
        except RecursionError:
            raise tarfile.ReadError("a member has more headers than any needs") from None


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
