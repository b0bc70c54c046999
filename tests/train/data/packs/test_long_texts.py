"""A text that no pack has room for is refused before a buffer holds it."""

import pytest
import torch
from megatron.energon import SkipSample

from megadit.train.data.loader import build_train_loader
from megadit.train.data.packs.rules import Rules
from megadit.train.data.packs.samples import OCCURRENCE
from megadit.train.data.packs.task_encoder import LatentTaskEncoder
from megadit.train.data.writer import sample_members


def test_a_book_ends_before_the_shuffle_buffer(make_config, toy, monkeypatch):
    encoders = []
    made = LatentTaskEncoder.__init__
    monkeypatch.setattr(
        LatentTaskEncoder, "__init__", lambda self, rules, **more: encoders.append(self) or made(self, rules, **more)
    )
    config = make_config()
    build_train_loader(config, rank=0, world_size=1)
    tensors = {"latent": torch.zeros(toy.channels, 1, 4, 4), "text": torch.zeros(config.data.text_seq_length + 1, 8)}
    members = {name.partition(".")[2]: content for name, content in sample_members("a", {"fps": 0}, tensors)}
    crude = {**members, "__key__": "a", "__restore_key__": (), OCCURRENCE: 0}
    assert isinstance(encoders[0].rules, Rules)
    with pytest.raises(SkipSample):
        encoders[0].cook(crude)
    (reason,) = encoders[0].refused.counts
    assert reason == f"its text has more tokens than data.text_seq_length, {config.data.text_seq_length}"
