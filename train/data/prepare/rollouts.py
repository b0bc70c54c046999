"""`megadit prepare rollouts BUNDLE OUT`: videos of a policy with rewards, for `train.distill.objective=diffusion_nft`.

    megadit prepare rollouts BUNDLE data/rollouts --prompt_file prompts.txt --group_size 8 --scorer_dir my_scorer

Each prompt has a group of videos. A user's program (`infer/hooks/scorer.py`) scores them in a process of its own; a
weighted sum of its scores becomes the reward, relative to the group. Videos without a score are left out, and so are
groups of fewer than two. As with `prepare prior`, shards are divided among ranks, and an interrupted command continues.

Shapes: N videos.
"""

import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load
from torch import Tensor

from megadit.infer.evaluate.metrics.scorer import scorer_fingerprint
from megadit.infer.hooks.scorer import find_scorer
from megadit.infer.hooks.scorer_process import ScorerProcess
from megadit.infer.pipeline.checkpoints import open_bundle
from megadit.infer.pipeline.results import GeneratedVideo
from megadit.infer.sampling.resolve import resolve_settings
from megadit.models.shared.cli.options import read_options
from megadit.models.shared.cli.setting import group, setting
from megadit.models.shared.documents import parse_json
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_json, write_json
from megadit.models.shared.tar_files import UntrustedTarFile
from megadit.train.data.prepare.prior import GROUPS, Prior, Purpose, SampleOptions, prepare_samples, prompts_of
from megadit.train.data.writer import is_prepared, json_member, write_members

