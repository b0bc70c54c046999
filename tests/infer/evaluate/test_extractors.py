"""Extractors: the networks they claim to be, from files that run nothing."""

import hashlib
import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from megadit.infer.evaluate import convert
from megadit.infer.evaluate.extractors import open_extractors
from megadit.infer.evaluate.extractors.base import resized
from megadit.infer.evaluate.extractors.files import KIND
from megadit.infer.evaluate.extractors.i3d import I3D, _maximum
from megadit.infer.evaluate.extractors.inception import Inception
from megadit.infer.evaluate.metrics.intervals import resamplings
from megadit.infer.evaluate.metrics.table import clip_estimate
from megadit.models.commands.convert import main as convert_weights
from megadit.models.shared.errors import UserError

CPU = torch.device("cpu")


def pictures(count=2, height=20, width=28, frames=1):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, frames, height, width, 3), generator=generator, dtype=torch.uint8)


def test_resizing_is_pillow_s_without_rounding():
    video = pictures(1, 40, 56)
    ours = resized(video, 23, 31)[0, :, 0]
    for channel in range(3):
        plane = Image.fromarray(video[0, 0, :, :, channel].numpy().astype(np.float32), mode="F")
        theirs = np.asarray(plane.resize((31, 23), Image.Resampling.BICUBIC)).clip(0, 255)
        assert np.abs(ours[channel].numpy() - theirs).max() < 1e-3


PUBLISHED = {
    "inception": "d84f693f2abd7fea61cb31c87d3b2f268bf707c1bae1db219afdad3363959cb0",
    "i3d": "a8c1201808a0915266018ee685b7606a8409e579c0bed794f4c66af10ac5764a",
}
"""Of the lines "NAME SHAPE" of the public files' tensors, sorted, counters aside: those of torch-fidelity's
FeatureExtractorInceptionV3 (5e211a9, whose file is that of pytorch-fid) and of pytorch-i3d's InceptionI3d(400)
(05783d1, as VideoGPT's). With the same random weights these two gave our features, to 2.5e-7 of the largest and to the
bit."""
BEYOND = {"inception": {"fc.weight": (1008, 2048), "fc.bias": (1008,)}, "i3d": {}}
"""What the public files hold beside."""


def published(kind):
    """Name -> shape of the public file's tensors."""
    with torch.device("meta"):
        network = {"inception": Inception, "i3d": I3D}[kind]()
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()} | BEYOND[kind]
    lines = sorted(f"{name} {shape}" for name, shape in shapes.items() if "num_batches" not in name)
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest() == PUBLISHED[kind]
    return shapes


@pytest.mark.parametrize(("kind", "prefix"), [("inception", ""), ("i3d", "module.")])
def test_the_public_files_are_converted(tmp_path, kind, prefix):
    """Files with exactly the published names and shapes, counters of training with them, wrapped and not."""
    generator, shapes = torch.Generator().manual_seed(0), published(kind)
    state = {
        prefix + name: torch.rand(shape, generator=generator) if shape else torch.tensor(7)
        for name, shape in shapes.items()
    }
    torch.save(state, tmp_path / "public.pth")
    assert convert.main([kind, str(tmp_path / "public.pth"), str(tmp_path / "out.safetensors")]) == 0
    (extractor,) = open_extractors(tmp_path / "out.safetensors", CPU)
    assert extractor.width == {"inception": 2048, "i3d": 400}[kind]
    read = load_file(tmp_path / "out.safetensors")
    assert all(
        torch.equal(read[name], state[prefix + name]) for name, shape in shapes.items() if shape and name in read
    )
    assert set(shapes) - set(read) == set(BEYOND[kind])
    del state[prefix + next(iter(shapes))]  # the control: one of them is missing
    torch.save(state, tmp_path / "public.pth")
    assert convert.main([kind, str(tmp_path / "public.pth"), str(tmp_path / "less.safetensors")]) == 2


def test_pools_of_i3d_keep_a_place_for_every_step():
    x = torch.rand(1, 1, 5, 7, 8)
    pooled = _maximum(x, (3, 3, 3), (2, 2, 2))
    assert pooled.shape[2:] == (3, 4, 4)
    assert pooled[0, 0, 0, 0, 0] == x[0, 0, :2, :2, :3].max()  # the odd one of the padding lies behind
    assert pooled[0, 0, 1, 1, 0] == x[0, 0, 1:4, 1:4, :3].max()


def random_file(path, kind, narrow=16):
    torch.manual_seed(1)
    network = {"inception": Inception, "i3d": I3D}[kind](narrow=narrow)
    for parameter in network.parameters():
        if parameter.ndim > 1:
            torch.nn.init.kaiming_normal_(parameter)
    state = {name: tensor for name, tensor in network.state_dict().items() if "num_batches" not in name}
    torch.save(state | {"fc.weight": torch.zeros(3, 3)} if kind == "inception" else {"state_dict": state}, path)
    return network.eval()


@pytest.mark.parametrize(("kind", "frames"), [("inception", 1), ("i3d", 9)])
def test_a_public_file_becomes_an_extractor(tmp_path, kind, frames):
    network = random_file(tmp_path / "public.pth", kind)
    convert.convert(kind, tmp_path / "public.pth", tmp_path / "out.safetensors", narrow=16)
    (extractor,) = open_extractors(tmp_path / "out.safetensors", CPU)
    video = pictures(2, frames=frames)
    found = extractor(video)
    assert found.shape == (2, extractor.width) and found.isfinite().all()
    side = {"inception": 299, "i3d": 224}[kind]
    scaled = (resized(video, side, side) - 128) / 128 if kind == "inception" else resized(video, side, side) / 127.5 - 1
    with torch.no_grad():
        expected = network(scaled[:, :, 0] if kind == "inception" else scaled)
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found[0], found[1])


