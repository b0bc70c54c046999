"""Networks that judge as Triton models: what they answer, their configuration, and a real tritonserver."""

import base64
import io
import shutil
from dataclasses import fields

import imageio.v3 as iio
import numpy as np
import pytest
import torch

from megadit.infer.commands.classify import Classifier
from megadit.infer.evaluate.videos import Clip
from megadit.infer.matching import Matcher
from megadit.models.shared.cli import verbs
from megadit.models.shared.errors import UserError
from megadit.serve.backend.features import MODELS, Features
from megadit.serve.launch.local_server import LocalServer
from megadit.serve.repository.build import build_repository
from megadit.serve.repository.features import LIMITS, build_feature_repository
from megadit.serve.repository.model_config import Scheduling
from megadit.serve.service_info import Limits
from tests.bundles import write_clip_bundle
from tests.serve.repository.test_build import parse

grpc = pytest.importorskip("tritonclient.grpc")
httpx = pytest.importorskip("httpx")

TEXTS = ["a red seven", "the number nine", ""]
ON_CPU = Scheduling(device="cpu", max_batch_size=4)


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return write_clip_bundle(tmp_path_factory.mktemp("clip") / "bundle")


@pytest.fixture(scope="module")
def classifier(exported_classifier):
    return exported_classifier


def picture(number, size=(40, 48)):
    return np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)


def png(pixels_HWC):
    file = io.BytesIO()
    iio.imwrite(file, pixels_HWC, extension=".png")
    return file.getvalue()


def clips(numbers):
    return [Clip(picture(number)[None], 0.0, "a picture") for number in numbers]


# ------------------------------------------------------------------------------------------------- without Triton


@pytest.fixture
def opened(clip, classifier):
    """opened(name, **limits): one of the models."""
    made = []

    def open_model(name, **limits):
        bundle = classifier if name in MODELS["classifier"] else clip
        runtime = "onnx" if bundle is classifier else "torch"
        most = Limits(max_frames=1, max_pixels=1, max_work=1, **limits)
        made.append(Features(name, bundle, runtime=runtime, device="cpu", limits=most))
        return made[-1]

    yield open_model
    for each in made:
        each.close()


def test_requests_are_answered_together_and_refused_apart(opened, clip, classifier):
    texts = opened("text_to_features", max_prompt_characters=20)
    first, bad, long, second = texts.answer([[b"a red seven"], [b"\xff"], [b"x" * 21], [b"the number nine", b""]])
    expected = Matcher(clip).texts(TEXTS)
    torch.testing.assert_close(torch.from_numpy(np.concatenate([first, second])), expected, rtol=1e-5, atol=1e-5)
    assert "is not UTF-8" in str(bad) and "has 21 characters" in str(long)
    images = opened("image_to_classes", max_media_side=100)
    three = [png(picture(number)) for number in (1, 2, 3)]
    files = [[png(picture(0))], [b"no picture"], three, [png(picture(4, (8, 101)))]]
    first, bad, second, large = images.answer(files)  # four, of a graph that takes three
    found = torch.from_numpy(np.concatenate([first, second]))
    torch.testing.assert_close(found, Classifier(classifier)(clips(range(4))), rtol=1e-4, atol=1e-5)
    assert isinstance(bad, UserError) and "sides of 1 to 100 pixels" in str(large)


def test_a_request_of_none_that_can_be_read_computes_nothing(opened):
    (answer,) = opened("text_to_features").answer([[b"\xff"]])
    assert isinstance(answer, UserError)


def test_plain_networks_say_what_they_give(exported_clip, classifier, tmp_path):
    for bundle, dims in (
        (exported_clip, {"image_tower": [-1, 64], "text_tower": [-1, 64]}),
        (classifier, {"classifier": [-1, 3]}),
    ):
        out = build_feature_repository(bundle, tmp_path / bundle.kind, runtime="onnx", with_networks=True)
        assert {path.name for path in out.iterdir()} == {*MODELS[bundle.kind], *dims}
        for name, sides in dims.items():
            config = parse((out / name / "config.pbtxt").read_text())
            assert list(config.output[0].dims) == sides and config.platform == "onnxruntime_onnx"
            assert (out / name / "1" / f"{name}.onnx").is_file()