REWARDS_FILE, SCORES_FILE = "rewards.json", "scores.json"
"""Reward of each video, and means of all scores, in the folder of the data set."""
ROLLOUTS = Purpose(
    name="rollouts",
    description="Videos of a model with rewards by your own scorer, to learn from with diffusion_nft.",
    is_prior=False,
    next="learn of them with train.distill.objective=diffusion_nft (`megadit reward` does all of it)",
)
EQUAL = 1e-6
"""Standard deviation below which scores count as equal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scoring:
    """Groups of videos, and what is rewarded in them."""

    group_size: int = setting(
        8, "videos of each prompt, which are compared with one another (default: {default})", low=2
    )
    scorer_dir: Sequence[Path] = setting(
        (), "folders of scorers (scorer.py), whose scores are rewarded", nargs="+", metavar="DIR"
    )
    watch_dir: Sequence[Path] = setting(
        (), "folders of scorers whose scores are only reported", nargs="+", metavar="DIR"
    )
    reward: Sequence[str] = setting(
        (), "weights of scores (default: 1 or -1, by the scorer's BETTER)", nargs="+", metavar="NAME=WEIGHT"
    )
    scorer_seconds: float = setting(60.0, "time limit of a scorer for one video (default: {default})", above=0)

    def check(self) -> None:
        """Raises UserError if there is no scorer, or if a folder holds none."""
        if not self.scorer_dir:
            raise UserError("there is nothing to reward: give --scorer_dir DIR, a folder with a scorer.py")
        for folder in (*self.scorer_dir, *self.watch_dir):
            find_scorer(folder)

    @property
    def request(self) -> dict[str, Any]:
        """JSON values that determine the rewards."""
        folders = {"scorers": self.scorer_dir, "watched": self.watch_dir}
        prints = {name: [scorer_fingerprint(folder) for folder in several] for name, several in folders.items()}
        return {"group_size": self.group_size, "reward": list(self.reward), **prints}

    @property
    def arguments(self) -> list[str]:
        """These settings as a command line."""
        several = {"--scorer_dir": self.scorer_dir, "--watch_dir": self.watch_dir, "--reward": self.reward}
        found = ["--group_size", str(self.group_size), "--scorer_seconds", f"{self.scorer_seconds:g}"]
        return found + [word for name, values in several.items() if values for word in (name, *map(str, values))]


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutOptions(SampleOptions):
    scoring: Scoring = group(Scoring)
    adapter: str | None = setting(None, "adapter that is attached to the model", metavar="PATH")


def command(source: str, argv: list[str]) -> int:
    """Runs `megadit prepare rollouts`."""
    groups = GROUPS | {
        "most used": ("prompt", "prompt_file", "group_size", "scorer_dir", "reward", "seed", "overwrite"),
        "other": ("watch_dir", "scorer_seconds", "adapter"),
    }
    example = "megadit prepare rollouts bundle data/rollouts --prompt_file prompts.txt --scorer_dir my_scorer"
    about = {"description": ROLLOUTS.description, "examples": (example,)}
    options = read_options(RolloutOptions, argv, groups=groups, prog=f"megadit prepare {source}", **about)
    scoring = options.scoring
    scoring.check()
    bundle = open_bundle(options.bundle)
    prompts = [prompt for prompt in prompts_of(options) for _ in range(scoring.group_size)]
    is_made = is_prepared(options.out) and not options.overwrite
    with ExitStack() as stack:
        scorers, watchers = (
            [stack.enter_context(ScorerProcess(folder, seconds=scoring.scorer_seconds)) for folder in folders]
            for folders in (((), ()) if is_made else (scoring.scorer_dir, scoring.watch_dir))
        )
        weights = {} if is_made else weights_of(scoring.reward, scorers)

        def describe(video: GeneratedVideo) -> dict[str, Any]:
            asked = [each.scores(video.video, video.prompt) for each in (*scorers, *watchers)]
            scores = {name: score for each in asked for name, score in each.items()}
            if all(asked):
                _check_names(weights, scores, scorers)
            return {"scores": scores}

        prior = Prior(
            purpose=ROLLOUTS,
            prompts=prompts,
            settings=resolve_settings(bundle.defaults, **asdict(options.settings)),
            count=len(prompts),
            seed=options.seed,
            batch_size=options.batch_size,
            adapters={} if options.adapter is None else {options.adapter: 1.0},
            describe=describe,
            more=scoring.request,
        )
        count = prepare_samples(options, bundle, prior, partial(give_rewards, weights, scoring.group_size))
    if count is not None:
        print(f"{options.out}: {count} of {len(prompts)} videos have rewards; {ROLLOUTS.next}")
    return 0


def weights_of(asked: Sequence[str], scorers: Sequence[ScorerProcess]) -> dict[str, float]:
    """Weight of each rewarded score.

    Raises:
        UserError: for what is no NAME=WEIGHT, or if no scorer says which scores are better.
    """
    if not asked:
        weights = {
            name: 1.0 if better == "higher" else -1.0 for each in scorers for name, better in each.better.items()
        }
        if not weights:
            raise UserError("the scorer does not say which scores are better (BETTER): give --reward NAME=WEIGHT")
        return weights
    weights = {}
    for each in asked:
        name, _, weight = each.rpartition("=")
        try:
            weights[name] = float(weight)
        except ValueError:
            name = ""
        if not name or not np.isfinite(weights[name]):
            raise UserError(f"--reward {each}: write NAME=WEIGHT, such as beauty=1 or flicker=-0.5")
    return weights


def _check_names(weights: Collection[str], scores: Collection[str], scorers: Sequence[ScorerProcess]) -> None:
    """Raises UserError for a reward that no scorer has, at the first video that all of them have scored."""
    known = {*scores, *OF_GROUPS, *(name for each in scorers for name in each.better)}
    if missing := [name for name in weights if name not in known]:
        raise UserError(f"--reward {missing[0]}=...: there is no such score; known are {', '.join(sorted(known))}")


def rewards(scores_N: Sequence[float | None], group_size: int) -> list[float | None]:
    """Optimality probability of each video, 0 to 1: 1/2 + 1/2 clip((score - mean of its group) / std, -1, 1) (arXiv
    2509.16117, section 3.2), where std is that of all scores; None without a score, or with no other in the group."""
    known = [score for score in scores_N if score is not None]
    std = float(np.std(known)) if known else 0.0
    found: list[float | None] = []
    for first in range(0, len(scores_N), group_size):
        group = scores_N[first : first + group_size]
        of_group = [score for score in group if score is not None]
        mean = float(np.mean(of_group)) if len(of_group) > 1 else None
        for score in group:
            if score is None or mean is None:
                found.append(None)
            else:
                found.append(0.5 + 0.5 * float(np.clip((score - mean) / std, -1, 1)) if std > EQUAL else 0.5)
    return found


def diversity(latents_NCTHW: Tensor, group_size: int) -> list[float]:
    """Score of a video within its group: its mean squared distance from the group's other videos, in multiples of that
    of all groups. It holds a policy back from making one video of each prompt, which other scores reward."""
    of_groups = [group.float().flatten(1) for group in latents_NCTHW.split(group_size)]
    distances = [torch.cdist(group, group).square().sum(1) / max(1, len(group) - 1) for group in of_groups]
    distance_N = torch.cat(distances)
    return (distance_N / distance_N.mean().clamp_min(EQUAL)).tolist()


OF_GROUPS = {"diversity": diversity}
"""Name of a score that is computed from a group's latents, without a scorer -> (latents, group size) -> scores."""


