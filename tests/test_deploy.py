"""What `[deploy]` brings is enough: a bundle of Cosmos' tokenizer and T5 generates, exports, is served with that alone.
So are the dependencies for videos of a bundle with nothing to download, and `[train]` for training one.

An environment here sees, of what is installed, the distributions alone that the extra's requirements lead to. Its
tritonserver stands on the PATH, as the base image's does.
"""

import json
import subprocess
import tomllib
import venv
from collections import defaultdict
from collections.abc import Collection
from functools import cache
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megadit.export.operators import check_operators
from megadit.infer.inspect.doctor import needs_of
from megadit.infer.media.video_io import read_video
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.runtimes.load import open_exported
from megadit.models.bundle import Bundle
from megadit.models.configs.config import DiTConfig
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.text_encoders import T5TextEncoder
from megadit.models.tokenizers import Autoencoder
from megadit.models.tokenizers.kinds import KINDS
from megadit.models.tokenizers.network import Network, complete_config

from .bundles import write_tiny_bundle
from .export.test_families import check_report

REPOSITORY = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
PROMPT = "a red seven moving left"
DEFAULTS = SamplingSettings(
    sampler="euler", num_steps=2, guidance=2.0, num_frames=5, height=32, width=48, fps=8, sigma_max=20.0
)

MEGADIT = """
import json, sys
from megadit.models.shared.cli.verbs import main

for command in json.loads(sys.argv[1]):
    if code := main(command):
        sys.exit(code)
"""
SERVE = """
import sys
from pathlib import Path
from megadit.serve.repository.build import build_repository
from megadit.serve.client import VideoClient
from megadit.serve.contract import VideoRequest
from megadit.serve.launch.local_server import LocalServer
from megadit.serve.repository.model_config import Scheduling

bundle, *pairs = sys.argv[1:]
for runtime, out in zip(pairs[::2], pairs[1::2]):
    repository = build_repository(bundle, out + "_models", scheduling=Scheduling(device="cpu"), runtime=runtime)
    with LocalServer(repository, log=Path(out + ".log"), stop_seconds=3) as server:
        request = VideoRequest(prompt="a red seven moving left", seed=1)
        Path(out).write_bytes(VideoClient(f"grpc://{server.grpc_url}").generate(request, timeout=300)[0].data)
"""
COSMOS = DiTConfig(
    num_layers=1,
    hidden_size=48,
    num_attention_heads=2,
    in_channels=4,
    crossattn_emb_size=16,
    family="cosmos",
    adaln_lora_dim=6,
    rope_scale=(2.0, 1.0, 1.5),
    learned_positions=(12, 20, 20),
    padding_mask_channel=True,
)


def requirements_of(extras: Collection[str]) -> list[Requirement]:
    """Of the project with these extras, those of extras that they name themselves in their place."""
    texts = [*PROJECT["dependencies"], *(text for e in extras for text in PROJECT["optional-dependencies"][e])]
    found = list(map(Requirement, texts))
    own = {extra for each in found if each.name == PROJECT["name"] for extra in each.extras}
    return [each for each in found if each.name != PROJECT["name"]] + (requirements_of(own) if own else [])


def distributions(extras: Collection[str]) -> set[str]:
    """All that these lead to, of what is installed."""
    asked = requirements_of(extras)
    return {canonicalize_name(each.name) for each in asked} | {
        need.name for each in asked for need in needs_of(each.extras, each.name) if need.found
    }


@cache
def installed() -> tuple[dict[str, metadata.Distribution], dict[str, list], dict[str, set[str]]]:
    """What is installed by its name, the files of each, and who has files in a folder."""
    found, owners = {}, defaultdict(set)
    for each in metadata.distributions():  # setuptools, once imported, puts copies of its own behind those installed
        found.setdefault(canonicalize_name(each.metadata["Name"]), each)
    files = {
        name: [file for file in each.files or () if file.parts[0] not in ("..", "__pycache__")]
        for name, each in found.items()
    }
    for name, of_name in files.items():
        for file in of_name:
            owners[file.parts[0]].add(name)
    return found, files, owners


