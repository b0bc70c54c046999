"""Energon's task encoder, from crude samples to packed batches: decode, check, select packs, pack, batch.

Every step is a pure function of the sample (except for the counts of rejected samples, which batches carry), so that
Energon can save its buffers as keys and restore them from disk.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from megatron.energon import Cooker, SkipSample, TaskEncoder, WorkerConfig, basic_sample_keys, stateless
from megatron.energon.flavors import SavableDataset
from megatron.energon.wrappers import BatchDataset, PackingDataset

from megadit.models.diffusion.noise import sample_key
from megadit.models.shared.errors import UserError
from megadit.train.data.packs.bin_packing import best_fit
from megadit.train.data.packs.dealing import dealt, pack_work
from megadit.train.data.packs.packed_batch import REFUSALS, PackedBatch
from megadit.train.data.packs.rules import Rules
from megadit.train.data.packs.samples import LatentPack, LatentSample, PassCounter, decode
from megadit.train.data.packs.training_sample import TrainingSample
from megadit.train.data.shards import BROKEN, ShardReader
from megadit.train.dataset.description import UnreadableSampleError
from megadit.train.monitoring.anomalies import worst_shards

MAX_REFUSED_IN_A_ROW = 1000
LONGEST_DETAIL = 200
"""Maximum length of a detail in the log, in characters."""

logger = logging.getLogger(__name__)


class RefusedSamples:
    """Counts rejected samples, and logs the 1st, 10th, 100th, ... of each reason."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._unreported: Counter[str] = Counter()
        self._shards: Counter[str] = Counter()
        """Unreadable samples since the last good one, by shard."""
        self._unreported_shards: list[str] = []
        self._in_a_row = 0

    def accept(self) -> None:
        self._in_a_row = 0
        self._shards.clear()

    def take(self) -> dict[str, tuple[Any, ...]]:
        """Numbers of rejected samples since the last call, in the order of `REFUSALS`, and their shards."""
        unreported, self._unreported = self._unreported, Counter()
        shards, self._unreported_shards = self._unreported_shards, []
        return {"refused": tuple(unreported[kind] for kind in REFUSALS), "unreadable_shards": tuple(shards)}

    def refuse(self, sample_id: str, kind: str, reason: str, detail: str = "", shard: str = "") -> NoReturn:
        """Raises SkipSample."""
        self._unreported[kind] += 1
        if shard:
            self._shards[shard] += 1
            self._unreported_shards.append(shard)
        self.counts[reason] += 1
        self._in_a_row += 1
        count = self.counts[reason]
        if str(count).strip("0") == "1":
            detail = detail and f"[{ascii(detail[:LONGEST_DETAIL])[1:-1]}] "  # it may quote untrusted text
            logger.warning("skipped sample %s: %s %s(%d so far)", sample_id, reason, detail, count)
        raise SkipSample

    def check(self) -> None:
        """Check before each sample, outside of Energon's handlers, which would print the exception.

        Raises:
            UserError: after a thousand rejected samples in a row.
        """
        if self._in_a_row >= MAX_REFUSED_IN_A_ROW:
            reasons = ", ".join(f"{count} x {reason}" for reason, count in self.counts.most_common())
            raise UserError(
                f"the last {self._in_a_row} samples read could not be used: {reasons}{worst_shards(self._shards)}; "
                "`megadit info DATA --verify` finds damaged shards, and the reasons name the setting of data.* where "
                "there is one"
            )


