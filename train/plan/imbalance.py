"""Expected imbalance of a step: the work of the busiest data-parallel rank over the mean of all.

Computed by packing random samples of the sizes at hand as the readers do, without reading any.

Shapes: S steps, N ranks, or packs of a rank.
"""

import random
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from megadit.models.configs.config import DiTConfig
from megadit.models.packing.segments import Segment
from megadit.train.config.schema import DataConfig, RunConfig
from megadit.train.data.packs.bin_packing import best_fit
from megadit.train.data.packs.dealing import dealt, pack_work

MOST_RANKS, MOST_BUFFERED, MOST_PACKS, STEPS = 64, 1000, 8, 32
"""Upper bounds of what is simulated, and the number of steps."""
HIGH = 1.15
"""Imbalance above which a run is warned of."""


def expected_imbalance(config: RunConfig, ranks: int) -> float:
    """Busiest over mean work of `ranks` data-parallel ranks, for samples of `data.mock_latent_shapes`; 1 without a data
    set, because mock packs are equal."""
    return 1.0 if ranks == 1 else _busiest(_simulated_work(config, ranks).sum(2))


def uneven_packs(config: RunConfig, ranks: int) -> float:
    """The heaviest pack of a rank in a step over the mean of its packs; 1 without a data set."""
    return _busiest(np.concatenate(_simulated_work(config, ranks).swapaxes(0, 1)))


def _busiest(work_SN: np.ndarray) -> float:
    """The largest of each step over the mean."""
    return work_SN.max(1).sum() / work_SN.mean(1).sum()


def _simulated_work(config: RunConfig, ranks: int) -> np.ndarray:
    """Work of each pack, [steps, ranks, packs of a rank]."""
    data = config.data
    if data.mock or data.path is None or len(set(data.mock_latent_shapes)) == 1:
        return np.ones((1, 1, 1))
    return _simulated(config.model, data, min(ranks, MOST_RANKS), max(1, data.global_batch_size // ranks))


@lru_cache(maxsize=256)
def _simulated(model: DiTConfig, data: DataConfig, ranks: int, packs_of_a_step: int) -> np.ndarray:
    together = packs_of_a_step if data.balance == "step" else 1
    readers = [_packs(model, data, reader, together) for reader in range(ranks)]
    counted = range(min(packs_of_a_step, MOST_PACKS))
    return np.array([[[next(packs) for _ in counted] for packs in readers] for _ in range(STEPS)], dtype=float)


def _packs(model: DiTConfig, data: DataConfig, reader: int, together: int) -> Iterator[int]:
    """Work of the packs of a reader, without end."""
    generator, start = random.Random(reader), 0
    segments = [Segment(model.sample_grid(*shape), 1) for shape in data.mock_latent_shapes]
    while True:
        buffer = generator.choices(segments, k=min(data.packing_buffer_size, MOST_BUFFERED))
        packs = best_fit([(segment.num_tokens, 1) for segment in buffer], (data.seq_length, data.text_seq_length))
        work = [pack_work([buffer[index] for index in pack], model) for pack in packs]
        generator.shuffle(work)
        if data.balance != "tokens":
            work = [work[pack] for pack in dealt(work, work, start=start, seed=0, together=together)]
        start += len(work)
        yield from work
