"""Whole videos beside diffusers' Cosmos pipeline: the same random weights, sizes, text features and network calls.

    python tests/benchmarks/whole_video.py [--rounds 5] [--num_steps 10]

Both sides load the folder of one pipeline, ours through `megadit convert`. In turn, in one run: a guided network call,
the decoder, a whole video; then the memory of each side in a process of its own. Figures: infer/BENCHMARKS.md.

Shapes: B batch, C latent channels, T/H/W latent frames, height, width, L text tokens, E text feature width.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch
from side_by_side import Comparison, compare, show
from torch import Tensor, nn

from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.models import machine
from megadit.models.commands.convert import main as convert
from megadit.models.networks.conditioning import Conditioning
from megadit.models.shared.cli.command import run_command
from megadit.models.shared.cli.options import read_options
from megadit.models.shared.cli.setting import setting
from megadit.models.shared.errors import UserError
from megadit.models.text_encoders import HashedWordEncoder

SIZE = {"num_frames": 9, "height": 128, "width": 128}
WIDTH, HEADS, DEPTH, TEXT_WIDTH = 512, 8, 8, 512
PROMPT = " ".join(f"word{number}" for number in range(64))
GUIDANCE, FPS = 4.0, 24


class _NoChecker:
    """In place of diffusers' safety checker, a package of its own."""

    def to(self, device: Any) -> "_NoChecker":
        return self

    def check_text_safety(self, prompt: str) -> bool:
        return True

    def check_video_safety(self, frames: Any) -> Any:
        return frames


@contextmanager
def _without_torchvision():
    """diffusers resizes a mask of zeros with torchvision, which may be missing."""

    def resize(mask: Tensor, size: Any, interpolation: Any = None) -> Tensor:
        return nn.functional.interpolate(mask, size, mode="nearest")

    stand_in = SimpleNamespace(
        functional=SimpleNamespace(resize=resize), InterpolationMode=SimpleNamespace(NEAREST="nearest")
    )
    name = "diffusers.models.transformers.transformer_cosmos.transforms"
    with mock.patch(name, stand_in, create=True):
        yield


def write_pipeline(folder: Path) -> None:
    """The parts of diffusers' pipeline with random weights, and the same as our bundle."""
    import diffusers

    torch.manual_seed(0)
    transformer = diffusers.CosmosTransformer3DModel(
        in_channels=16,
        out_channels=16,
        num_attention_heads=HEADS,
        attention_head_dim=WIDTH // HEADS,
        num_layers=DEPTH,
        text_embed_dim=TEXT_WIDTH,
        adaln_lora_dim=64,
    )
    for parameter in transformer.parameters():
        nn.init.normal_(parameter, std=0.02)
    autoencoder = diffusers.AutoencoderKLCosmos(
        encoder_block_out_channels=(32, 32, 64, 64), decode_block_out_channels=(32, 64, 64, 64), num_layers=1
    )
    transformer.save_pretrained(folder / "theirs/transformer")
    autoencoder.save_pretrained(folder / "theirs/vae")
    index = {"_class_name": "CosmosTextToWorldPipeline"}
    (folder / "theirs/model_index.json").write_text(json.dumps(index))
    HashedWordEncoder(dim=TEXT_WIDTH).save(folder / "text_encoder")
    code = convert([str(folder / "theirs"), str(folder / "ours"), "--text_encoder", str(folder / "text_encoder")])
    if code:
        raise UserError("the pipeline cannot be converted")


def text_features() -> list[Tensor]:
    """Of the prompt and the negative prompt, 1LE each."""
    return [HashedWordEncoder(dim=TEXT_WIDTH).encode([text]).features_BLE for text in (PROMPT, PROMPT[::-1])]


def our_side(folder: Path, num_steps: int) -> tuple[TextToVideo, Callable[[], Any]]:
    """The pipeline, and what makes a video."""
    pipeline = TextToVideo.from_pretrained(folder / "ours", device="cpu")
    settings = {"num_steps": num_steps, "guidance": GUIDANCE, "fps": FPS, "sampler": "euler", **SIZE}
    return pipeline, lambda: pipeline([PROMPT], negative_prompt=PROMPT[::-1], **settings)


