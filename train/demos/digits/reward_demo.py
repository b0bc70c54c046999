"""`megadit demo-reward`: teaches the demo's model a wish by a scorer: digits that stay in the left half of the frame.

    megadit demo-reward                 # from the bundle of `megadit demo`, into runs/demo-reward

No clip of the data set shows it: a scorer rewards clips that are right and lie to the left.

Shapes: B clips, C colour channels, T/H/W frames, height, width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megadit.models.bundle import Bundle
from megadit.models.shared.cli.command import run_module
from megadit.models.shared.cli.options import command
from megadit.models.shared.cli.setting import group, setting
from megadit.models.shared.files import atomic_path, read_json, write_json
from megadit.train.demos import contact_sheets
from megadit.train.demos.clips import make_clips, read_clips
from megadit.train.demos.digits import classifier, score
from megadit.train.demos.digits.data import Attributes
from megadit.train.demos.stages import FollowingDemo, FollowingOptions, Stage, following_demo, run_and_show

REWARD = ("all=1", "left=1", "diversity=0.5")
SPREAD = ("0.25", "2")
"""Bounds of the diversity: clips whose place is fixed differ less."""
FAR = 3.0
"""Pixels left of the middle from which on a clip gets no higher reward; digits of the data set lie within 1.5."""
SHOWN = 6
"""Number of prompts in the picture."""
MODELS = ("before", "after")


@dataclass(frozen=True, kw_only=True)
class RewardDemo(FollowingDemo):
    """The folder of this demo, and the model it starts from."""

    rounds: int = 5
    prompts_per_round: int = 64

    @property
    def scorer(self) -> Path:
        return self.out / score.SCORER_DIR

    @property
    def prompts(self) -> Path:
        return self.out / "prompts.txt"

    @property
    def rewarded(self) -> Path:
        return self.out / "reward"

    @cached_property
    def attributes(self) -> list[Attributes]:
        """Attributes of clips that move up or down, and so may stay where they are sideways."""
        return [each for each in score.scored_attributes()[0] if each.direction in ("up", "down")]


# --- the scorer ---------------------------------------------------------------------------------------------------

_SCORER = '''"""The classifier of digits, and how far left a digit lies."""

from pathlib import Path

from megadit.train.demos.digits.reward_demo import BETTER, scorer_of_places

score = scorer_of_places(Path(__file__).with_name("classifier.safetensors"))
'''
"""The program that `megadit reward` runs."""
BETTER = {"all": "higher", "left": "higher"}


def scorer_of_places(path: Path) -> Callable[[np.ndarray, str], dict[str, float]]:
    """A scorer of videos as `score.scorer_of_prompts`, with `left`: pixels that the digit lies left of the middle, in
    multiples of `FAR`, at most 1."""
    scores_of_prompt = score.scorer_of_prompts(path)

    def scores(video_THWC: np.ndarray, prompt: str) -> dict[str, float]:
        found = scores_of_prompt(video_THWC, prompt)
        left_1T = pixels_left(torch.from_numpy(video_THWC).permute(3, 0, 1, 2)[None].float())
        return found and {**found, "left": left_1T.clamp(-FAR, FAR).mean().item() / FAR}

    return scores


def pixels_left(video_BCTHW: Tensor) -> Tensor:
    """Pixels between the middle of each frame and the centre of its light, [B, T]; positive to the left. Black is 0."""
    light_BTW = video_BCTHW.amax(1).sum(2)
    place_W = torch.arange(light_BTW.shape[-1], dtype=light_BTW.dtype)
    return (light_BTW.shape[-1] - 1) / 2 - (light_BTW * place_W).sum(-1) / light_BTW.sum(-1).clamp_min(1e-6)


# --- stages -------------------------------------------------------------------------------------------------------


def _ask(demo: RewardDemo) -> None:
    """Write the scorer, and prompts of the training set's wording."""
    file = classifier.classifier_file(demo.base, demo.out, Bundle.open(demo.base).load_tokenizer())
    score.write_scorer(demo.scorer, file)
    (demo.scorer / "scorer.py").write_text(_SCORER, encoding="utf-8")
    captions = score.random_captions(demo.attributes, "train", torch.Generator().manual_seed(demo.seed))
    with atomic_path(demo.prompts) as temporary:
        temporary.write_text("".join(f"{caption}\n" for caption in captions), encoding="utf-8")


