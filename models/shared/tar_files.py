"""Tar files from untrusted sources, whose headers may be wrong."""

import tarfile

MAX_MEMBER_BYTES = 1 << 30
"""Maximum bytes of a member of a sample."""


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
