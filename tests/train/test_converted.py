"""A published pipeline comes in, is trained on and goes out: at a learning rate of nothing it is what it was, and its
frame rate is that of the data all the way."""

import io
import json
import os
import pickle
import tarfile
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load

from megadit.infer.generate.command import main as generate
from megadit.infer.media.video_io import read_video, write_video
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.models.bundle import Bundle
from megadit.models.commands.convert import main as convert
from megadit.train.checkpoints.to_bundle import main as make_bundle
from megadit.train.data.prepare import command as prepare
from megadit.train.dataset.dataset_info import iter_descriptions
from tests.models.convert.test_wan import text_to_video

pytestmark = pytest.mark.slow
SETTINGS = (
    *("train.precision=fp32", "train.train_iters=2", "train.num_threads=1", "optimizer.optimizer=adamw"),
    *("optimizer.lr=1e-30", "optimizer.min_lr=0", "data.num_workers=0", "data.global_batch_size=2"),
    *("data.packing_buffer_size=2", "data.shuffle_buffer_size=2", "data.seq_length=64", "data.text_seq_length=1024"),
    *("validation.interval=2", "validation.num_batches=1", "validation.prompts=[a]", "validation.sampling.num_steps=1"),
    *("logger.tensorboard=false", "ema.sigma_rels=[]"),
)


def write_clips(folder: Path) -> None:
    """Four clips of a second, at 48 frames a second: both rates divide it."""
    folder.mkdir()
    for number in range(4):
        ramp = np.arange(64, dtype=np.uint8)[:, None] + 2 * np.arange(64, dtype=np.uint8)
        frames = np.stack([np.roll(ramp, (number + 1) * t, axis=number % 2) for t in range(48)])
        write_video(folder / f"{number}.mp4", frames[..., None].repeat(3, -1), 48)
        (folder / f"{number}.txt").write_text("a red seven")


@pytest.fixture(scope="module")
def converted(tmp_path_factory, write_t5):
    """The bundle of a tiny Wan."""
    folder = tmp_path_factory.mktemp("wan")
    text_to_video(folder, write_t5)
    assert convert([str(folder / "Tiny"), str(folder / "converted")]) == 0
    return folder / "converted"


@pytest.fixture(scope="module")
def encoders(converted):
    return [word for name in ("tokenizer", "text_encoder") for word in (f"--{name}", str(converted / name))]


@pytest.fixture(scope="module")
def train(converted, run_ranks):
    """train(folder): two steps from the bundle, on the data set there."""
    model = json.loads(json.dumps(asdict(Bundle.open(converted).config)))

    def train(folder: Path) -> None:
        (folder / "run.yaml").write_text(yaml.safe_dump({"recipe": "digits_tiny", "model": model}))
        places = (f"checkpoint.init_from={converted}", f"data.path={folder / 'dataset'}")
        options = ("--config-file", folder / "run.yaml", *SETTINGS, *places, f"train.output_dir={folder / 'run'}")
        run_ranks(1, "-m", "megadit.train", *map(str, options))

    return train


@pytest.fixture(scope="module", params=[16, 24])
def trained(request, tmp_path_factory, encoders, train):
    """(frame rate, folder with `dataset`, `run` and `trained`)."""
    folder = tmp_path_factory.mktemp("trained")
    write_clips(folder / "clips")
    options = ["--sizes", "32x32", "--num_frames", "9", "--val_share", "0.3", "--num_workers", "0", *encoders]
    command = ["videos", str(folder / "clips"), str(folder / "dataset"), "--fps", str(request.param), *options]
    assert prepare.main(command) == 0
    train(folder)
    assert make_bundle([str(folder / "run"), str(folder / "trained"), "--ema", "none"]) == 0
    return request.param, folder


def test_at_a_learning_rate_of_nothing_it_samples_and_goes_out_as_it_came(converted, trained):
    _, folder = trained
    defaults = Bundle.open(converted).defaults
    settings = {"num_frames": 9, "height": 32, "width": 32, "fps": 16, "num_steps": 2, "guidance": 5.0, "seeds": 3}
    settings |= {name: getattr(defaults, name) for name in ("sampler", "schedule", "shift", "negative_prompt")}
    before, after = (
        TextToVideo.from_pretrained(path, device="cpu")(["a red seven"], **settings)[0].latents_CTHW
        for path in (converted, folder / "trained")
    )
    assert torch.equal(before, after) and before.std() > 0
    assert convert([str(folder / "trained"), str(folder / "out"), "--to", "diffusers"]) == 0
    ours, theirs = (Bundle.open(path).load_dit().state_dict() for path in (folder / "trained", converted))
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def test_the_frame_rate_of_the_data_is_that_of_validation_bundle_and_file(trained, tmp_path):
    fps, folder = trained
    described = [each for split in ("train", "val") for each in iter_descriptions(folder / "dataset", split)]
    assert {each.fps for each in described} == {fps}
    (sample,) = (folder / "run/samples/step_0000002").iterdir()
    assert read_video(sample)[1] == pytest.approx(fps)
    assert Bundle.open(folder / "trained").defaults.fps == fps
    options = ["--prompt", "a", "--num_steps", "1", "--device", "cpu", "--video_save_path", str(tmp_path / "a.mp4")]
    assert generate(["--checkpoint_path", str(folder / "trained"), *options]) == 0
    frames, rate = read_video(tmp_path / "a.mp4")
    assert (len(frames), rate) == (9, pytest.approx(fps))


