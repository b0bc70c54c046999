"""A bundle of the first run, its exported graphs, and the videos of both."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from golden_parts.commands import megadit
from golden_parts.digests import digest, digest_file, digest_tensor, digest_tensors
from golden_parts.runs import frames, trained

PROMPT = "a red seven moving left"
SAMPLERS = ("euler", "heun", "dpm2", "dpmpp_2m", "dpmpp_3m", "res_2ab", "unipc")
LINES: list[dict[str, Any]] = [
    {"seed": 1},
    *({"sampler": sampler, "num_steps": 4} for sampler in SAMPLERS),
    {"sampler": "heun", "num_steps": 3, "churn": 4.0, "churn_interval": [0.1, 50], "eta": 0.5},
    {"sampler": "euler", "eta": 0.0, "num_frames": 1, "guidance": 2.0, "guidance_rescale": 0.5},
    {"num_steps": 4, "guidance_interval": [0.3, 20], "shift": 2.0, "negative_prompt": "a blue three"},
    {"num_steps": 4, "second_prompt": "a green two", "second_guidance": 1.5, "height": 48, "num_frames": 5},
    {"sigmas": [40, 5, 1, 0.2], "eta": 0.0, "sampler": "dpmpp_2m"},
]
"""What the prompts of one file ask for."""


def record(work: Path, is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, Any]]:
    bundle = make_bundle(work)
    if is_wanted("bundle"):
        yield from digest_tensors(load_file(bundle / "transformer" / "model.safetensors"), "bundle/transformer/")
        yield "bundle/megadit.json", (bundle / "megadit.json").read_text().splitlines()
        yield "bundle/transformer.json", (bundle / "transformer" / "config.json").read_text().splitlines()
    if is_wanted("torch"):
        yield from generated("torch", work, bundle, LINES)
        yield from files(work, bundle)
    if is_wanted("onnx") or is_wanted("graphs"):
        exported = export(work, bundle)
        yield from generated("onnx", work, exported, LINES[:4], "--runtime", "onnx")
        for path in sorted((exported / "onnx").glob("*.onnx")):
            yield from graph(f"graphs/{path.stem}", path)
        yield "graphs/settings.json", (exported / "onnx" / "settings.json").read_text().splitlines()


def make_bundle(work: Path) -> Path:
    path = work / "bundle"
    if not path.exists():
        megadit("bundle", trained(work, "tp1")["tp1"], path, "--ema", "none")
    return path


def export(work: Path, bundle: Path) -> Path:
    path = work / "exported"
    if not path.exists():
        megadit("export", bundle, path)
    return path


def generated(name: str, work: Path, bundle: Path, lines: list[dict], *options: str) -> Iterator[tuple[str, str]]:
    """Frames as the tokenizer decodes them, before any video codec."""
    prompts, out = work / f"{name}.jsonl", work / f"videos_{name}"
    prompts.write_text("".join(json.dumps({"prompt": PROMPT, **line}) + "\n" for line in lines))
    megadit("generate", "--checkpoint_path", bundle, "--prompt_file", prompts, "--video_save_path", out,
            "--format", "png", "--device", "cpu", *options)  # fmt: skip
    videos = sorted(path for path in out.iterdir() if path.is_dir() or path.suffix == ".png")
    assert len(videos) == len(lines), videos
    for number, path in enumerate(videos):
        pictures = sorted(path.glob("*.png")) if path.is_dir() else [path]
        yield f"{name}/{number:02d}", digest_tensor(torch.stack([picture(each) for each in pictures]))


def picture(path: Path) -> torch.Tensor:
    import numpy
    from PIL import Image

    return torch.from_numpy(numpy.array(Image.open(path)))


def files(work: Path, bundle: Path) -> Iterator[tuple[str, Any]]:
    """The latents, the frames that a player sees, and what is written beside them."""
    for kind in ("mp4", "safetensors"):
        out = work / f"one.{kind}"
        megadit(
            "generate", "--checkpoint_path", bundle, "--prompt", PROMPT, "--video_save_path", out, "--device", "cpu"
        )
    yield "torch/mp4", digest_tensor(frames(work / "one.mp4"))
    yield from digest_tensors(load_file(work / "one.safetensors"), "torch/latents/")
    beside = next(path for path in (work / "one.mp4.json", work / "one.json") if path.exists())  # of older checkouts
    yield "torch/settings.json", beside.read_text().replace(str(work), "WORK").splitlines()


def graph(name: str, path: Path) -> Iterator[tuple[str, Any]]:
    """The file, and what is left of it without names: operations in order with what each reads, and weights."""
    import onnx

    found = onnx.load(path).graph
    numbers = {"": "-"}
    for each in (*found.input, *found.initializer):
        numbers[each.name] = f"v{len(numbers)}"
    lines = []
    for node in found.node:
        for output in node.output:
            numbers[output] = f"v{len(numbers)}"
        attributes = " ".join(re.sub(r"\s+", " ", str(a)) for a in sorted(node.attribute, key=lambda a: a.name))
        reads, writes = ([numbers[each] for each in side] for side in (node.input, node.output))
        lines.append(f"{writes} = {node.op_type}({reads}) {attributes}")
    weights = [f"{w.data_type} {list(w.dims)} {digest(weight_bytes(w))}" for w in found.initializer]
    yield f"{name}/file", digest_file(path)
    yield f"{name}/num_nodes", len(lines)
    yield f"{name}/operations", digest("\n".join(lines).encode())
    yield f"{name}/weights", digest("\n".join(sorted(weights)).encode())


def weight_bytes(initializer: Any) -> bytes:
    from onnx import numpy_helper

    return numpy_helper.to_array(initializer).tobytes()
