"""`megadit prepare rollouts BUNDLE OUT`: videos of a policy with rewards, for post-training by rewards.

    megadit prepare rollouts BUNDLE data/rollouts --prompt_file prompts.txt --group_size 8 --scorer_dir my_scorer

Each prompt has a group of videos. A user's program (`infer/hooks/scorer.py`) scores them in a process of its own; CLIP,
optical flow and the group itself give further scores. Their weighted sum becomes the reward, relative to the group.
Videos without a score are left out, and so are groups of fewer than two. As with `prepare prior`, shards are divided
among ranks, and an interrupted command continues.

Shapes: N videos, T/H/W frames, height, width, C colour channels.
"""

import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load
from torch import Tensor

from megadit.infer.sampling.resolve import resolve_settings
from megadit.models.bundle import open_bundle
from megadit.models.shared.cli.options import read_options
from megadit.models.shared.cli.setting import group, setting
from megadit.models.shared.documents import parse_json
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_json, write_json
from megadit.models.shared.tar_files import UntrustedTarFile
from megadit.train.data.prepare.prior import GROUPS, Prior, Purpose, SampleOptions, prepare_samples, prompts_of
from megadit.train.data.prepare.rewards import OF_GROUPS, Scoring, VideoScores, rewards, weighted
from megadit.train.data.prepare.states import States
from megadit.train.data.writer import is_prepared, json_member, write_members

REWARDS_FILE, SCORES_FILE = "rewards.json", "scores.json"
"""Reward of each video, and means of all scores, in the folder of the data set."""
ROLLOUTS = Purpose(
    name="rollouts",
    description="Videos of a model with rewards by your own scorer, to learn from with diffusion_nft or flow_grpo.",
    is_prior=False,
    next="train on them with train.distill.objective=diffusion_nft, of --states with flow_grpo (`megadit reward` does "
    "all of it)",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutOptions(SampleOptions):
    scoring: Scoring = group(Scoring)
    adapter: str | None = setting(None, "adapter to attach to the model", metavar="PATH")
    states: int = setting(
        0,
        "sampling steps of each video to store, for train.distill.objective=flow_grpo (default: {default})",
        low=0,
    )


def command(source: str, argv: list[str]) -> int:
    """Runs `megadit prepare rollouts`."""
    groups = GROUPS | {
        "most used": ("prompt", "prompt_file", "group_size", "scorer_dir", "reward", "clip", "seed", "overwrite"),
        "other": ("watch_dir", "extractors", "scorer_seconds", "adapter", "states"),
    }
    example = "megadit prepare rollouts bundle data/rollouts --prompt_file prompts.txt --scorer_dir my_scorer"
    about = {"description": ROLLOUTS.description, "examples": (example,)}
    options = read_options(RolloutOptions, argv, groups=groups, prog=f"megadit prepare {source}", **about)
    scoring = options.scoring
    scoring.check()
    bundle = open_bundle(options.bundle)
    settings = resolve_settings(bundle.defaults, **asdict(options.settings))
    prompts = [prompt for prompt in prompts_of(options) for _ in range(scoring.group_size)]
    is_made = is_prepared(options.out) and not options.overwrite
    with nullcontext() if is_made else VideoScores(scoring) as scores:
        prior = Prior(
            purpose=ROLLOUTS,
            prompts=prompts,
            settings=settings,
            count=len(prompts),
            seed=options.seed,
            batch_size=options.batch_size,
            adapters={} if options.adapter is None else {options.adapter: 1.0},
            describe=lambda video: scores.describe(video),
            states=States(settings, options.states) if options.states else None,
            more=scoring.request | ({"states": options.states} if options.states else {}),
        )
        count = prepare_samples(
            options, bundle, prior, lambda folder: give_rewards(scores.weights, scoring.group_size, folder)
        )
    if count is not None:
        print(f"{options.out}: {count} of {len(prompts)} videos have rewards; {ROLLOUTS.next}")
    return 0


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
        for name in OF_GROUPS.keys() & weights.keys():
            compared = (
                _compared(description, tensors) for path in shards for _, description, tensors in _samples(path)
            )
            for description, score in zip(known.values(), OF_GROUPS[name](compared, group_size), strict=True):
                description["scores"][name] = score
        scores_N = [weighted(description["scores"], weights) for description in known.values()]
        found = dict(zip(known, rewards(scores_N, group_size), strict=True))
        write_json(folder / SCORES_FILE, _summary(known.values(), scores_N, found.values()))
        write_json(folder / REWARDS_FILE, found)
    reward_of = read_json(folder / REWARDS_FILE)
    all_rewards = [reward for reward in reward_of.values() if reward is not None]
    if not all_rewards:
        shutil.rmtree(folder)  # nothing in it can be learnt from, and another attempt shall not find it
        raise UserError(
            f"none of {len(reward_of)} videos has a reward: the scorers must return {', '.join(weights)}; their "
            "errors are above"
        )
    if len({*all_rewards}) == 1:
        print("all scores of each group are equal: there is nothing to learn")
    for path in shards:
        write_members(path, _rewarded([*_samples(path)], reward_of))
    return len(all_rewards)


def _samples(path: Path) -> Iterator[tuple[str, dict[str, Any], bytes]]:
    """(key, description, tensors) of the samples of a shard."""
    with UntrustedTarFile.open(path, "r:") as tar:
        contents = {member.name: tar.extractfile(member).read() for member in tar}
    for name, content in contents.items():
        key, _, suffix = name.rpartition(".")
        if suffix == "json":
            yield key, parse_json(content, name), contents[f"{key}.safetensors"]


def _compared(description: Mapping[str, Any], tensors: bytes) -> Tensor:
    """Features of a video, if an extractor saw it, else its latents."""
    return torch.tensor(description["features"]) if "features" in description else load(tensors)["latent"]


def _rewarded(samples: Sequence[tuple], reward_of: Mapping[str, float | None]) -> Iterator[tuple[str, bytes]]:
    for key, description, tensors in samples:
        description.pop("features", None)  # training needs none
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