def make_environment(folder: Path, names: Collection[str]) -> Path:
    """An environment of these distributions, by links, and of this repository; gives its site-packages."""
    venv.create(folder, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    found, files, owners = installed()
    for name in set(names) - {PROJECT["name"]}:
        for file in files[name]:
            is_shared = not owners[file.parts[0]] <= set(names)
            link = site / (file if is_shared else file.parts[0])
            if not link.exists():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(Path(str(found[name].locate_file(link.relative_to(site)))))
    (site / "repository.pth").write_text(f"{REPOSITORY}\n")
    about = site / "megadit-0.dist-info"
    about.mkdir()
    lines = ["Metadata-Version: 2.1", "Name: megadit", "Version: 0"]
    lines += [f"Requires-Dist: {text}" for text in PROJECT["dependencies"]]
    for extra, texts in PROJECT["optional-dependencies"].items():
        lines += [f"Provides-Extra: {extra}", *(f"Requires-Dist: {_of_extra(text, extra)}" for text in texts)]
    (about / "METADATA").write_text("\n".join(lines) + "\n")
    return site


def _of_extra(text: str, extra: str) -> str:
    requirement, _, marker = text.partition(";")
    return f'{requirement}; {f"({marker.strip()}) and " if marker else ""}extra == "{extra}"'


@pytest.fixture(scope="module")
def tritonserver_on_path(tmp_path_factory):
    """tritonserver_on_path(site): a folder whose `tritonserver` runs models with the packages of `site`."""
    from megadit.models.shared.errors import UserError
    from megadit.serve.launch.triton_binary import find_triton

    try:
        triton = find_triton()
    except UserError as error:
        pytest.skip(str(error))
    prepared = Path(triton.environment["PATH"].partition(":")[0]).parent
    numpy_1 = next(prepared.glob("lib/python*/site-packages"))

    def put(site: Path) -> Path:
        folder = tmp_path_factory.mktemp("vendor")
        venv.create(folder / "python", symlinks=True)
        inner = next((folder / "python").glob("lib/python*/site-packages"))
        for path in numpy_1.glob("numpy*"):
            (inner / path.name).symlink_to(path)
        (inner / "image.pth").write_text(f"import site; site.addsitedir({str(site)!r})\n")
        script = folder / "tritonserver"
        exports = f'export LD_LIBRARY_PATH="{triton.environment["LD_LIBRARY_PATH"]}" PATH="{folder}/python/bin:$PATH"'
        script.write_text(f'#!/bin/sh\n{exports}\nexec "{triton.path}" {" ".join(triton.arguments)} "$@"\n')
        script.chmod(0o755)
        return folder

    return put


@pytest.fixture(scope="module")
def bundle(tmp_path_factory, make_cosmos_autoencoder, write_t5) -> Path:
    folder = tmp_path_factory.mktemp("published")
    vae, kind = make_cosmos_autoencoder(4, statistics=True), KINDS["cosmos"]
    settings = complete_config(kind.class_name, dict(vae.config))
    network = Network.build(kind.class_name, settings, vae.state_dict(), "the test")
    tokenizer = Autoencoder(kind=kind, network=network, sigma_data=COSMOS.sigma_data)
    encoder = T5TextEncoder(model=str(write_t5(folder / "t5")), dtype="float32", text_padding="zeros", max_length=9)
    return write_tiny_bundle(folder / "bundle", COSMOS, tokenizer, encoder, DEFAULTS).path


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """image(names, path): runs a script with arguments in an environment of these distributions."""

    def make(names: Collection[str]):
        folder = tmp_path_factory.mktemp("image")
        site = make_environment(folder / "venv", names)

        def run(script: str, *arguments: object, path: str | Path = "") -> subprocess.CompletedProcess:
            command = [folder / "venv/bin/python", "-c", script, *map(str, arguments)]
            environment = {"PATH": f"{path}:/usr/bin:/bin", "HOME": str(folder), "OMP_NUM_THREADS": "1"}
            return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=500)

        return site, run

    return make


RUNTIMES = ("torch", "onnx")


def of_files(one, other):
    """How far two videos are apart; encodings of frames that differ by 1 in few pixels, less than 0.1."""
    return np.abs(read_video(one)[0].astype(int) - read_video(other)[0]).mean()


@pytest.fixture(scope="module")
def deployed(image, bundle, tmp_path_factory):
    """(site, run, folder) of an environment of `[deploy]`, which has exported the bundle into FOLDER/exported and made
    FOLDER/RUNTIME.mp4."""
    site, run = image(distributions(["deploy"]))
    folder = tmp_path_factory.mktemp("deployed")
    exported = str(folder / "exported")
    ask = ["--checkpoint_path", exported, "--prompt", PROMPT, "--seed", "1", "--device", "cpu"]
    sizes = ["--profile", "batch=1,1,2", "--profile", "frames=1,5,9"]
    commands = [["doctor", "--extras", "deploy"], ["export", str(bundle), exported, "--video_steps", "1", *sizes]]
    commands += [
        ["generate", *ask, "--runtime", name, "--video_save_path", str(folder / f"{name}.mp4")] for name in RUNTIMES
    ]
    done = run(MEGADIT, json.dumps(commands))
    assert done.returncode == 0, done.stdout + done.stderr
    return site, run, folder


