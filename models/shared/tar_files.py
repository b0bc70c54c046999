"""Tar files that anybody may have written: their headers announce what they like."""

import tarfile

MAX_MEMBER_BYTES = 1 << 30
"""Maximum size of a member of a sample."""


class UntrustedTarFile(tarfile.TarFile):
    """A tar file whose members lie one behind another, as large as they say."""

    def next(self) -> tarfile.TarInfo | None:
        """The next member.

        Raises:
            ReadError: see `checked`; or for headers upon headers.
        """
        try:
            return checked(super().next())
        except RecursionError:
            raise tarfile.ReadError("a member has more headers than any needs") from None


def checked(member: tarfile.TarInfo | None) -> tarfile.TarInfo | None:
    """The member itself.

    Raises:
        ReadError: for a negative size, which leads back to what was read before, without end; and for a file with
            holes, of which a hundred bytes announce a terabyte of zeros.
    """
    if member is not None and member.size < 0:
        raise tarfile.ReadError(f"the member {member.name!r} announces {member.size} bytes")
    if member is not None and member.sparse is not None:
        raise tarfile.ReadError(f"the member {member.name!r} has holes")
    return member