def test_a_repository_says_what_its_models_take_and_give(clip, tmp_path):
    out = build_feature_repository(clip, tmp_path / "out", scheduling=ON_CPU, limits={"max_prompt_characters": 7})
    config = parse((out / "text_to_features" / "config.pbtxt").read_text())
    assert [(each.name, list(each.dims)) for each in (*config.input, *config.output)] == [
        ("text", [1]),
        ("features", [64]),
    ]
    assert config.max_batch_size == 4 and '"max_prompt_characters": 7' in config.parameters["limits"].string_value
    weights = [out / name / "1/bundle/transformer/model.safetensors" for name in MODELS["clip"]]
    assert weights[0].samefile(weights[1])


OF_VIDEOS = [
    *(["--images"], ["--dtype", "bfloat16"], ["--adapters", "."], ["--guardrail_dir", "."], ["--scorer_dir", "."]),
    *(["--adapter_bytes", "1"], ["--default", "num_steps=2"], ["--max_videos", "2"], ["--ranks", "2"]),
    *(["--c2pa_key", "key"], ["--runtime", "onnx"], ["--networks"]),
]


@pytest.mark.parametrize("options", OF_VIDEOS, ids=lambda options: options[0])
def test_what_it_has_not_is_refused_in_a_line(clip, tmp_path, capsys, options):
    more = ["--device", "0,1"] if options[0] == "--ranks" else []
    assert verbs.main(["serve", "build-repository", str(clip.path), str(tmp_path / "out"), *options, *more]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and not (tmp_path / "out").exists()
    assert {"--runtime": "has no onnx/", "--networks": "use onnx or tensorrt"}.get(options[0], options[0]) in error


def test_limits_are_those_of_a_request(clip):
    assert set(LIMITS) <= {each.name for each in fields(Limits)}
    with pytest.raises(UserError, match="scores how well texts fit images"):
        build_repository(clip.path, "nowhere")


# ------------------------------------------------------------------------------------------------- a real server


@pytest.fixture(scope="module")
def served(tritonserver, clip, classifier, tmp_path_factory):
    """All three models in one server: CLIP's by torch, the classifier's by ONNX Runtime."""
    folder = tmp_path_factory.mktemp("served")
    out = build_feature_repository(clip, folder / "repository", scheduling=ON_CPU)
    other = build_feature_repository(classifier, folder / "other", scheduling=ON_CPU, runtime="onnx")
    shutil.move(other / "image_to_classes", out)
    with LocalServer(out, log=folder / "triton.log", stop_seconds=3) as server:
        yield server


def ask(server, model, values, **options):
    """The output of a model for a batch of values."""
    (about,) = (row[model] for row in MODELS.values() if model in row)
    tensor = grpc.InferInput(about.input, [len(values), 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[value] for value in values], np.object_))
    with grpc.InferenceServerClient(server.grpc_url) as client:
        wanted = [grpc.InferRequestedOutput(about.output, **options)]
        return client.infer(model, [tensor], outputs=wanted).as_numpy(about.output)


@pytest.mark.slow
def test_a_real_server_answers_what_the_networks_do(served, clip, classifier):
    matcher, numbers = Matcher(clip), range(3)
    files = [png(picture(number)) for number in numbers]
    for model, values, expected in (
        ("text_to_features", [text.encode() for text in TEXTS], matcher.texts(TEXTS)),
        ("image_to_features", files, matcher.pictures(clips(numbers))),
        ("image_to_classes", files, Classifier(classifier)(clips(numbers))),
    ):
        found = torch.from_numpy(np.array(ask(served, model, values)))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(found.roll(1, 0), expected, atol=1e-3), "negative control"
    best = Classifier(classifier)(clips([0])).argmax().item()
    (told,) = ask(served, "image_to_classes", files[:1], class_count=1).reshape(-1)
    assert told.decode().endswith(f":{best}:{classifier.load_text_encoder().names[best]}")


@pytest.mark.slow
def test_what_is_wrong_is_told_and_json_is_taken(served, clip):
    for model, value in (("image_to_features", b"no picture"), ("text_to_features", b"x" * 2001)):
        with pytest.raises(grpc.InferenceServerException, match="this service takes|is no png") as refused:
            ask(served, model, [value])
        assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"
    url = f"http://{served.http_url}/v2/models"
    found = httpx.post(f"{url}/text_to_features/generate", json={"text": TEXTS[0]}).json()["features"]
    torch.testing.assert_close(torch.tensor([found]), Matcher(clip).texts(TEXTS[:1]), rtol=1e-4, atol=1e-5)
    data_url = "data:image/png;base64," + base64.b64encode(png(picture(0))).decode()
    found = httpx.post(f"{url}/image_to_features/generate", json={"image": data_url}).json()["features"]
    torch.testing.assert_close(torch.tensor([found]), Matcher(clip).pictures(clips([0])), rtol=1e-4, atol=1e-5)