class LatentTaskEncoder(TaskEncoder):
    """Decodes samples, applies the rules, and packs."""

    decoder = None  # members arrive as raw bytes: Energon's decoder would unpickle some file types

    def __init__(
        self,
        rules: Rules,
        *,
        read: Callable[[dict[str, Any]], TrainingSample] = decode,
        first_pass: int = 0,
        balances_work: bool = False,
        packs_together: int = 1,
    ) -> None:
        """`read`: function that decodes a sample from the raw bytes of its members. `packs_together`: number of packs
        of a reader in a row that are of equal work, with `balances_work` (`dealing.dealt`)."""
        self.rules = rules
        self.format = rules.format
        self.read = read
        self.first_pass = first_pass
        """Number of the first epoch; earlier ones were read by other readers."""
        self.balances_work = balances_work
        self.packs_together = packs_together
        self.refused = RefusedSamples()
        self.cookers = [Cooker(self.cook)]

    def build_cook_crude_sample(
        self, dataset: SavableDataset, *, worker_config: WorkerConfig, **kwargs: Any
    ) -> SavableDataset:
        samples = ShardReader.in_place_of(dataset)
        check = self.refused.check
        counted = PassCounter(samples, worker_config=worker_config, first_pass=self.first_pass, check=check)
        return super().build_cook_crude_sample(counted, worker_config=worker_config, **kwargs)

    @stateless
    def cook(self, crude: dict[str, Any]) -> LatentSample:
        try:
            if BROKEN in crude:
                raise UnreadableSampleError(crude[BROKEN])
            content = self.read(crude)
        except UnreadableSampleError as error:
            shard = crude.get("__shard__") or ""
            where = f"{shard}: {error}" if shard else str(error)
            self.refused.refuse(crude["__key__"], "unreadable", "unreadable", where, shard)
        if found := self.rules.long_text(content):
            self.refused.refuse(content.sample_id, *found, f"{len(content.text_LE)} tokens")
        return LatentSample(**basic_sample_keys(crude), content=content)

    @stateless
    def encode_sample(self, sample: LatentSample) -> LatentSample:
        """Crop the sample to `max_frames`; one that still does not fit is skipped."""
        content = self.rules.crop(sample.content)
        if found := self.rules.reason_against(content):
            self.refused.refuse(content.sample_id, *found, f"latent {tuple(content.latent_CTHW.shape)}")
        self.refused.accept()
        if not self.rules.is_read(content):
            raise SkipSample
        return sample if content is sample.content else replace(sample, content=content)

    def packs_of(
        self, samples: list[LatentSample], start: int, *, keeps_all: bool
    ) -> tuple[list[list[LatentSample]], list[LatentSample]]:
        """Packs of a full buffer in the order in which they are read, after `start` others; and the samples of the
        emptiest, unless it `keeps_all`.

        Bin packing places large samples first, so every buffer would otherwise start with the longest clips.
        """
        lengths = [self.format.lengths(sample.content) for sample in samples]
        packs, left = best_fit(lengths, (self.format.seq_length, self.format.text_seq_length)), []
        if not keeps_all and len(packs) > 1:
            left = packs.pop(min(range(len(packs)), key=lambda pack: sum(lengths[index][0] for index in packs[pack])))
        keys = [self._noise_key(samples[pack[0]].content) for pack in packs]
        work = [0] * len(packs)
        if self.balances_work:
            segments = [self.format.segments(sample.content) for sample in samples]
            members = [[segment for index in pack for segment in segments[index]] for pack in packs]
            work = [pack_work(each, self.format.model) for each in members]
        order = sorted(range(len(packs)), key=keys.__getitem__)
        if len(set(work)) > 1:
            order = dealt(work, keys, start=start, seed=self.format.seed, together=self.packs_together)
        return [[samples[index] for index in packs[pack]] for pack in order], [samples[index] for index in left]

    def _noise_key(self, content: TrainingSample) -> int:
        return sample_key(self.format.seed, content.sample_id, content.occurrence)

    @stateless
    def pack_selected_samples(self, samples: list[LatentSample]) -> LatentPack:
        content = self.format.pack([sample.content for sample in samples])
        return LatentPack(__key__=samples[0].__key__, __restore_key__=(), content=content)

    @stateless
    def batch(self, samples: Sequence[LatentPack]) -> PackedBatch:
        return replace(PackedBatch.concatenate([sample.content for sample in samples]), **self.refused.take())

    def build_batch(
        self,
        dataset: SavableDataset,
        *,
        batch_size: int,
        batch_drop_last: bool = False,
        packing_buffer_size: int,
        worker_config: WorkerConfig,
    ) -> SavableDataset:
        packs = PackingWithLeftovers(
            dataset,
            buffer_size=packing_buffer_size,
            packs_of=self.packs_of,
            final_packer=self.pack_selected_samples,
            final_packer_stateless=True,
            worker_config=worker_config,
        )
        return BatchDataset(
            packs,
            batch_size,
            self.batch,
            batcher_stateless=True,
            drop_last=batch_drop_last,
            worker_config=worker_config,
        )


class PackingWithLeftovers(PackingDataset):
    """Energon's packing, except that samples of the emptiest pack of a full buffer stay in the buffer. (One half-empty
    pack in twenty would waste 2.5 %.)

    They are put back into the reading buffer, which Energon saves. No progress bar is shown while the buffer first
    fills.
    """

    def __init__(
        self,
        dataset: SavableDataset,
        *,
        packs_of: Callable[..., tuple[list[list[LatentSample]], list[LatentSample]]],
        **settings: Any,
    ) -> None:
        self._packs_of = packs_of
        self._is_exhausted = False
        super().__init__(dataset, pre_packer=self._select_and_keep, **settings)

    def _select_and_keep(self, samples: list[LatentSample]) -> list[list[LatentSample]]:
        start = self._final_packing_sample_index.current_idx
        packs, left = self._packs_of(samples, start, keeps_all=self._is_exhausted)
        self._reading_buffer.extend(left)
        return packs

    def _fill_reading_buffer(self, source_iter: Iterator[LatentSample], log_progress: bool = False) -> bool:
        is_full = super()._fill_reading_buffer(source_iter, log_progress=False)
        self._is_exhausted = not is_full
        return is_full