def their_side(folder: Path, num_steps: int) -> tuple[Any, Callable[[], Any]]:
    """The pipeline, and what makes a video from the same text features."""
    import diffusers

    pipeline = diffusers.CosmosTextToWorldPipeline(
        text_encoder=None,
        tokenizer=None,
        transformer=diffusers.CosmosTransformer3DModel.from_pretrained(folder / "theirs/transformer").eval(),
        vae=diffusers.AutoencoderKLCosmos.from_pretrained(folder / "theirs/vae").eval(),
        scheduler=diffusers.EDMEulerScheduler(sigma_max=80.0, sigma_min=0.002, sigma_data=0.5),
        safety_checker=_NoChecker(),
    )
    pipeline.set_progress_bar_config(disable=True)
    features = text_features()

    def generate() -> Any:
        return pipeline(
            prompt_embeds=features[0],
            negative_prompt_embeds=features[1],
            num_inference_steps=num_steps,
            guidance_scale=GUIDANCE - 1,
            fps=FPS,
            output_type="np",
            **SIZE,
        )

    return pipeline, generate


def compare_sides(folder: Path, num_steps: int, rounds: int) -> list[Comparison]:
    ours, our_video = our_side(folder, num_steps)
    theirs, their_video = their_side(folder, num_steps)
    latents = torch.randn(1, *ours.tokenizer.latent_shape(*SIZE.values()))

    @torch.no_grad()
    def their_decoder() -> Tensor:
        return theirs.vae.decode(latents, return_dict=False)[0]

    features = text_features()
    both = Conditioning(torch.cat(features), torch.full((2,), features[0].shape[1]), torch.full((2,), float(FPS)))
    padding = torch.zeros(1, 1, SIZE["height"], SIZE["width"])

    @torch.no_grad()
    def their_call() -> None:
        for text in features:
            theirs.transformer(
                latents, torch.zeros(1), encoder_hidden_states=text, fps=FPS, padding_mask=padding, return_dict=False
            )

    def our_call() -> Tensor:
        return ours.denoiser(latents.expand(2, -1, -1, -1, -1), torch.ones(2), both)

    return [
        compare("a network call with guidance", our_call, their_call, rounds),
        compare("decoder", lambda: ours.tokenizer.decode(latents), their_decoder, rounds),
        compare(f"whole video, {num_steps} steps with guidance", our_video, their_video, rounds, limit=0.8),
    ]


def peak_memory(folder: Path, side: str, num_steps: int) -> float:
    """GB at the most of a process that makes one video."""
    command = [sys.executable, "-m", "megadit.infer.benchmark_pipeline", "--side", side, "--folder", str(folder)]
    done = subprocess.run([*command, "--num_steps", str(num_steps)], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeVideoOptions:
    rounds: int = setting(5, "pairs timed, after one not counted (default: {default})")
    num_steps: int = setting(10, "of a video (default: {default})")
    threads: int | None = setting(None, "threads of torch (default: torch's own choice)")
    folder: Path | None = setting(None, "where the weights are kept (default: nowhere)")
    side: Literal["ours", "theirs"] | None = setting(None, "make one video and tell the memory it took")


def _run(argv: list[str]) -> None:
    options = read_options(
        WholeVideoOptions,
        argv,
        prog="python tests/benchmarks/whole_video.py",
        description="Times whole videos beside diffusers' Cosmos pipeline.",
    )
    try:
        import diffusers  # noqa: F401
    except ImportError:
        raise UserError("the comparison needs diffusers: pip install diffusers") from None
    if options.threads:
        torch.set_num_threads(options.threads)
    with _without_torchvision(), tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if options.side:
            side = our_side if options.side == "ours" else their_side
            side(folder, options.num_steps)[1]()
            print(machine.peak_memory(torch.device("cpu")) / 1e9)
            return
        if not (folder / "ours").is_dir():
            write_pipeline(folder)
        show("video: megadit / diffusers' Cosmos pipeline", compare_sides(folder, options.num_steps, options.rounds))
        ours, theirs = (peak_memory(folder, side, options.num_steps) for side in ("ours", "theirs"))
        print(f"peak memory of a process: {ours:.2f} GB / {theirs:.2f} GB = {ours / theirs:.2f}")


def main(argv: list[str] | None = None) -> int:
    return run_command(_run, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
