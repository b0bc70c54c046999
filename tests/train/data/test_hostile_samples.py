"""A sample that nobody can use is refused as a sample, whatever it holds: counted, logged, and passed over."""

import io
import json
import random
import struct
import tarfile
from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest
import safetensors.torch
import torch

from megadit.train.checkpoints.sampling_defaults import sampling_defaults
from megadit.train.data.loader import build_train_loader
from megadit.train.data.packs.packed_batch import REFUSALS, PackFormat
from megadit.train.data.packs.rules import Rules
from megadit.train.data.packs.samples import OCCURRENCE, decode
from megadit.train.data.packs.training_sample import TrainingSample
from megadit.train.data.shards import ShardReader
from megadit.train.data.writer import prepare_for_energon, sample_members
from megadit.train.dataset.dataset_info import DatasetInfo, iter_captions
from megadit.train.dataset.description import UnreadableSampleError
from tests.memory import within_memory
from tests.mutations import mutated

DESCRIPTION = b'{"caption": "a", "fps": 8, "num_frames": 1, "height": 32, "width": 32}'


def describe(text: str) -> bytes:
    return b'{"caption": "a", "fps": 8, ' + text.encode() + b"}"


DESCRIPTIONS = {
    "infinite-height": describe('"height": Infinity'),
    "infinite-width": describe('"width": -Infinity'),
    "no-number": describe('"fps": NaN'),
    "beyond-float": describe('"fps": 1e999'),
    "400-digits": describe(f'"height": {"9" * 400}'),
    "5000-digits": describe(f'"aesthetic_score": {"9" * 5000}'),
    "negative-fps": describe('"fps": -8'),
    "nearly-zero-fps": describe('"fps": 1e-300'),
    "huge-side": describe('"width": 1e300'),
    "negative-side": describe('"width": -32'),
    "listed-score": describe('"aesthetic_score": [1]'),
    "deep": b"[" * 100_000,
    "deep-inside": describe('"x":' + "[" * 50_000 + "]" * 50_000),
    "half-a-pair": describe(r'"caption": "\ud800"'),
    "not-text": b"\xff\xfe\x00",
    "long": b" " * ((1 << 20) + 1),
    "nothing": b"",
}
"""Descriptions that no sample can have."""


def tensors(latent, **more) -> bytes:
    return safetensors.torch.save({"latent": latent, **more})


def header(**entries) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


