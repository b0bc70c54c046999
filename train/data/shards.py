"""Reader of untrusted shards, which marks unreadable samples and does not end training.

Energon's reader raises for a broken tar header or a wrong offset in its index, outside of all error handlers. Errors of
the storage are still raised.
"""

import tarfile
from typing import Any

from megatron.energon.flavors import SavableDataset
from megatron.energon.flavors.webdataset.itar import ITarFile, ITarSamplePointer
from megatron.energon.flavors.webdataset.itar_reader import ShardInfosITarReader
from megatron.energon.flavors.webdataset.structs import FilteredSample
from megatron.energon.source_info import SourceInfo

from megadit.models.shared.errors import UserError
from megadit.models.shared.tar_files import MAX_MEMBER_BYTES, checked

BROKEN = "__broken__"
"""Field of a crude sample with the reason why it could not be read."""
SUFFIXES = ("json", "safetensors", "mp4", "png")
"""Suffixes of the members that training reads."""
LONGEST_KEY = 255


class ShardReader(ShardInfosITarReader):
    """Energon's reader of indexed tar files; unreadable samples have a field `BROKEN` and no members."""

    @classmethod
    def in_place_of(cls, dataset: SavableDataset[dict]) -> SavableDataset[dict]:
        """Replace the reader in a dataset that Energon built from one folder."""
        samples: Any = dataset.dataset
        samples.join_readers = [
            cls(
                reader.base_path,
                reader.shard_infos,
                part_filter=SUFFIXES.__contains__,
                sample_filter=reader.sample_filter,
                itar_cache_size=reader.itar_cache_size,
            )
            for reader in samples.join_readers
        ]
        return dataset

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._sizes: dict[int, int] = {}

    def __getitem__(self, idx: int) -> FilteredSample | None:
        try:
            sample = super().__getitem__(idx)
            if sample is not None and not (sample["__key__"].isprintable() and len(sample["__key__"]) <= LONGEST_KEY):
                raise ValueError("its key is not printable, or too long")
            return sample
        except FileNotFoundError as error:
            raise UserError(f"{self.base_path} is incomplete: {error}; copy or prepare it anew") from error
        except (OSError, UserError):
            raise
        except Exception as error:  # broken headers and offsets may raise anything
            return self._broken(idx, f"{type(error).__name__}: {error}")

    def _broken(self, idx: int, reason: str) -> FilteredSample:
        shard = self._shard_of(idx)
        source = SourceInfo(dataset_path=self.base_path, index=idx, shard_name=shard, file_names=())
        fields: Any = {BROKEN: reason}
        return FilteredSample(
            __key__=f"number {idx}",
            __shard__=shard,
            __restore_key__=("Webdataset", idx),
            __sources__=(source,),
            **fields,
        )

    def _shard_of(self, idx: int) -> str:
        try:
            return self.shard_infos[super()._get_itar_sample_pointer(idx).tar_file_id].name
        except Exception:  # it is of the index, then
            return ""

    def _get_itar_sample_pointer(self, idx: int) -> ITarSamplePointer:
        pointer = super()._get_itar_sample_pointer(idx)
        size = self._size(pointer.tar_file_id)
        if not (0 < pointer.byte_size and 0 <= pointer.byte_offset <= size - pointer.byte_size):
            raise tarfile.ReadError("the index leads out of its shard")
        return pointer

    def _size(self, tar_file_id: int) -> int:
        if tar_file_id not in self._sizes:
            self._sizes[tar_file_id] = self.tar_filepaths[tar_file_id].size()
        return self._sizes[tar_file_id]

    def _get_itarfile_cached(self, tar_file_id: int) -> ITarFile:
        if tar_file_id not in self.itar_files_cache:
            path = self.tar_filepaths[tar_file_id]
            # local files as they are: Energon's storage client would count, and time, each read of a header
            file = open(path.local_path(), "rb") if path.is_local() else path.open(mode="rb")
            self.itar_files_cache[tar_file_id] = _Shard.open(fileobj=file, mode="r:")
        return super()._get_itarfile_cached(tar_file_id)


class _Shard(ITarFile):
    """A tar file with limits on the size of its members."""

    def next(self) -> tarfile.TarInfo | None:
        """The next member.

        Raises:
            ReadError: if it is too large, or as `checked`.
        """
        member = checked(super().next())
        if member is not None and member.size > MAX_MEMBER_BYTES:
            raise tarfile.ReadError(f"the member {member.name!r} has {member.size} bytes, more than any sample")
        return member
