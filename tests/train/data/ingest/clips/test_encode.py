"""What the encoding of clips sends to a GPU and waits for, and in which order; the meta device stands for the GPU."""

import time
from functools import partial

import numpy as np
import torch
from PIL import Image

from megadit.models.tokenizers import HaarTokenizer
from megadit.train.data.ingest import stages
from megadit.train.data.ingest.clips import encode
from megadit.train.data.ingest.clips.encodings import Encoder, Encoding
from megadit.train.data.prepare import command as prepare
from tests.traffic import Traffic, note_waits

META = torch.device("meta")


def encoders() -> list[Encoder]:
    """Two of videos: both read the same frames."""
    names = {"latent": ("float16", HaarTokenizer()), "other": ("float32", HaarTokenizer(spatial_compression=4))}
    return [
        Encoder(Encoding(name=name, modality="video", encoder="haar", precision=precision), model, META)
        for name, (precision, model) in names.items()
    ]


def test_frames_are_sent_as_bytes_once_and_the_next_are_read_while_a_gpu_encodes(monkeypatch):
    told = []
    note_waits(monkeypatch, lambda number: told.append(f"waits for {number}"))
    frames = [np.zeros((9, 16, 24, 3), np.uint8)] * 2

    def batches(count):
        for number in range(count):
            told.append(f"reads {number}")
            yield [2 * number, 2 * number + 1], frames

    with Traffic() as traffic:
        list(encode.encoded_batches(batches(1), encoders(), 2))  # the Haar matrices are sent once
        told.clear()
        traffic.forget()
        found = list(encode.encoded_batches(batches(3), encoders(), 2))
    assert traffic.sent.total() == 3 and traffic.sent_bytes == 3 * sum(each.nbytes for each in frames), traffic.sent
    assert traffic.fetched.total() == 3 and not traffic.asked, (traffic.fetched, traffic.asked)
    waited = [f"waits for {number}" for number in (1, 2, 3)]
    assert told == ["reads 0", "reads 1", waited[0], "reads 2", *waited[1:]]
    assert [places for places, _ in found] == [[0, 1], [2, 3], [4, 5]]
    for _, latents in found:
        shapes = {name: (x.device.type, x.dtype, tuple(x.shape)) for name, x in latents.items()}
        assert shapes == {
            "latent": ("cpu", torch.float16, (2, 768, 3, 2, 3)),
            "frames": ("cpu", torch.float16, (2, 768, 2, 2, 3)),
            "other": ("cpu", torch.float32, (2, 192, 3, 4, 6)),
        }


def seen(clip, settings, folder):
    """Decode a clip, and say so."""
    decoded = encode.decode(clip, settings)
    (folder / clip.key).touch()
    return decoded


def test_the_next_clip_is_decoded_while_one_is_encoded_also_that_of_the_next_shard(tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    (tmp_path / "seen").mkdir()
    for number in range(4):
        grain = np.random.default_rng(number).integers(0, 255, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(grain).save(tmp_path / "in" / f"{number}.png")
    options = ["--tokenizer", "pixels", "--sizes", "8x8", "--val_share", "0", "--shard_size", "2", "--debug"]
    command = ["images", str(tmp_path / "in"), str(tmp_path / "out"), *options, "--max_duplicate_bits", "0"]
    for stage in ("fetch", "scan", "select"):
        assert prepare.main([*command, "--stages", stage, "--num_workers", "0"]) == 0

    def decoded_clips(clips, settings, pool):
        listed = list(clips)
        following.extend(clip.key for clip in listed[1:])
        return pool.map(partial(seen, settings=settings, folder=tmp_path / "seen"), listed, encode.lost)

    def encode_videos(encoder, video_BCTHW):
        if following:
            key, deadline = following.pop(0), time.monotonic() + 30
            while not (tmp_path / "seen" / key).exists():
                assert time.monotonic() < deadline, f"{key} is not read while the one before is encoded"
                time.sleep(0.01)
        return whole(encoder, video_BCTHW)

    following, whole = [], Encoder.encode_videos
    monkeypatch.setattr(stages, "decoded_clips", decoded_clips)
    monkeypatch.setattr(encode, "batch_size", lambda settings: 1)
    monkeypatch.setattr(Encoder, "encode_videos", encode_videos)
    assert prepare.main([*command, "--stages", "encode", "--num_workers", "1"]) == 0
    assert len(list((tmp_path / "out").glob("train-*.tar"))) == 2 and not following
