"""From samples to packs: layout, tokens, text, text dropout."""

from dataclasses import replace

import pytest
import torch

from megadit.models.configs.config import DiTConfig
from megadit.models.diffusion.noise import sample_key
from megadit.models.networks.embeddings import patchify
from megadit.models.shared.errors import UserError
from megadit.train.data.packs.packed_batch import PackedBatch, PackFormat
from megadit.train.data.packs.training_sample import TrainingSample

MODEL = DiTConfig(
    num_layers=1, hidden_size=24, num_attention_heads=2, in_channels=4, patch_spatial=2, crossattn_emb_size=6
)
FORMAT = PackFormat(model=MODEL, seq_length=40, text_seq_length=12, seed=3, text_dropout=0.0)


def make_sample(name: str, shape=(2, 4, 4), text_length=3, occurrence=0, dtype=torch.float16) -> TrainingSample:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return TrainingSample(
        sample_id=name,
        occurrence=occurrence,
        latent_CTHW=torch.randn(4, *shape, generator=generator).to(dtype),
        text_LE=torch.randn(text_length, 6, generator=generator).to(dtype),
        fps=8.0,
    )


def test_tokens_are_patchified_latents_one_sample_after_another():
    samples = [make_sample("a", (1, 4, 4)), make_sample("b", (1, 4, 4)), make_sample("c"), make_sample("d", (1, 2, 8))]
    pack = FORMAT.pack(samples)
    assert pack.tokens_S1P.shape == (40, 1, MODEL.patch_dim)
    assert pack.tokens_S1P.dtype == torch.float32
    for sample, start, length in zip(samples, pack.layout.starts, pack.layout.lengths, strict=False):
        expected = patchify(sample.latent_CTHW[None].float(), MODEL)
        torch.testing.assert_close(pack.tokens_S1P[start : start + length], expected, rtol=0, atol=0)
    assert pack.num_tokens == 4 + 4 + 8 + 4
    assert not pack.tokens_S1P[pack.num_tokens :].any()


def test_text_lies_in_the_slots_of_its_segment():
    samples = [make_sample("a", text_length=3), make_sample("b", text_length=0), make_sample("c", text_length=5)]
    pack = FORMAT.pack(samples)
    assert pack.layout.text_places[:3] == (3, 1, 5)
    torch.testing.assert_close(pack.text_L1E[0:3, 0], samples[0].text_LE.float())
    torch.testing.assert_close(pack.text_L1E[4:9, 0], samples[2].text_LE.float())
    assert not pack.text_L1E[3].any() and not pack.text_L1E[9:].any()


def test_padding_has_no_key_no_rate_and_no_name():
    pack = FORMAT.pack([make_sample("a")])
    assert pack.layout.segments[-1].is_padding
    assert pack.noise_key_G.tolist() == [sample_key(3, "a", 0), 0]
    assert pack.fps_G.tolist() == [8.0, 0.0]
    assert pack.sample_ids == ("a", "")


def test_a_full_pack_has_no_padding_segment():
    samples = [make_sample(name, text_length=1) for name in "abcde"]
    pack = replace(FORMAT, text_seq_length=5).pack(samples)
    assert pack.sample_ids == tuple("abcde")
    assert pack.layout.num_segments == 5


def test_text_dropout_depends_on_seed_name_and_occurrence_alone():
    format = replace(FORMAT, seq_length=800, text_seq_length=300, text_dropout=0.5)
    samples = [make_sample(f"s{i}") for i in range(100)]

    def dropped(format, samples):
        pack = format.pack(samples)
        return {name for name, part in zip(pack.sample_ids, pack.layout.segments, strict=True) if not part.text_length}

    first = dropped(format, samples) - {""}
    assert 30 <= len(first) <= 70  # 100 draws of probability 1/2: four standard deviations
    assert dropped(format, samples[::-1]) - {""} == first
    assert dropped(replace(format, seed=4), samples) - {""} != first
    again = [replace(sample, occurrence=1) for sample in samples]
    assert dropped(format, again) - {""} != first
    assert dropped(replace(format, text_dropout=0.0), samples) <= {""}
    assert len(dropped(replace(format, text_dropout=1.0), samples) - {""}) == 100


def test_dropped_text_leaves_no_trace():
    pack = replace(FORMAT, text_dropout=1.0).pack([make_sample("a"), make_sample("b")])
    assert not pack.text_L1E.any()
    assert pack.layout.text_places[:2] == (1, 1)


def test_concatenated_packs_lie_one_after_another():
    first, second = FORMAT.pack([make_sample("a")]), FORMAT.pack([make_sample("b"), make_sample("c")])
    both = PackedBatch.concatenate([first, second])
    assert both.layout.capacity == 80 and both.num_tokens == 24
    assert both.sample_ids == ("a", "", "b", "c", "")
    torch.testing.assert_close(both.tokens_S1P[40:], second.tokens_S1P)
    torch.testing.assert_close(both.text_L1E[12:], second.text_L1E)
    assert both.noise_key_G.tolist() == first.noise_key_G.tolist() + second.noise_key_G.tolist()


def test_samples_that_do_not_fit_are_an_error():
    with pytest.raises(UserError, match="data.seq_length"):
        FORMAT.pack([make_sample(str(i), text_length=1) for i in range(6)])


def test_to_moves_every_tensor():
    moved = FORMAT.pack([make_sample("a")]).to("meta")
    for tensor in (moved.tokens_S1P, moved.text_L1E, moved.fps_G, moved.noise_key_G):
        assert tensor.device.type == "meta"