@pytest.mark.slow
def test_the_extra_exports_and_generates(deployed):
    """Text encoder, network, decoder and encoder as they were published pass the gate, and make torch's videos."""
    _, _, folder = deployed
    exported = Bundle.open(folder / "exported", verify=True)
    report = exported.manifest["export"]["onnx"]["report"]
    assert report.keys() == {"text_encoder", "denoiser", "video_decoder", "video_encoder", "video"}
    check_report(report["denoiser"], open_exported(exported, "onnx").network("denoiser"))
    assert report["video"]["psnr"] >= 50
    for name in report.keys() - {"video"}:
        check_operators(exported.path / f"onnx/{name}.onnx")
    ours, theirs = (
        TextToVideo.from_pretrained(exported, device="cpu", runtime=name)(["a red seven", "the robot waves"], seeds=1)
        for name in RUNTIMES
    )
    for by_torch, by_onnx in zip(ours, theirs, strict=True):
        error = np.abs(by_onnx.video.astype(int) - by_torch.video)
        assert error.max() <= 1 and (error > 0).mean() < 0.01  # rounding to 8 bits may fall either way
    assert of_files(folder / "torch.mp4", folder / "onnx.mp4") < 0.1


@pytest.mark.slow
def test_the_extra_serves(deployed, tritonserver_on_path, tmp_path):
    site, run, folder = deployed
    served = [word for name in RUNTIMES for word in (name, tmp_path / f"{name}.mp4")]
    done = run(SERVE, folder / "exported", *served, path=tritonserver_on_path(site))
    assert done.returncode == 0, done.stdout + done.stderr
    for name in RUNTIMES:
        assert of_files(folder / f"{name}.mp4", tmp_path / f"{name}.mp4") < 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "command"),
    [
        ("diffusers", ["generate", "--checkpoint_path", "BUNDLE", "--prompt", PROMPT, "--device", "cpu"]),
        ("transformers", ["generate", "--checkpoint_path", "BUNDLE", "--prompt", PROMPT, "--device", "cpu"]),
        ("onnxruntime", ["export", "BUNDLE", "out"]),
        ("tritonclient", ["serve", "ask", PROMPT]),
        ("sqlalchemy", ["doctor", "--extras", "deploy"]),
    ],
)
def test_without_one_of_its_libraries_it_fails(image, bundle, library, command):
    """The control: what is not named cannot be imported."""
    _, run = image(distributions(["deploy"]) - {library})
    done = run(MEGADIT, json.dumps([[str(bundle) if word == "BUNDLE" else word for word in command]]))
    assert done.returncode != 0 and library in done.stderr, done.stderr
    assert run("import megatron.core").returncode != 0, "an extra that is not asked for"


LEAST = """
import sys
from megadit import TextToVideo

bundle, out = sys.argv[1:]
(video,) = TextToVideo.from_pretrained(bundle, device="cpu")(["a red seven"], seeds=1)
video.save(out)
help(TextToVideo)
"""


@pytest.mark.slow
def test_the_dependencies_alone_make_a_video(image, tmp_path):
    bundle = write_tiny_bundle(tmp_path / "bundle").path
    _, run = image(distributions([]))
    done = run(LEAST, bundle, tmp_path / "video.mp4")
    assert done.returncode == 0 and "from_pretrained" in done.stdout, done.stderr
    assert (tmp_path / "video.mp4").stat().st_size > 0
    assert "No module named 'fastapi'" in run("import fastapi").stderr, "an extra that is not asked for"


@pytest.mark.slow
def test_the_extra_prepares_and_trains(image, tmp_path):
    _, run = image(distributions(["train"]))
    data, out, bundle = (str(tmp_path / name) for name in ("data", "run", "bundle"))
    commands = [
        ["prepare", "digits", data, "--num_clips", "40", "--num_images", "20", "--num_val", "8"],
        ["train", "--recipe", "digits_tiny", f"data.path={data}", f"train.output_dir={out}", "train.train_iters=2"],
        ["bundle", out, bundle],
    ]
    done = run(MEGADIT, json.dumps(commands))
    assert done.returncode == 0 and (tmp_path / "bundle" / "megadit.json").is_file(), done.stdout + done.stderr


def test_doctor_names_what_is_missing(monkeypatch, capsys):
    from megadit.infer.inspect import doctor

    known = {"megadit": ["one>=2; extra == 'deploy'", "other; extra == 'train'"], "one": ["two"], "two": []}
    monkeypatch.setattr(doctor.metadata, "metadata", lambda name: Extras())
    monkeypatch.setattr(doctor.metadata, "requires", known.get)
    versions = {"megadit": "1.0", "one": "2.1", "two": "1.0"}
    monkeypatch.setattr(doctor, "_version", versions.get)
    assert doctor.main(["--extras", "deploy"]) == 0
    versions["one"] = "1.9"
    del versions["two"]
    assert doctor.main(["--extras", "deploy"]) == 1
    told = capsys.readouterr().err
    assert "one>=2, which megadit requires, is 1.9" in told and "two, which one requires, is missing" in told
    assert doctor.main(["--extras", "deplyo"]) == 2
    assert "did you mean 'deploy'" in capsys.readouterr().err
    del versions["megadit"]
    assert doctor.main(["--extras", "deploy"]) == 2
    assert "megadit is not installed" in capsys.readouterr().err


class Extras:
    def get_all(self, name: str) -> list[str]:
        return ["deploy", "train"]