def give_rewards(weights: Mapping[str, float], group_size: int, folder: Path) -> int:
    """Add rewards to the samples of all shards, leave out those without, and write the scores' means.

    Rewards are written down before any shard is changed, so that an interrupted call can be repeated.

    Returns:
        the number of samples.

    Raises:
        UserError: if no video has a reward.
    """
    shards = sorted(folder.glob("train-*.tar"))
    if not (folder / REWARDS_FILE).exists():
        known = {key: description for path in shards for key, description, _ in _samples(path)}
        if names := OF_GROUPS.keys() & weights.keys():
            latents_NCTHW = torch.stack([load(tensors)["latent"] for path in shards for *_, tensors in _samples(path)])
            for name in names:
                for description, score in zip(known.values(), OF_GROUPS[name](latents_NCTHW, group_size), strict=True):
                    description["scores"] |= {name: score} if description["scores"] else {}
        scores_N = [_score(description["scores"], weights) for description in known.values()]
        found = dict(zip(known, rewards(scores_N, group_size), strict=True))
        write_json(folder / SCORES_FILE, _summary(known.values(), scores_N, found.values()))
        write_json(folder / REWARDS_FILE, found)
    reward_of = read_json(folder / REWARDS_FILE)
    given = [reward for reward in reward_of.values() if reward is not None]
    if not given:
        shutil.rmtree(folder)  # nothing in it can be learnt from, and another attempt shall not find it
        raise UserError(
            f"none of {len(reward_of)} videos has a reward: the scorers must return {', '.join(weights)}; their "
            "errors are above"
        )
    if len({*given}) == 1:
        print("all scores of each group are equal: there is nothing to learn")
    for path in shards:
        write_members(path, _rewarded([*_samples(path)], reward_of))
    return len(given)


def _score(scores: Mapping[str, float], weights: Mapping[str, float]) -> float | None:
    if weights.keys() - scores.keys():
        return None
    return sum(weight * scores[name] for name, weight in weights.items())


def _samples(path: Path) -> Iterator[tuple[str, dict[str, Any], bytes]]:
    """(key, description, tensors) of the samples of a shard."""
    with UntrustedTarFile.open(path, "r:") as tar:
        contents = {member.name: tar.extractfile(member).read() for member in tar}
    for name, content in contents.items():
        key, _, suffix = name.rpartition(".")
        if suffix == "json":
            yield key, parse_json(content, name), contents[f"{key}.safetensors"]


def _rewarded(samples: Sequence[tuple], reward_of: Mapping[str, float | None]) -> Iterator[tuple[str, bytes]]:
    for key, description, tensors in samples:
        if (reward := reward_of[key]) is not None:
            yield json_member(key, description | {"reward": reward})
            yield f"{key}.safetensors", tensors


def _summary(
    descriptions: Collection[dict[str, Any]],
    scores_N: Sequence[float | None],
    rewards_N: Collection[float | None],
) -> dict[str, Any]:
    """Number of videos and of rewards, and means of the weighted sum and of each score."""
    names = sorted({name for description in descriptions for name in description["scores"]})
    values = {name: [each["scores"][name] for each in descriptions if name in each["scores"]] for name in names}
    known = [score for score in scores_N if score is not None]
    return {
        "videos": len(descriptions),
        "rewarded": sum(reward is not None for reward in rewards_N),
        "score": float(np.mean(known)) if known else None,
        "means": {name: float(np.mean(values[name])) for name in names},
    }