# ------------------------------------------------------------------------------------------ data sets of others

TEXT = torch.linspace(-1, 1, 7 * 16).view(1, 7, 16)


def saved(value) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def latents(number: int) -> torch.Tensor:
    """Of a clip of nine frames, or of an image."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(1, 4, 1 if number == 3 else 3, 4, 4, generator=generator).bfloat16()


def write_bridge(folder: Path, number: int) -> None:
    """As prepare_dataset_wan.py of Megatron-Bridge writes a sample by WebDataset's writer: no frame rate."""
    described = {
        "video_path": f"/videos/{number}.mp4", "processed_frames": 9, "processed_height": 32, "processed_width": 32,
        "caption": f"a clip {number}", "deterministic_latents": True, "memory_optimization": True,
        "model_version": "wan2.1", "processing_mode": "video",
        "resize_settings": {"target_size": (32, 32), "resize_mode": "bilinear", "center_crop": True},
    }  # fmt: skip
    text = pickle.dumps(TEXT[0].bfloat16())
    members = {"json": json.dumps(described).encode(), "pickle": text, "pth": saved(latents(number)[0])}
    with tarfile.open(folder / "shard-rank00-000000.tar", "a") as tar:
        for suffix, content in members.items():
            member = tarfile.TarInfo(f"{number:06}.{suffix}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def write_automodel(folder: Path, number: int) -> None:
    """As AutoModel's preprocessing_multiprocess.py writes a sample of Wan; the last as Megatron-Bridge does for it."""
    padded = torch.nn.functional.pad(TEXT, (0, 0, 0, 226 - 7))
    cache = {
        "video_latents": latents(number).half(), "text_embeddings": padded,
        "first_frame": torch.zeros(32, 32, 3, dtype=torch.uint8), "original_resolution": (64, 64),
        "bucket_resolution": (32, 32), "bucket_id": None, "aspect_ratio": 1.0, "num_frames": 9,
        "prompt": f"a clip {number}", "video_path": f"/videos/{number}.mp4", "deterministic_latents": True,
        "model_version": "wan2.1", "processing_mode": "video", "model_type": "wan",
    }  # fmt: skip
    place = folder / "32x32"
    place.mkdir(exist_ok=True)
    if number < 4:
        (place / f"{number:032x}.{'pt' if number == 1 else 'meta'}").write_bytes(saved(cache))
        return
    metadata = {"file_name": "4.mp4", "start_frame": 0, "end_frame": 8, "caption": "a clip 4"}
    del cache["prompt"]
    pickled = cache | {"first_frame": np.zeros((32, 32, 3), np.uint8), "metadata": metadata}
    (folder / "4.meta").write_bytes(pickle.dumps(pickled))
    (folder / "metadata.json").write_text(json.dumps({"shards": ["metadata_shard_0000.json"]}))


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["bridge", "automodel"])
def test_samples_of_other_programs_train_at_the_frame_rate_of_their_family(kind, encoders, train, tmp_path, caplog):
    """Nothing of what they pickled runs; padding of texts is Wan's."""
    source = tmp_path / "source"
    source.mkdir()
    for number in range(5):
        (write_bridge if kind == "bridge" else write_automodel)(source, number)
    trap = pickle.dumps({"video_latents": Trap(tmp_path / "trapped"), "text_embeddings": TEXT})
    if kind == "automodel":
        (source / "trap.meta").write_bytes(trap)
    command = [kind, str(source), str(tmp_path / "dataset"), "--val_every", "5", *encoders]
    assert prepare.main(command) == 0
    assert any("it would call" in message for message in caplog.messages) == (kind == "automodel")
    assert not (tmp_path / "trapped").exists()
    found = {
        each.caption: each for split in ("train", "val") for each in iter_descriptions(tmp_path / "dataset", split)
    }
    assert found.keys() == {f"a clip {number}" for number in range(5)}
    assert {caption: (each.fps, each.num_frames) for caption, each in found.items()} == {
        f"a clip {number}": (0, 1) if number == 3 else (16, 9) for number in range(5)
    }
    with tarfile.open(next((tmp_path / "dataset").glob("train-*.tar"))) as tar:
        tensors = load(next(tar.extractfile(each).read() for each in tar if each.name.endswith(".safetensors")))
    assert torch.equal(tensors["latent"].float(), latents(0)[0].half().float())
    assert tensors["text"].shape == (512, 16) and not tensors["text"][7:].any()
    torch.testing.assert_close(tensors["text"][:7].float(), TEXT[0], rtol=0, atol=4e-3)  # bfloat16 of numbers below 1
    train(tmp_path)
    last = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 2 and np.isfinite(last["loss"])