def _reward(demo: RewardDemo) -> None:
    run_module(
        "megadit.train.reward.command",
        *(str(demo.base), str(demo.rewarded), f"train.seed={demo.seed}", "--seed", str(demo.seed)),
        *("--prompts", str(demo.prompts), "--scorer_dir", str(demo.scorer), "--reward", *REWARD),
        *("--rounds", str(demo.rounds), "--prompts_per_round", str(demo.prompts_per_round)),
        *("--recipe", "digits", "--nproc", str(demo.num_ranks), "--check_interval", str(demo.rounds)),
        *("--spread", *SPREAD),
    )


def _generate(demo: RewardDemo) -> None:
    """Clips of held-out captions by both models from the same noise, without guidance."""
    captions = score.heldout_captions(demo.attributes)
    for name, bundle in zip(MODELS, (demo.base, demo.rewarded / "bundle"), strict=True):
        make_clips(demo.clips(name), bundle, captions, guidance=1.0)


def _score(demo: RewardDemo) -> None:
    reader, found = classifier.load_reader(demo.scorer / classifier.FILE), {}
    for name in MODELS:
        video_BCTHW = read_clips(demo.clips(name))
        is_left_B = (pixels_left(video_BCTHW + 1) > 0).all(1)
        of_clips = score.score(reader, video_BCTHW, demo.attributes)
        found[name] = {"left": round(is_left_B.float().mean().item(), 4), **of_clips}
    rounds = demo.rewarded / f"round_{demo.rounds:03d}" / "comparison.json"
    write_json(demo.out / "score.json", {**found, "comparison": read_json(rounds)})


def _draw(demo: RewardDemo) -> None:
    """Draw clips of the same prompts and noise, before and after, with a line in the middle."""
    found, captions, rows = read_json(demo.out / "score.json"), score.heldout_captions(demo.attributes), []
    for name in MODELS:
        video_BCTHW = read_clips(demo.clips(name))
        video_BCTHW[..., video_BCTHW.shape[-1] // 2].clamp_(min=-0.4)
        for place in contact_sheets.spread(range(len(captions)), SHOWN):
            rows.append(contact_sheets.SheetRow(captions[place], video_BCTHW[place], note=name))
    before, after = (found[name] for name in MODELS)
    title = (
        f"rewarded: digits in the left half {before['left']:.0%} before, {after['left']:.0%} after; right in digit, "
        f"colour and direction: {before['all']:.0%} and {after['all']:.0%}"
    )
    contact_sheets.contact_sheet(demo.out / "rewarded.png", rows, title=title, columns=len(MODELS))


STAGES = (
    Stage("ask", "write prompts, and a scorer of digits and places", _ask, lambda demo: [demo.prompts]),
    Stage("reward", "make clips, score them, learn from them", _reward, lambda demo: [demo.rewarded / "bundle"]),
    Stage(
        "generate",
        "make clips of held-out captions, before and after",
        _generate,
        lambda demo: [demo.clips(name) for name in MODELS],
    ),
    Stage("score", "classify them", _score, lambda demo: [demo.out / "score.json"]),
    Stage("figures", "draw them side by side", _draw, lambda demo: [demo.out / "rewarded.png"]),
)


# --- the command --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardDemoOptions:
    following: FollowingOptions = group(FollowingOptions, only=("out", "bundle", "ranks", "seed"))
    rounds: int = setting(6, "rounds of rollouts and training (default: {default})", low=1)
    prompts_per_round: int = setting(64, "prompts of a round, eight clips each (default: {default})", low=1)


@command(
    RewardDemoOptions,
    prog="megadit demo-reward",
    description="Teaches the demo's model by rewards to keep digits in the left half of the frame.",
)
def main(options: RewardDemoOptions) -> None:
    """Runs `megadit demo-reward`; returns its exit code."""
    more = {"rounds": options.rounds, "prompts_per_round": options.prompts_per_round}
    demo = following_demo(RewardDemo, options.following, "demo-reward", **more)
    run_and_show(demo, STAGES, summary_table, demo.out / "rewarded.png")
    bundle = demo.rewarded / "bundle"
    print(f'Make your own: megadit generate --checkpoint_path {bundle} --prompt "a red seven moving up"')


def summary_table(found: dict[str, Any]) -> str:
    """Shares of clips in the left half, and of right ones; and the diversity of a prompt's clips beside the base's."""
    lines = [f"{'':10}{'left half':>12}{'all right':>12}{'every frame':>14}"]
    for name in MODELS:
        left, right, every_frame = (found[name][part] for part in ("left", "all", "every_frame"))
        lines.append(f"{name:10}{left:12.1%}{right:12.1%}{every_frame:14.1%}")
    return "\n".join([*lines, f"diversity: {found['comparison']['spread']:.2f} times that before"])
