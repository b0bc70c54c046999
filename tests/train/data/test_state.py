"""Reader states as plain JSON values."""

import json
import pickle

import numpy as np
import pytest
import torch
from megatron.energon.flavors.base_dataset import FlexState
from megatron.energon.flavors.webdataset.sample_loader import SliceState
from megatron.energon.rng import SystemRng
from megatron.energon.savable_loader import SavableDataLoaderState, SavableDatasetCheckpoint, SavableDatasetState

from megadit.models.shared.errors import UserError
from megadit.train.data.state import from_plain, to_plain


def worker_state() -> SavableDataLoaderState:
    """The shape of what a rank with one worker saves."""
    dataset_state = FlexState(
        keys=[("PassCounter", 3, ("Webdataset", 17)), ()],
        rng=bytes(range(256)),
        slices=[None, SliceState(index=2, current=31)],
        inner=FlexState(count=5, share=0.1, done=False),
    )
    inner = SavableDatasetState(rng=SystemRng.save_state(), dataset_state=dataset_state, sample_index=9)
    checkpoint = SavableDatasetCheckpoint(state=inner, offset=2)
    return SavableDataLoaderState(worker_states=[checkpoint], next_worker_id=0, micro_batch_size=1)


def test_round_trip_keeps_types_and_values():
    state = worker_state()
    back = from_plain(json.loads(json.dumps(to_plain(state))))
    before, after = state.worker_states[0].state, back.worker_states[0].state
    assert type(back) is SavableDataLoaderState and back.worker_states[0].offset == 2
    assert after.dataset_state == before.dataset_state
    assert type(after.dataset_state["inner"]) is FlexState
    assert after.rng.random == before.rng.random
    assert torch.equal(after.rng.torch, before.rng.torch) and after.rng.torch.dtype == torch.uint8
    np.testing.assert_array_equal(after.rng.numpy[1], before.rng.numpy[1])
    SystemRng.restore_state(after.rng)


def test_objects_of_other_classes_are_not_saved():
    with pytest.raises(TypeError, match="cannot save"):
        to_plain({"plain": "dictionaries carry tags"})
    with pytest.raises(TypeError, match="cannot save"):
        to_plain([object()])


@pytest.mark.parametrize("plain", [{"class": "Popen", "fields": {"args": "ls"}}, {"other": 1}, pickle.dumps(1)])
def test_only_known_classes_are_built(plain):
    with pytest.raises(UserError, match="damaged"):
        from_plain(plain)