def test_other_tensors_are_refused(tmp_path, capsys):
    random_file(tmp_path / "public.pth", "i3d")
    assert convert.main(["inception", str(tmp_path / "public.pth"), str(tmp_path / "out.safetensors")]) == 2
    assert "is not inception" in capsys.readouterr().err
    torch.save({"weight": print}, tmp_path / "code.pth")
    assert convert.main(["i3d", str(tmp_path / "code.pth"), str(tmp_path / "out.safetensors")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "out.safetensors").exists()


def test_what_is_no_extractor_is_refused(tmp_path, reader_file):
    with pytest.raises(UserError, match="there are no weights at .*: give a file of"):
        open_extractors(tmp_path / "none.safetensors", CPU)
    with pytest.raises(UserError, match="has no config.json"):
        open_extractors(tmp_path, CPU)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(UserError, match="holds a model of the unsupported type 'bert'; choose one of clip, videomae"):
        open_extractors(tmp_path, CPU)
    save_file(load_file(reader_file), tmp_path / "unnamed.safetensors")
    with pytest.raises(UserError, match="unknown kind ''"):
        open_extractors(tmp_path / "unnamed.safetensors", CPU)
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors", metadata={KIND: "digits"})
    with pytest.raises(UserError, match="does not hold the weights of digits"):
        open_extractors(tmp_path / "other.safetensors", CPU)
    (tmp_path / "text.safetensors").write_bytes(b"\xff" * 40)
    with pytest.raises(UserError, match="longer than|cannot be read"):
        open_extractors(tmp_path / "text.safetensors", CPU)


def test_digit_clips_see_time_and_pictures_do_not(reader_file):
    pictures_of, clips_of = open_extractors(reader_file, CPU)
    video = pictures(3, 32, 32, frames=6)
    shuffled = video[:, torch.tensor([3, 0, 5, 1, 4, 2])]
    assert pictures_of(video[:, :1]).shape == (3, pictures_of.width)
    assert clips_of(video).shape == (3, clips_of.width)
    assert not torch.allclose(clips_of(video), clips_of(shuffled))


# --------------------------------------------------------------------------------------------- CLIP and VideoMAE


def test_clip_score_is_transformers_own_cosine(clip_folder):
    import transformers

    (extractor,) = open_extractors(clip_folder, CPU)
    prompts = ["a red seven", "a blue three moving left", "a a a a a a a a a a a a a a a a a a"]
    video = pictures(3, 32, 32, frames=2)
    frames_NFD = extractor(video.flatten(0, 1)[:, None]).reshape(3, 2, -1)
    found = clip_estimate(frames_NFD, extractor.of_texts(prompts), resamplings(prompts, "made"))

    model = transformers.CLIPModel.from_pretrained(clip_folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(clip_folder)
    mean, std = (
        torch.tensor(each)[:, None, None]
        for each in ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
    )
    cosines = []
    for number, prompt in enumerate(prompts):
        tokens = tokenizer([prompt], return_tensors="pt", truncation=True, max_length=12)
        pixels = (video[number].permute(0, 3, 1, 2).float() / 255 - mean) / std
        with torch.no_grad():
            output = model(pixel_values=pixels, input_ids=tokens.input_ids, attention_mask=tokens.attention_mask)
        cosines.append(output.logits_per_image.mean().item() / model.logit_scale.exp().item())
    assert found.value == pytest.approx(max(0.0, 100 * np.mean(cosines)), abs=1e-3)  # 1e-5 of a cosine


def test_the_bundle_of_a_clip_is_what_it_was_converted_from(clip_folder, tmp_path):
    """Of pictures of any size, and of texts, of which one is cut."""
    assert convert_weights([str(clip_folder), str(tmp_path / "bundle")]) == 0
    (ours,), (theirs,) = open_extractors(tmp_path / "bundle", CPU), open_extractors(clip_folder, CPU)
    assert (ours.name, ours.sees, ours.width) == (theirs.name, theirs.sees, theirs.width) == ("clip", "pictures", 12)
    assert ours.protocol != theirs.protocol and ours.fingerprint != theirs.fingerprint
    texts = ["a red seven", "a blue three moving left", "a a a a a a a a a a a a a a a a a a"]
    with pytest.warns(UserWarning, match="a text of 20 tokens is cut to its first 12"):
        found = ours.of_texts(texts)
    torch.testing.assert_close(found, theirs.of_texts(texts), rtol=1e-5, atol=1e-5)
    for size in ((32, 32), (20, 28)):
        torch.testing.assert_close(ours(pictures(2, *size)), theirs(pictures(2, *size)), rtol=1e-5, atol=1e-5)


def test_videomae_is_transformers_own(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.VideoMAEConfig(image_size=32, patch_size=16, num_frames=4, tubelet_size=2, **shape)
    model = transformers.VideoMAEModel(config).eval()
    model.save_pretrained(tmp_path)
    (extractor,) = open_extractors(tmp_path, CPU)
    assert extractor.fewest_frames == 4 and extractor.sees == "clips"
    video = pictures(2, 32, 32, frames=5)
    mean, std = (torch.tensor(each)[:, None, None] for each in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    with torch.no_grad():
        pixels = (video[:, :4].permute(0, 1, 4, 2, 3).float() / 255 - mean) / std
        expected = model(pixel_values=pixels).last_hidden_state.mean(1)
    torch.testing.assert_close(extractor(video), expected)


def test_pickled_weights_of_clip_are_refused(clip_folder, tmp_path):
    (tmp_path / "config.json").write_text((clip_folder / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match="pickled weights are not read"):
        open_extractors(tmp_path, CPU)