def contents(channels: int) -> dict[str, tuple[bytes, str]]:
    """Tensors that no sample can have, each with the reason why it is left out."""
    latent, text = torch.zeros(channels, 1, 4, 4), torch.zeros(3, 8)
    many = {f"{number}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for number in range(3000)}
    return {
        "bool": (tensors(latent.bool()), "other_dtype"),
        "uint8": (tensors(latent.to(torch.uint8)), "other_dtype"),
        "uint16": (tensors(latent.to(torch.uint16)), "other_dtype"),
        "int64": (tensors(latent.long()), "other_dtype"),
        "float8": (tensors(latent.to(torch.float8_e4m3fn)), "other_dtype"),
        "float8-e5m2": (tensors(latent.to(torch.float8_e5m2)), "other_dtype"),
        "text-of-bool": (tensors(latent, text=text.bool()), "other_dtype"),
        "text-of-float8": (tensors(latent, text=text.to(torch.float8_e4m3fn)), "other_dtype"),
        "no-frames": (tensors(latent[:, :0]), "odd_size"),
        "no-height": (tensors(latent[:, :, :0]), "odd_size"),
        "no-channels": (tensors(latent[:0]), "other_channels"),
        "endless-and-empty": (tensors(latent, text=torch.zeros(1 << 40, 0)), "long_text"),
        "infinite": (tensors(latent + torch.inf), "not_finite"),
        "beyond-float32": (tensors(latent.double() + 1e300), "not_finite"),
        "opposite-infinities": (tensors(torch.stack([latent[0] + 3e38] * channels)), "not_finite"),
        "deep-header": (struct.pack("<Q", 50_000) + b"[" * 50_000, "unreadable"),
        "long-header": (header(**many), "unreadable"),
        "huge-header": (struct.pack("<Q", 1 << 62) + b"{}", "unreadable"),
        "no-header": (b"\x00", "unreadable"),
        "unknown-dtype": (header(latent={"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}) + b"\0", "unreadable"),
        "no-latent": (safetensors.torch.save({"another": latent}), "unreadable"),
        "flat": (tensors(latent.flatten()), "unreadable"),
    }


def damaged(member: tarfile.TarInfo, change) -> bytes:
    """A header of a tar file, changed, with its checksum right."""
    block = bytearray(member.tobuf(format=tarfile.GNU_FORMAT))
    change(block)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block[:512])
    return bytes(block)


def negative_size(block) -> None:
    block[124:136] = b"\xff" * 10 + struct.pack(">h", -1536)


def with_holes(block) -> None:
    """A sparse file of a terabyte without a byte of data."""
    block[156:157] = tarfile.GNUTYPE_SPARSE
    block[483:495] = b"\x80" + (1 << 40).to_bytes(11, "big")


HEADERS = {
    "negative-size": negative_size,
    "holes": with_holes,
    "wrong-checksum": lambda block: block.__setitem__(slice(0, 100), b"".ljust(100, b"\xff")),
}


def hostile_tar(path, changes) -> None:
    """Samples whose headers are changed; all others follow whole."""
    with open(path, "wb") as file:
        for name, change in changes.items():
            member = tarfile.TarInfo(f"{name}.json")
            member.size = len(DESCRIPTION)
            file.write(damaged(member, change) + DESCRIPTION.ljust(512, b"\0"))
        file.write(b"\0" * 1024)


def write_index(path, offsets) -> None:
    path.with_suffix(".tar.idx").write_bytes(struct.pack(f"<{len(offsets)}Q", *offsets))


@pytest.fixture
def hostile(new_writer, toy):
    """A data set of 20 honest samples and all hostile ones; (its folder, the reason of each hostile sample)."""
    with new_writer() as writer:
        for index in range(20):
            toy.add_sample(writer, "train", index)
    latent = tensors(torch.zeros(toy.channels, 1, 4, 4))
    reasons = dict.fromkeys([*DESCRIPTIONS, "b\N{BELL}ll", "k" * 300], "unreadable")
    members = [(f"{name}.json", text) for name, text in DESCRIPTIONS.items()]
    members = [each for name, text in members for each in ((name, text), (name.replace("json", "safetensors"), latent))]
    for name, (content, reason) in contents(toy.channels).items():
        members += [(f"{name}.json", DESCRIPTION), (f"{name}.safetensors", content)]
        reasons[name] = reason
    members += [("b\N{BELL}ll.json", DESCRIPTION), ("k" * 300 + ".json", DESCRIPTION), ("keyed.__key__", b"x")]
    members += [("keyed.json", DESCRIPTION), ("keyed.safetensors", latent)]
    write_tar(writer.root / "train-000001.tar", members)
    prepare_for_energon(writer.root, ["train"])
    hostile_tar(writer.root / "train-000002.tar", HEADERS)
    offsets = [1024 * number for number in range(len(HEADERS) + 1)]
    write_index(writer.root / "train-000002.tar", [*offsets, 5, (1 << 63) + 5, 1 << 62])
    reasons |= dict.fromkeys([*HEADERS, "outside", "back", "far"], "unreadable")
    count_samples(writer.root, {"train-000002.tar": len(HEADERS) + 3 + 4})  # four more than its index knows
    reasons |= dict.fromkeys(["unknown 1", "unknown 2", "unknown 3", "unknown 4"], "unreadable")
    return writer.root, reasons


def write_tar(path, members) -> None:
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def count_samples(root, counts) -> None:
    """Adds shards to what Energon knows of a data set."""
    info = json.loads((root / ".nv-meta" / ".info.json").read_text())
    info["shard_counts"] |= counts
    (root / ".nv-meta" / ".info.json").write_text(json.dumps(info))
    (root / ".nv-meta" / "split.yaml").write_text(json.dumps({"split_parts": {"train": list(info["shard_counts"])}}))


def test_every_hostile_sample_is_counted_and_training_goes_on(hostile, make_config):
    root, reasons = hostile
    honest, refused, config = Counter(), Counter(), make_config(path=str(root))
    for batch in islice(build_train_loader(config, rank=0, world_size=1), 60):
        honest.update(name for name in batch.sample_ids if name)
        refused.update(dict(zip(REFUSALS, batch.refused, strict=True)))
    assert set(honest) == {*(f"train-{index:05d}" for index in range(20)), "keyed"}
    passes = min(honest.values())
    assert passes >= 3 and set(+refused) == set(reasons.values())
    for reason, count in Counter(reasons.values()).items():
        assert (passes - 1) * count <= refused[reason] <= (passes + 3) * count, reason


FRAMES = {
    "no times": ([], 1, "not as many as frame_times"),
    "none": ([], 0, "not within its latent's frames"),
    "too few": ([0.0, 1.0], 1, "not as many as frame_times"),
    "past the end": ([3.0], 1, "not within its latent's frames"),
}


@pytest.mark.parametrize("case", FRAMES)
def test_frames_belong_to_their_clip(toy, case):
    times, count, message = FRAMES[case]
    latent_CTHW = torch.zeros(toy.channels, 3, 4, 4)
    frames = latent_CTHW[:, :count]
    described = json.loads(DESCRIPTION) | {"frame_times": times}
    members = dict(sample_members("a", described, {"latent": latent_CTHW, "frames": frames}))
    crude = {"__key__": "a", OCCURRENCE: 0, **{key.partition(".")[2]: value for key, value in members.items()}}
    with pytest.raises(UnreadableSampleError, match=message):
        decode(crude)


def test_more_frames_than_there_are_positions_are_left_out(toy, make_config):
    """A clip to edit is read beside the clip itself: both must be within what the network has positions for."""
    config = make_config()
    model = replace(config.model, learned_positions=(3, 5, 5))
    latent_CTHW = torch.zeros(toy.channels, 3, 4, 4)
    sample = TrainingSample("a", 0, latent_CTHW, torch.ones(3, 8), 8.0, reference_CTHW=latent_CTHW)
    pack_format = PackFormat(
        model=model, seq_length=200, text_seq_length=40, seed=1, text_dropout=0.0, conditioning=(("edit", 1.0),)
    )
    rules = Rules.of(config.data, pack_format, training=True)
    assert rules.reason_against(sample) is None
    longer = replace(sample, reference_CTHW=torch.zeros(toy.channels, 4, 4, 4))
    assert rules.reason_against(longer)[0] == "odd_size"
    assert rules.reason_against(replace(sample, latent_CTHW=torch.zeros(toy.channels, 4, 4, 4)))[0] == "odd_size"


def test_one_hostile_sample_does_not_end_what_looks_at_captions(hostile, make_config):
    root, _ = hostile
    captions = list(iter_captions(root, "train"))
    assert captions.count("a") > 10 and "sample 3" in captions
    settings = sampling_defaults(make_config(path=str(root)), DatasetInfo.read(root))
    assert (settings.height, settings.width, settings.num_frames) == (32, 32, 9)


def test_energon_by_itself_ends(hostile, make_config, monkeypatch):
    """The control: without our reader the first broken header is the end."""
    root, _ = hostile
    monkeypatch.setattr(ShardReader, "in_place_of", lambda dataset: dataset)
    with pytest.raises(Exception, match="Invalid argument|multiple values|header|index"):
        list(islice(build_train_loader(make_config(path=str(root)), rank=0, world_size=1), 60))


def test_storage_that_fails_is_not_a_sample(hostile, make_config, monkeypatch):
    def fails(*_):
        raise OSError(5, "Input/output error")

    root, _ = hostile
    loader = build_train_loader(make_config(path=str(root)), rank=0, world_size=1)
    monkeypatch.setattr(ShardReader, "_get_itarfile_cached", fails)
    with pytest.raises(OSError, match="Input/output"):
        next(loader)


def test_the_log_shows_nothing_that_a_terminal_obeys(new_writer, toy, make_config, caplog):
    with new_writer() as writer:
        toy.add_sample(writer, "train", 0)
    write_tar(writer.root / "train-000001.tar", [("a.json", b'{"fps": "\\u001b[31m\\n"}'), ("a.safetensors", b"")])
    prepare_for_energon(writer.root, ["train"])
    list(islice(build_train_loader(make_config(path=str(writer.root)), rank=0, world_size=1), 2))
    assert any("unreadable" in message for message in caplog.messages)
    assert all(message.isprintable() for message in caplog.messages)


# --- mutations ----------------------------------------------------------------------------------------------------


@within_memory()
def test_mutated_samples_end_nothing(make_config, toy, request):
    """`--cases N` samples, each changed by chance, are refused or packed into finite numbers."""
    config = make_config()
    shares = (("last_frame", 0.4), ("keyframes", 0.3), ("inpaint", 0.3), ("edit", 1.0))
    pack_format = PackFormat(
        model=config.model, seq_length=200, text_seq_length=40, seed=1, text_dropout=0.0, conditioning=shares
    )
    rules = Rules.of(config.data, pack_format, training=True)
    described = {"caption": "ä", "fps": 8.5, "height": 32, "width": 48, "num_frames": 9, "aesthetic_score": 4.5}
    shape = (toy.channels, 3, 4, 4)
    latent_CTHW = torch.linspace(-1, 1, 4 * 48).reshape(shape).half()
    tensors_of = {"latent": latent_CTHW, "text": torch.ones(3, 8).half()}
    forms = [
        (described, tensors_of),
        (described | {"frame_times": [2.0, 0.5]}, tensors_of | {"frames": -latent_CTHW[:, :2]}),
        (described, tensors_of | {"reference": -latent_CTHW, "image_text": torch.ones(2, 8).half()}),
    ]
    found: Counter[str] = Counter()
    for case in range(request.config.getoption("--cases") or 400):
        draw = random.Random(case)
        members = dict(sample_members("a", *forms[case % 3]))
        name = draw.choice(sorted(members))
        members[name] = mutated(members[name], draw)
        crude = {"__key__": "a", OCCURRENCE: 0, **{key.partition(".")[2]: value for key, value in members.items()}}
        try:
            sample = rules.crop(decode(crude))
        except UnreadableSampleError as error:
            assert len(str(error)) < 10_000
            found["unreadable"] += 1
            continue
        if against := rules.reason_against(sample):
            found[against[0]] += 1
            continue
        batch = pack_format.pack([sample])
        assert batch.tokens_S1P.isfinite().all() and batch.text_L1E.isfinite().all() and batch.fps_G.isfinite().all()
        found["packed"] += 1
    print(dict(found))
    assert found["unreadable"] and found["packed"]
